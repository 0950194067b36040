"""ViViT: a video as a sequence of tubelets, with attention first over space and then over time.

Arnab et al. 2021, arXiv:2103.15691. This is its model 3, factorised self-attention:

    ModelConfig(embedding=Tubelets(...), mixer=spatial_attention, block=space_then_time, ...)

An attention of the trunk reads the tubelets of one moment, and a second one the tubelets of one
place. The cost falls from (n S)^2 to n S (n + S) pairs, for n moments of S places.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops, params
from jaxformer.errors import ConfigError, check_numbers, check_whole
from jaxformer.masks import full, segments
from jaxformer.models.blocks import Stream, Sublayers, add, pre_norm
from jaxformer.models.config import Axial, Learned, ModelConfig, Sinusoidal
from jaxformer.models.layer import Block, Context, Embedder, Mixer, MixerOutput, linear
from jaxformer.models.mixers.attention import attention
from jaxformer.models.norm import norm, norm_spec
from jaxformer.params import Tree
from jaxformer.zoo.visible import visibility

Split = Callable[[Array], Array]  # [B, T, ...] -> sequences [B2, T2, ...]


@dataclass(frozen=True)
class Tubelets:
    """A linear map of each tubelet of videos [B, frames, height, width, channels].

    The order is moment by moment; within a moment, line by line. A video may have fewer frames than
    `frames`, in whole tubelets. Section 3.2. Raises ConfigError for tubelets that do not divide a
    video, and for videos of another size.
    """

    frames: int = 32  # of the longest video
    image: tuple[int, int] = (224, 224)  # height and width of a frame in pixels
    tubelet: tuple[int, int, int] = (2, 16, 16)  # its frames, its height and its width in pixels
    channels: int = 3  # of a pixel

    def __post_init__(self):
        check_numbers("Tubelets.", self, frames=1, channels=1)
        for name, count in (("image", 2), ("tubelet", 3)):
            sizes = getattr(self, name)
            if not (isinstance(sizes, tuple | list) and len(sizes) == count):
                raise ConfigError(f"Tubelets.{name}={sizes}: expected {count} numbers")
            for size in sizes:
                check_whole(f"Tubelets.{name}", size)
        whole = (self.frames, *self.image)
        if any(size % part for size, part in zip(whole, self.tubelet, strict=True)):
            raise ConfigError(
                f"Tubelets.tubelet={self.tubelet} does not divide the frames, height and width "
                f"{whole}; expected sizes that do"
            )

    @property
    def places(self) -> int:
        """S, the number of tubelets of one moment."""
        return math.prod(self.image) // math.prod(self.tubelet[1:])

    @property
    def length(self) -> int:
        """The number of tubelets of a video with all its frames."""
        return self.frames // self.tubelet[0] * self.places

    def __call__(self, config: ModelConfig) -> Embedder:
        shape = self.channels, *self.tubelet
        axes = "channel", "length", "line", "column"
        spec = params.linear(
            (*shape, config.d_model),
            (*axes, "embed"),
            axes,
            normal(math.prod(shape) ** -0.5),
            config.has_bias("patches"),
        )

        def apply(
            params: Tree, videos: Float[Array, "B F height width C"], inputs: Tree, context: Context
        ) -> Float[Array, "B T D"]:
            tree = params["tubelets"]
            flat = tree | {"kernel": tree["kernel"].reshape(-1, config.d_model)}
            x = tubelets(videos.astype(context.dtype or tree["kernel"].dtype), self.tubelet)
            return linear("btp,pd->btd", x, flat)

        return Embedder({"tubelets": spec}, apply, self.count)

    def count(self, videos: Float[Array, "..."]) -> int:
        """The number of tubelets of these videos. Raises ConfigError for another size."""
        expected = *self.image, self.channels
        frames = videos.shape[1] if videos.ndim == 5 else 0
        is_known = videos.shape[2:] == expected and 0 < frames <= self.frames
        if not is_known or frames % self.tubelet[0]:
            raise ConfigError(
                f"videos {list(videos.shape)}: expected [B, frames, {', '.join(map(str, expected))}"
                f"] with {self.frames} frames, or fewer in multiples of {self.tubelet[0]}"
            )
        return frames // self.tubelet[0] * self.places


def tubelets(
    videos: Float[Array, "B F height width C"], tubelet: tuple[int, int, int]
) -> Float[Array, "B T P"]:
    """Each tubelet as a vector: channel, then frame, then line, then column."""
    B, F, height, width, C = videos.shape
    f, i, j = tubelet
    x = videos.reshape(B, F // f, f, height // i, i, width // j, j, C)
    # [B, moment, line, column, C, f, i, j]
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(B, -1, C * f * i * j)


def central_frame(kernel: Float[Array, "C i j D"], frames: int) -> Float[Array, "C f i j D"]:
    """The kernel of images at frame floor(f / 2), counted from 0, and 0 elsewhere: section 3.4.

    A new video model then reads one frame of each tubelet, as an image model does.
    """
    empty = jnp.zeros((kernel.shape[0], frames, *kernel.shape[1:]), kernel.dtype)
    return empty.at[:, frames // 2].set(kernel)


def inflated(kernel: Float[Array, "C i j D"], frames: int) -> Float[Array, "C f i j D"]:
    """The kernel of images divided by f, at each of f frames: section 3.4."""
    return jnp.repeat(kernel[:, None] / frames, frames, axis=1)


def over_space(x: Array, places: int) -> Array:
    """[B, n S, ...] as the sequences of n moments, [B n, S, ...]."""
    return x.reshape(-1, places, *x.shape[2:])


def over_time(x: Array, places: int) -> Array:
    """[B, n S, ...] as the sequences of S places, [B S, n, ...]."""
    x = x.reshape(x.shape[0], -1, places, *x.shape[2:]).swapaxes(1, 2)
    return x.reshape(-1, *x.shape[2:])


def from_time(x: Float[Array, "B2 n D"], places: int) -> Float[Array, "B T D"]:
    """[B S, n, D] as [B, n S, D]: the inverse of `over_time`."""
    x = x.reshape(-1, places, *x.shape[1:]).swapaxes(1, 2)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def context_of(split: Split, context: Context, x: Stream) -> Context:
    """The context of the sequences that `split` makes of x. A token sees its own sequence alone.

    Padding stays hidden. Raises NotImplementedError for a mask that hides more than padding.
    """
    B, T, _ = x.shape
    mask = full()
    if context.mask != full():
        view = visibility(context.mask, T, T, "vivit", takes_causal=False)
        ids = (jnp.broadcast_to(each, (B, T)) for each in (view.q_ids, view.kv_ids))
        mask = segments(*map(split, ids))
    padding_mask = None if context.padding_mask is None else split(context.padding_mask)
    return replace(context, mask=mask, padding_mask=padding_mask)


def places_of(config: ModelConfig) -> int:
    """S of the config's tubelets. Raises ConfigError for a config that has no places."""
    if not hasattr(config.embedding, "places"):
        raise ConfigError(
            f"model.embedding={config.embedding}: attention over space and time needs "
            "zoo.vivit.Tubelets(...), or an embedding of your own with an attribute `places`"
        )
    if not isinstance(config.positions, Learned | Sinusoidal | Axial | None):
        raise ConfigError(
            f"model.positions={config.positions}: ViViT adds positions to its tubelets; expected "
            "Learned(), Sinusoidal() or None"
        )
    if set(config.masks) != {full()}:
        raise ConfigError(f"model.masks={config.masks}: expected (full(),) for a ViViT")
    return config.embedding.places


def spatial_attention(config: ModelConfig) -> Mixer:
    """The trunk's attention among the tubelets of one moment. Section 3.3, model 3."""
    split = partial(over_space, places=places_of(config))
    plain = attention(config)

    def apply(params: Tree, x: Stream, context: Context) -> MixerOutput:
        result = plain.apply(params, split(x), context_of(split, context, x))
        return result._replace(out=result.out.reshape(x.shape))

    return plain._replace(apply=apply, state=None)


def space_then_time(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + space(norm(x)), then x + time(norm(x)), then x + mlp(norm(x)). Section 3.3, model 3.

    `space` is the model's mixer. `time` is the trunk's attention among the tubelets of one place,
    with parameters and a norm of its own. A norm ends the stream.
    """
    S = places_of(config)
    split = partial(over_time, places=S)
    plain = pre_norm(config, names)
    attend = attention(config)

    def time(params: Tree, y: Stream, context: Context) -> Stream:
        key = context.dropout_key
        inner_key, out_key = (None, None) if key is None else jax.random.split(key)
        inner = replace(context, dropout_key=inner_key, tap=context.tap.inside("temporal"))
        out = attend.apply(params, split(y), context_of(split, inner, y)).out
        return ops.dropout(from_time(out, S), config.dropout_rate, out_key)

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        x = add(x, sublayers["attention"](norm(config, params["attention_norm"], x)))
        x = add(x, time(params["temporal"], norm(config, params["temporal_norm"], x), context))
        return add(x, sublayers["feedforward"](norm(config, params["feedforward_norm"], x)))

    own = {"temporal": attend.spec, "temporal_norm": norm_spec(config)}
    return plain._replace(spec=plain.spec | own, apply=apply)
