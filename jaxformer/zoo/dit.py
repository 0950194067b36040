"""A diffusion transformer: each norm reads the time of the noise and the classes of the image.

A DiT is a `ModelConfig` with `block=AdaLNZero(...)`, `norm=Unscaled()`, `embedding=Patches(...)`
and `heads=(Pixels(),)`. The caller passes the conditions:

    models.apply(model, params, images, inputs={"time": [B], "labels": [B, number of kinds]})

Peebles & Xie 2023, arXiv:2212.09748, section 3.2. `zoo.flow_matching` trains it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, zeros
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.blocks import Stream, Sublayers, add
from jaxformer.models.config import ModelConfig, Patches
from jaxformer.models.heads import Head
from jaxformer.models.layer import Block, Context, linear
from jaxformer.models.norm import norm, norm_spec
from jaxformer.ops.positions import learned
from jaxformer.params import Spec, Tree, linear as linear_map

LONGEST = 10_000.0  # ratio of the longest and the shortest wave of the time's features
SCALE = 1000.0  # of a time between 0 and 1, so that the shortest waves differ


def time_features(time: Float[Array, " B"], width: int) -> Float[Array, "B F"]:
    """cos and sin of 1000 t 10000^(-i / (F / 2)), for i = 0, 1, ..., F / 2 - 1."""
    half = width // 2
    frequencies = SCALE * LONGEST ** (-jnp.arange(half) / half)
    wide = jnp.promote_types(time.dtype, jnp.float32)
    angles = time.astype(wide)[:, None] * frequencies[None].astype(wide)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def modulated(x: Stream, shift: Float[Array, "B D"], scale: Float[Array, "B D"]) -> Stream:
    """x (1 + scale) + shift."""
    return x * (1 + scale[:, None]) + shift[:, None]


@dataclass(frozen=True)
class AdaLNZero:
    """x + gate * f(norm(x) (1 + scale) + shift) for each sub-layer f, where each gate starts at 0.

    shift, scale and gate of each sub-layer are a linear map of silu(c). They are zero at the start,
    so each layer starts as the identity. c = MLP(features of the time) + a vector of each label.
    After the last layer comes norm(x) (1 + scale) + shift. A label that does not exist gives NaN.
    Raises ConfigError for a norm with parameters, for an odd number of features, and for inputs
    that lack the time or the labels.
    """

    # number of labels of each kind, such as (4 shapes, 6 colours); () for a model without labels.
    # The next number after the last label of a kind means that the label is unknown
    labels: tuple[int, ...] = ()
    features: int = 128  # of the time

    def __post_init__(self):
        check_numbers("AdaLNZero.", self, features=2)
        if self.features % 2:
            raise ConfigError(f"AdaLNZero.features={self.features}: expected an even number")

    def __call__(self, config: ModelConfig, names: Sequence[str]) -> Block:
        if norm_spec(config):
            raise ConfigError(
                "model.block=AdaLNZero: the conditions scale and shift what a norm returns; "
                "give the model a norm without parameters: norm=Unscaled()"
            )
        D = config.d_model

        def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
            c = self.condition(context.shared["condition"], context.inputs, x.dtype)
            parts = linear("bd,dnke->bnke", c, params["modulation"])
            for n, f in enumerate(sublayers.values()):
                shift, scale, gate = parts[:, n, 0], parts[:, n, 1], parts[:, n, 2]
                x = add(x, gate[:, None] * f(modulated(norm(config, {}, x), shift, scale)))
            return x

        def end(params: Tree, x: Stream, context: Context) -> Stream:
            c = self.condition(context.shared["condition"], context.inputs, x.dtype)
            parts = linear("bd,dke->bke", c, params["final_modulation"])
            return modulated(norm(config, {}, x), parts[:, 0], parts[:, 1])

        of_layer = (D, len(names), 3, D), ("embed", None, None, None)
        of_end = (D, 2, D), ("embed", None, None)
        return Block(
            {"modulation": linear_map(*of_layer, ("embed",), zeros)},
            apply,
            {"final_modulation": linear_map(*of_end, ("embed",), zeros)},
            end=end,
            shared={"condition": self.spec(config)},
        )

    def spec(self, config: ModelConfig) -> Tree:
        """The parameters of c."""
        D, F = config.d_model, self.features
        tree: Tree = {
            "time_in": linear_map((F, D), ("channel", "embed"), ("channel",), normal(0.02)),
            "time_out": linear_map((D, D), ("embed", None), ("embed",), normal(0.02)),
        }
        for kind, count in enumerate(self.labels):
            tree[f"labels_{kind}"] = Spec((count + 1, D), (None, "embed"), normal(0.02))
        return tree

    def condition(self, params: Tree, inputs: Any, dtype: Any) -> Float[Array, "B D"]:
        """silu(c), in `dtype`."""
        time, labels = self.checked(inputs)
        features = time_features(time, self.features).astype(dtype)
        hidden = jax.nn.silu(linear("bf,fd->bd", features, params["time_in"]))
        c = linear("bd,de->be", hidden, params["time_out"])
        for kind in range(len(self.labels)):
            c = c + learned(labels[:, kind, None], params[f"labels_{kind}"])[:, 0].astype(dtype)
        return jax.nn.silu(c)

    def checked(self, inputs: Any) -> tuple[Float[Array, " B"], Int[Array, "B K"]]:
        """The time [B] and the labels [B, kinds] of `models.apply(..., inputs=...)`."""
        wanted = ["time", "labels"] if self.labels else ["time"]
        given = inputs if isinstance(inputs, Mapping) else {}
        if missing := [name for name in wanted if name not in given]:
            raise ConfigError(
                f"inputs: AdaLNZero reads {missing[0]!r}; give models.apply(..., "
                'inputs={"time": numbers [B], "labels": integers [B, number of kinds]})'
            )
        time = jnp.asarray(given["time"])
        B = time.shape[0] if time.ndim else 0
        labels = jnp.asarray(given.get("labels", jnp.zeros((B, 0), jnp.int32)))
        if time.shape != (B,) or labels.shape != (B, len(self.labels)):
            raise ConfigError(
                f"inputs: time {list(time.shape)}, labels {list(labels.shape)}: expected [B] and "
                f"[B, {len(self.labels)}]"
            )
        return time, labels


@dataclass(frozen=True)
class Pixels:
    """A head: a linear map of each position back to its patch, an image [B, height, width, C].

    It starts at zero. Raises ConfigError for patches that are no `Patches`, that have tokens beside
    them, or that leave pixels unread.
    """

    name: str = "pixels"  # the key of its parameters and of its output
    patches: Patches | None = None  # how the image is cut; None: as the model's embedding cuts it

    def __call__(self, config: ModelConfig) -> Head:
        patches = self.patches or config.embedding
        has_tokens = isinstance(patches, Patches) and (patches.class_token or patches.extra_tokens)
        if not isinstance(patches, Patches) or has_tokens or any(patches.unread):
            raise ConfigError(
                f"model.heads={self.name}: it answers with the pixels of each position; expected "
                "embedding=Patches(class_token=False) without extra tokens and unread pixels"
            )
        lines, columns = patches.grid
        patch = *patches.patch, patches.channels
        axes = ("embed", "line", "column", "channel")  # Muon leaves the last layer to AdamW
        spec = linear_map((config.hidden_width, *patch), axes, ("embed",), zeros)

        def apply(
            params: Tree, hidden: Float[Array, "B T D"], *_: Any
        ) -> Float[Array, "B height width C"]:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            pixels = linear("btd,dijc->btijc", hidden, params, wide)
            pixels = pixels.reshape(-1, lines, columns, *patch)
            # [B, lines, i, columns, j, C]
            image = pixels.transpose(0, 1, 3, 2, 4, 5)
            return image.reshape(-1, *patches.image, patches.channels)

        return Head(self.name, spec, apply)
