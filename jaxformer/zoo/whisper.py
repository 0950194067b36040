"""Whisper, a Transformer from sound to text: Radford et al. 2022, arXiv:2212.04356, section 2.2.

The source is the logarithm of a mel spectrogram, `[B, frames, mel bins]`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import causal, full
from jaxformer.models.config import EncoderDecoder, LanguageModel, Learned, ModelConfig
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.params import Spec, Tree, linear as linear_spec

BIASES = "query|value|out|up|down|norm"  # maps with a bias; keys have none
TAPS = 3  # frames that one output of a convolution reads


def sinusoids(length: int, width: int) -> Float[np.ndarray, "S D"]:
    """sin(p w_i), then cos(p w_i), for w_i from 1 to 1 / 10,000 in equal ratios.

    In the sinusoids of Vaswani et al. 2017, the last ratio is left out.
    """
    half = width // 2
    rates = np.exp(-np.log(10_000) * np.arange(half) / max(half - 1, 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def convolution(x: Float[Array, "B T C"], params: Tree, stride: int = 1) -> Float[Array, "B U D"]:
    """y_u = sum over j of W_j x_{u stride + j - 1}, plus a bias: a kernel of three frames.

    Zeros stand before the first frame and behind the last one. U is T / stride, rounded up.
    """
    T = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    frames = [padded[:, j : j + T : stride] for j in range(TAPS)]
    windows = jnp.stack(frames, axis=-1).reshape(x.shape[0], -1, x.shape[2] * TAPS)
    kernel = params["kernel"]
    return linear("btc,cd->btd", windows, params | {"kernel": kernel.reshape(-1, kernel.shape[-1])})


@dataclass(frozen=True)
class MelFrames:
    """The front end of the encoder: two convolutions with GELU, and fixed sinusoids.

    The second convolution takes every other frame, so 2 S frames become S positions. The sinusoids
    are a variable, because files have them. `ModelConfig.positions` is None.
    """

    mel_bins: int = 80  # features of one frame

    def __post_init__(self):
        check_numbers("MelFrames.", self, mel_bins=1)

    def __call__(self, config: ModelConfig) -> Embedder:
        S, D = config.context_length, config.d_model
        if D % 2:
            raise ConfigError(f"model.d_model={D}: sinusoids of MelFrames need an even number")

        def fixed(key, shape, dtype=jnp.float32):
            return jnp.asarray(sinusoids(*shape), dtype)

        def apply(
            params: Tree, frames: Float[Array, "B T C"], inputs: Tree, context: Context
        ) -> Float[Array, "B S D"]:
            if frames.ndim != 3 or frames.shape[2] != self.mel_bins:
                raise ConfigError(
                    f"apply: source {list(frames.shape)}: expected [B, frames, {self.mel_bins}]"
                )
            x = frames.astype(params["convolution_1"]["kernel"].dtype)
            x = jax.nn.gelu(convolution(x, params["convolution_1"]), approximate=False)
            x = jax.nn.gelu(convolution(x, params["convolution_2"], 2), approximate=False)
            if x.shape[1] > S:
                raise ConfigError(
                    f"apply: source {list(frames.shape)}: {x.shape[1]} positions, where "
                    f"model.context_length={S}"
                )
            table = lax.stop_gradient(params["sinusoids"])
            return x + table[None, : x.shape[1]].astype(x.dtype)

        spec = {
            "convolution_1": _convolution_spec(self.mel_bins, D, config.std),
            "convolution_2": _convolution_spec(D, D, config.std),
            "sinusoids": Spec((S, D), (None, "embed"), fixed, trained=False),
        }
        return Embedder(spec, apply, _positions)


def _convolution_spec(channels: int, width: int, std: float) -> Tree:
    axes = "channel", "line", "embed"
    return linear_spec((channels, TAPS, width), axes, axes[:2], normal(std), bias=True)


def _positions(frames: Any) -> int:
    """The number of positions of these frames."""
    return -(-frames.shape[1] // 2)


def _whisper(
    num_layers: int, d_model: int, num_heads: int, mel_bins: int = 80, vocab_size: int = 51_865
) -> EncoderDecoder:
    sizes: dict[str, Any] = {
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "d_ff": 4 * d_model,
        "feedforward": "gelu",
        "use_bias": BIASES,
    }
    encoder = ModelConfig(
        vocab_size=0,
        context_length=1500,
        embedding=MelFrames(mel_bins),
        positions=None,
        masks=(full(),),
        heads=(),
        tie_embeddings=False,
        **sizes,
    )
    decoder = ModelConfig(
        vocab_size=vocab_size,
        context_length=448,
        positions=Learned(),
        masks=(causal(),),
        heads=(LanguageModel(),),
        **sizes,
    )
    return EncoderDecoder(encoder, decoder, share_embeddings=False)


# table 1; version 3 of the large model has more mel bins and one more language
whisper_tiny = _whisper(4, 384, 6)
whisper_base = _whisper(6, 512, 8)
whisper_small = _whisper(12, 768, 12)
whisper_medium = _whisper(24, 1024, 16)
whisper_large = _whisper(32, 1280, 20)
whisper_large_v3 = _whisper(32, 1280, 20, 128, 51_866)
