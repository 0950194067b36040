"""ResNet: from an image to a map of features. He et al. 2015, arXiv:1512.03385.

`features(config, params, images)` is the network without its classifier. Its batch norms are
frozen, as in detectors: nothing of them is trained, and they do not read the batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn.initializers import Initializer, ones, variance_scaling, zeros
from jaxtyping import Float

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.params import Spec, Tree, linear as linear_spec

Map = Float[Array, "B height width C"]
Result = Float[Array, "B lines columns D"]  # a map of another size
AXES = "channel", "line", "column", None  # of a kernel; the last one has the outputs
NORM_EPS = 1e-5
# He et al. 2015, arXiv:1502.01852, equation 14
he_normal: Initializer = variance_scaling(2.0, "fan_out", "normal", in_axis=0, out_axis=3)


class Convolution(NamedTuple):
    """The sizes of a square convolution, which has no bias: a norm follows it."""

    inputs: int  # channels
    outputs: int  # channels
    size: int  # lines and columns of the kernel, an odd number
    stride: int = 1  # of lines and columns


Chain = tuple[Convolution, ...]


def basic(inputs: int, outputs: int, stride: int) -> Chain:
    """Two convolutions of 3 x 3. Figure 5, left."""
    return Convolution(inputs, outputs, 3, stride), Convolution(outputs, outputs, 3)


def bottleneck(inputs: int, outputs: int, stride: int) -> Chain:
    """1 x 1, 3 x 3, 1 x 1, with a quarter of the channels inside. Figure 5, right.

    The stride is that of the middle convolution, as in torchvision and timm.
    """
    inside = outputs // 4
    return (
        Convolution(inputs, inside, 1),
        Convolution(inside, inside, 3, stride),
        Convolution(inside, outputs, 1),
    )


def early_bottleneck(inputs: int, outputs: int, stride: int) -> Chain:
    """A bottleneck whose first convolution has the stride, as in the paper's own code."""
    first, middle, last = bottleneck(inputs, outputs, 1)
    return first._replace(stride=stride), middle, last


@dataclass(frozen=True)
class ResNet:
    """The sizes of a network without its classifier. Table 1; by default the one of 50 layers."""

    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each stage
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # channels after each stage
    # basic, bottleneck, early_bottleneck, or your own: (inputs, outputs, stride) -> convolutions
    block: Callable = bottleneck
    stem: int = 64  # channels of the first convolution
    channels: int = 3  # of a pixel
    first_stride: int = 1  # of the first stage; that of the others is 2
    # of the stem and after each block; inside a block it is ReLU
    activation: str = "relu"

    def __post_init__(self):
        check_numbers("ResNet.", self, stem=1, channels=1, first_stride=1)
        if len(self.depths) != len(self.widths) or min((*self.depths, *self.widths), default=0) < 1:
            raise ConfigError(
                f"ResNet.depths={self.depths}, widths={self.widths}: "
                "expected two numbers from 1 for each stage"
            )
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"ResNet.activation={self.activation!r}: expected one of {', '.join(ACTIVATIONS)}"
            )

    # pixels, by line and by column, for one line or column of the result
    stride = property(lambda self: 4 * self.first_stride * 2 ** (len(self.depths) - 1))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(lines, columns) of the result for an image of this size."""
        return -(-height // self.stride), -(-width // self.stride)


def blocks(config: ResNet) -> Iterator[tuple[str, str, Chain, Convolution | None]]:
    """(stage, name, convolutions, shortcut) of each block.

    Without a shortcut, the block adds its input itself.
    """
    sizes = pairwise((config.stem, *config.widths))
    for stage, (depth, (inputs, outputs)) in enumerate(zip(config.depths, sizes, strict=True)):
        for number in range(depth):
            stride = 1 if number else 2 if stage else config.first_stride
            width = outputs if number else inputs
            keeps_shape = stride == 1 and width == outputs
            shortcut = None if keeps_shape else Convolution(width, outputs, 1, stride)
            chain = config.block(width, outputs, stride)
            yield f"stage_{stage}", f"block_{number}", chain, shortcut


def spec(config: ResNet) -> Tree:
    """{"stem": ..., "stage_0": {"block_0": {"convolution_0": ..., "shortcut": ...}}, ...}."""
    tree: Tree = {"stem": convolution_spec(stem(config))}
    for stage, name, chain, shortcut in blocks(config):
        block = {f"convolution_{i}": convolution_spec(one) for i, one in enumerate(chain)}
        if shortcut is not None:
            block["shortcut"] = convolution_spec(shortcut)
        tree.setdefault(stage, {})[name] = block
    return tree


def stem(config: ResNet) -> Convolution:
    """The first convolution."""
    return Convolution(config.channels, config.stem, 7, 2)


def convolution_spec(one: Convolution) -> Tree:
    """A kernel `[inputs, line, column, outputs]`, and the norm behind it."""
    shape = one.inputs, one.size, one.size, one.outputs
    starts = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
    norm = {
        name: Spec((one.outputs,), (None,), init, trained=False) for name, init in starts.items()
    }
    return linear_spec(shape, AXES, AXES[:3], he_normal, bias=False) | {"norm": norm}


def features(config: ResNet, params: Tree, images: Map) -> Result:
    """The last map of features, `[B, lines, columns, widths[-1]]`. The sizes are `config.grid`."""
    activation = ACTIVATIONS[config.activation]
    x = activation(convolve(stem(config), params["stem"], images))
    x = max_pool(x)
    for stage, name, chain, shortcut in blocks(config):
        own = params[stage][name]
        y = x
        for i, one in enumerate(chain):
            y = convolve(one, own[f"convolution_{i}"], jax.nn.relu(y) if i else y)
        if shortcut is not None:
            x = convolve(shortcut, own["shortcut"], x)
        x = activation(x + y)
    return x


def convolve(one: Convolution, params: Tree, x: Map) -> Result:
    """The convolution and its norm. There are zeros around the map; sizes are rounded up."""
    sides = [(one.size // 2, one.size // 2)] * 2
    strides = one.stride, one.stride
    kernel = params["kernel"].astype(x.dtype)
    axes = "NHWC", "IHWO", "NHWC"
    x = lax.conv_general_dilated(x, kernel, strides, sides, dimension_numbers=axes)
    return frozen_norm(params["norm"], x)


def frozen_norm(params: Tree, x: Map) -> Map:
    """(x - mean) scale / sqrt(variance + 1e-5) + bias, for each channel. Nothing is trained."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    fixed = {name: lax.stop_gradient(leaf).astype(wide) for name, leaf in params.items()}
    factor = fixed["scale"] * lax.rsqrt(fixed["variance"] + NORM_EPS)
    shift = fixed["bias"] - fixed["mean"] * factor
    return (x * factor[None, None, None] + shift[None, None, None]).astype(x.dtype)


def max_pool(x: Map) -> Result:
    """The largest of 3 x 3 neighbours, at every other line and column."""
    sides = (0, 0), (1, 1), (1, 1), (0, 0)
    return lax.reduce_window(x, -math.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), sides)


# Table 1
resnet_18 = ResNet((2, 2, 2, 2), (64, 128, 256, 512), basic)
resnet_34 = ResNet((3, 4, 6, 3), (64, 128, 256, 512), basic)
resnet_50 = ResNet()
resnet_101 = ResNet((3, 4, 23, 3))
resnet_152 = ResNet((3, 8, 36, 3))
