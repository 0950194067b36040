"""PatchTST: a time series as patches of values, and the forecast as a linear map of all patches.

Nie et al. 2022, arXiv:2211.14730. A model has `embedding=SeriesPatches(...)`, `heads=(Quantiles(
...),)` and `masks=(full(),)`. Each row of a batch is one series [B, length]; channels are rows:

    forecast = models.apply(config, params, as_rows(series)).logits   # [B C, horizon, levels]
    as_channels(forecast, C)                                          # [B, horizon, C, levels]

The authors' encoder has a batch norm; here the norm is the config's.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import models, params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.heads import Head
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.params import Tree

SMALLEST = 1e-5  # deviation, as a share of the largest value of a series: less is rounding


def as_rows(series: Float[Array, "B length C"]) -> Float[Array, "R length"]:
    """Channel independence: each channel is a row of its own, R = B C. Section 3.1."""
    return series.swapaxes(1, 2).reshape(-1, series.shape[1])


def as_channels(rows: Float[Array, "R U *levels"], channels: int) -> Float[Array, "B U C *levels"]:
    """[B C, U, ...] as [B, U, C, ...], U future values: the inverse of `as_rows`."""
    return jnp.moveaxis(rows.reshape(-1, channels, *rows.shape[1:]), 1, 2)


def statistics(series: Float[Array, "B length"]) -> tuple[Float[Array, "B 1"], Float[Array, "B 1"]]:
    """(mean, standard deviation) of each series, float32 or wider. The deviation is above 0.

    A constant series has the deviation 1e-5 of its value, so that rounding errors stay small. A
    series of zeros has the deviation 1.
    """
    x = series.astype(jnp.promote_types(series.dtype, jnp.float32))
    mean = x.mean(axis=1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=1, keepdims=True)
    smallest = SMALLEST * jnp.abs(x).max(axis=1, keepdims=True)
    squared = variance + jnp.square(smallest)
    return mean, jnp.sqrt(jnp.where(squared > 0, squared, 1))


def patches_of(
    series: Float[Array, "B length"], patch: int, stride: int
) -> Float[Array, "B T patch"]:
    """Patches that begin every `stride` values, T = floor((length - patch) / stride) + 2.

    The last value is first repeated `stride` times at the end. Section 3.1.
    """
    padded = jnp.pad(series, ((0, 0), (0, stride)), mode="edge")
    T = (series.shape[1] - patch) // stride + 2
    places = stride * jnp.arange(T)[:, None] + jnp.arange(patch)[None]
    return padded[:, places]


@dataclass(frozen=True)
class SeriesPatches:
    """A linear map of each patch of (x - mean) / deviation: instance normalisation, section 3.1.

    Raises ConfigError for a patch longer than the series, and for series of another length.
    """

    length: int = 336  # values of a series, the look-back window
    patch: int = 16  # values of a patch
    stride: int = 8  # values between the starts of two patches

    def __post_init__(self):
        check_numbers("SeriesPatches.", self, length=1, patch=1, stride=1)
        if self.patch > self.length:
            raise ConfigError(
                f"SeriesPatches.patch={self.patch}: longer than SeriesPatches.length={self.length}"
            )

    @property
    def patches(self) -> int:
        """T, the number of patches of a series."""
        return (self.length - self.patch) // self.stride + 2

    def __call__(self, config: ModelConfig) -> Embedder:
        def apply(
            params: Tree, series: Float[Array, "B length"], inputs: Tree, context: Context
        ) -> Float[Array, "B T D"]:
            mean, deviation = statistics(series)
            x = (series - mean) / deviation
            dtype = context.dtype or params["patches"]["kernel"].dtype
            x = patches_of(x, self.patch, self.stride).astype(dtype)
            return linear("btp,pd->btd", x, params["patches"])

        axes = "line", "embed"
        start = normal(self.patch**-0.5)
        bias = config.has_bias("patches")
        spec = params.linear((self.patch, config.d_model), axes, axes[:1], start, bias)
        return Embedder({"patches": spec}, apply, self.count)

    def count(self, series: Float[Array, "..."]) -> int:
        """The number of patches of these series. Raises ConfigError for another length."""
        if series.ndim != 2 or series.shape[1] != self.length:
            raise ConfigError(
                f"series {list(series.shape)}: expected [B, {self.length}]; "
                "zoo.patchtst.as_rows makes a row of each channel"
            )
        return self.patches


@dataclass(frozen=True)
class Quantiles:
    """A head: quantiles of each future value, [B, horizon, levels], in ascending order.

    A linear map of all patches together, times the deviation, plus the mean of the series. Section
    3.1; the paper's head has one output for each future value. Sorted quantiles have no larger loss
    than crossing ones: Chernozhukov et al. 2010. Raises ConfigError for an embedding without
    `patches`, and for padding.
    """

    horizon: int = 96  # future values
    levels: tuple[float, ...] = (0.1, 0.5, 0.9)  # probabilities below each quantile, ascending
    name: str = "quantiles"  # the key of its parameters and of its output

    def __post_init__(self):
        check_numbers("Quantiles.", self, horizon=1)
        ascending = sorted(set(self.levels)) == list(self.levels)
        if not (self.levels and ascending and self.levels[0] > 0 and self.levels[-1] < 1):
            raise ConfigError(
                f"Quantiles.levels={self.levels}: expected ascending numbers between 0 and 1"
            )

    def __call__(self, config: ModelConfig) -> Head:
        series = config.embedding
        if not hasattr(series, "patches"):
            raise ConfigError(
                f"model.heads={self.name}: it forecasts series; expected "
                "embedding=zoo.patchtst.SeriesPatches(...), or an embedding of your own with an "
                "attribute `patches`"
            )
        shape = series.patches, config.hidden_width, self.horizon, len(self.levels)
        axes = "length", "embed", "class", None

        def apply(
            params: Tree,
            hidden: Float[Array, "B T D"],
            padding_mask: Any,
            inputs: Tree,
            tokens: Any,
        ) -> Float[Array, "B horizon levels"]:
            if padding_mask is not None:
                raise ConfigError(
                    "apply: segment_ids: the head of PatchTST reads every patch; give series "
                    "without padding"
                )
            mean, deviation = statistics(tokens)
            y = linear("btd,tduq->buq", hidden, params, mean.dtype)
            return jnp.sort(y * deviation[:, :, None] + mean[:, :, None], axis=-1)

        spec = params.linear(shape, axes, axes[:2], normal(config.std))
        return Head(self.name, spec, apply)


def quantile_loss(
    forecast: Float[Array, "*rest Q"], truth: Float[Array, "*rest"], levels: tuple[float, ...]
) -> Float[Array, "*rest"]:
    """The mean over levels q of max(q e, (q - 1) e), where e = truth - forecast.

    For q = 0.5 it is half of the absolute error. Koenker & Bassett 1978.
    """
    q = jnp.asarray(levels, forecast.dtype).reshape(*(1,) * truth.ndim, -1)
    errors = truth[..., None] - forecast
    return jnp.maximum(q * errors, (q - 1) * errors).mean(axis=-1)


def quantile_regression(model: Any, params: Any, batch: dict, context: Any) -> LossSums:
    """An objective: the quantile loss of `future` [B, horizon] given `series` [B, length].

    It is a mean over the horizon. `weights` [B] is 0 for a series that does not count. Raises
    ConfigError for a model whose first head has no quantiles, and for another horizon.
    """
    head = next(iter(model.heads), None)
    if not (hasattr(head, "horizon") and hasattr(head, "levels")):
        raise ConfigError(
            f"model.heads: the first one is {head}; expected zoo.patchtst.Quantiles, or a head of "
            "your own with the attributes horizon and levels"
        )
    future, weights = batch["future"], batch["weights"]
    if future.shape[1:] != (head.horizon,):
        raise ConfigError(f"data: future {list(future.shape)}: expected [B, {head.horizon}]")
    output = models.apply(
        model, params, batch["series"], dropout_key=context.key, dtype=context.dtype
    )
    errors = quantile_loss(output.logits, future, head.levels).mean(axis=1)
    sums = LossSums(weighted_sum(errors, weights), weights.sum(), unit="forecasts")
    return with_own(sums, output)
