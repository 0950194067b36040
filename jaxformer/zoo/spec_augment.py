"""SpecAugment, random bands of a spectrogram hidden in training: Park et al. 2019.

arXiv:1904.08779, section 2. Whisper's second large model was trained with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jaxtyping import Bool, Float, Int

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.embedding import run as run_embedder
from jaxformer.models.layer import Context, Embedder
from jaxformer.params import Tree


def in_a_band(
    key: Array, length: int, widest: int, used: int | Int[Array, ""] | None = None
) -> Bool[Array, " length"]:
    """True for places first <= i < first + width of a random band.

    width is uniform in 0 ... widest, and first in 0 ... used - width. The first `used` places may
    be in the band, by default all of them.
    """
    used = length if used is None else used
    of_width, of_first = random.split(key)
    width = random.randint(of_width, (), 0, jnp.minimum(widest, used) + 1)
    first = random.randint(of_first, (), 0, used - width + 1)
    places = jnp.arange(length)
    return (first <= places) & (places < first + width)


def without_bands(
    key: Array,
    x: Float[Array, "T C"],
    bins: int,
    frames: int,
    bands: int = 1,
    gaps: int = 1,
    used: int | Int[Array, ""] | None = None,
) -> Float[Array, "T C"]:
    """The spectrogram with its mean in `bands` bands of mel bins, and in `gaps` bands of frames.

    A band has at most `bins` bins or `frames` frames. Bands may overlap. Of T frames the first
    `used` are sound, by default all: padding behind them stays, and counts in no mean.
    """
    T, C = x.shape
    used = T if used is None else used
    of_bins, of_frames = random.split(key)
    hidden = jnp.zeros((T, C), bool)
    for each in random.split(of_bins, bands):
        hidden |= in_a_band(each, C, bins)[None, :]
    for each in random.split(of_frames, gaps):
        hidden |= in_a_band(each, T, frames, used)[:, None]
    is_sound = (jnp.arange(T) < used)[:, None]
    return jnp.where(hidden & is_sound, jnp.mean(x, where=is_sound), x)


@dataclass(frozen=True)
class SpecAugment:
    """An embedding of spectrograms that hides bands of its input in training.

    Each spectrogram of a batch has bands of its own. Evaluation and decoding hide nothing, and
    padding stays. Raises ConfigError for bands that are wider than the spectrogram.
    """

    embedding: Callable  # what reads the spectrogram, such as MelFrames(80)
    bins: int = 27  # of the widest band of mel bins; the paper's policy LD
    frames: int = 100  # of the widest band of frames
    bands: int = 2  # of mel bins
    gaps: int = 2  # bands of frames

    def __post_init__(self):
        check_numbers("SpecAugment.", self, bins=0, frames=0, bands=0, gaps=0)

    @property
    def source(self) -> str | None:
        """The name of the inputs in which the embedding finds a source, if it has one."""
        return getattr(self.embedding, "source", None)

    def __call__(self, config: ModelConfig) -> Embedder:
        embedder = self.embedding(config)

        def apply(
            params: Tree, x: Float[Array, "B T C"], inputs: Tree, context: Context
        ) -> Float[Array, "B S D"]:
            if context.dropout_key is not None:
                x = self.hide(context.dropout_key, x, context.padding_mask)
            return run_embedder(embedder, params, x, inputs, context)

        return embedder._replace(apply=apply)

    def hide(
        self, key: Array, x: Float[Array, "B T C"], padding_mask: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B T C"]:
        """The spectrograms without the bands of this step.

        `padding_mask` is that of the S positions that the embedding makes of T frames.
        """
        if x.ndim != 3 or self.frames > x.shape[1] or self.bins > x.shape[2]:
            raise ConfigError(
                f"apply: source {list(x.shape)}: expected [B, frames, mel bins] with at least "
                f"{self.frames} frames and {self.bins} bins, the widest bands of SpecAugment"
            )
        B, T, _ = x.shape
        used = jnp.full(B, T)
        if padding_mask is not None:
            frames_a_position = -(-T // padding_mask.shape[1])
            used = jnp.minimum(padding_mask.sum(axis=1) * frames_a_position, T)

        def of_one(key, x, used):
            return without_bands(key, x, self.bins, self.frames, self.bands, self.gaps, used)

        return jax.vmap(of_one)(random.split(key, B), x, used)

    def evaluation(self) -> Any:
        """The embedding alone, which has the same parameters."""
        inner = self.embedding
        return inner.evaluation() if hasattr(inner, "evaluation") else inner
