"""Floating-point operations (FLOPs) of a model, and the peak of the chips that run it."""

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.models.config import Classification, EncoderDecoder, ModelConfig
from jaxformer.models.feedforward import feed
from jaxformer.models.heads import language_model
from jaxformer.models.stacks import layout

GIB = 2**30


class Chip(NamedTuple):
    """One device as JAX sees it. Speeds are in bytes/s."""

    peak: float  # dense bfloat16 FLOP/s
    memory: float  # bytes that a program may use; for TPUs, taken from the compiler's messages
    bandwidth: float  # of the memory
    network: float  # all links to its neighbours, both directions together
    # its share of the network between hosts (GPUs) or between slices of a pod (TPUs), one direction
    outside: float
    links: int  # neighbours; 0 if a switch joins the devices of a host
    source: str
    # fraction of the peak that large products reached in a published run (docs/laptop-to-pod.md);
    # 1: not known
    reached: float = 1.0


_GOOGLE = "docs.cloud.google.com/tpu/docs/"
_XLA = "openxla/xla gpu/target_config/specs"
_MLCOMMONS = "mlcommons systems and vendors, 2026-11"
# no MFU and no plan for other devices
CHIPS = {
    "TPU v4": Chip(
        275e12, 30.75 * GIB, 1200e9, 600e9, 6.25e9, 6,
        f"{_GOOGLE}v4, 2026-11; networks from memory",
    ),
    "TPU v5 lite": Chip(
        197e12, 15.75 * GIB, 819e9, 400e9, 3.125e9, 4,
        f"{_GOOGLE}v5e, 2026-11", 0.84,
    ),
    "TPU v5": Chip(
        459e12, 95.0 * GIB, 2765e9, 1200e9, 6.25e9, 6,
        f"{_GOOGLE}tpu7x, 2026-11",
    ),
    "TPU v6 lite": Chip(
        918e12, 31.25 * GIB, 1638e9, 800e9, 12.5e9, 4,
        f"{_GOOGLE}v6e and tpu7x, 2026-11", 0.6,
    ),
    "TPU7x": Chip(
        1153e12, 94.75 * GIB, 3690e9, 600e9, 6.25e9, 6,
        f"{_GOOGLE}tpu7x, 2026-11; two devices a chip",
    ),
    "NVIDIA A100-SXM4-40GB": Chip(
        312e12, 39.0 * GIB, 1555e9, 600e9, 25e9, 0,
        "from memory",
    ),
    "NVIDIA A100-SXM4-80GB": Chip(
        312e12, 79.0 * GIB, 2039e9, 600e9, 25e9, 0,
        f"{_XLA}; peak and networks from memory",
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        989e12, 79.0 * GIB, 3352e9, 900e9, 50e9, 0,
        f"{_XLA}; peak, networks {_MLCOMMONS}",
    ),
    "NVIDIA H200": Chip(
        989e12, 139.0 * GIB, 4800e9, 900e9, 50e9, 0,
        f"{_XLA}; mlcommons/inference_results_v4.1, 2026-11",
    ),
    "NVIDIA B200": Chip(
        2250e12, 177.0 * GIB, 7672e9, 1800e9, 50e9, 0,
        f"{_XLA}; glennklockwood.com/garden, 2026-11",
    ),
}  # fmt: skip

Trained = Callable[[str], bool]  # whether the parameter of this path has a gradient


def training_flops(
    config: ModelConfig | EncoderDecoder,
    length: int,
    source: int | None = None,
    trained: Trained | None = None,
) -> int:
    """FLOPs of a training step for one token: 6 for each weight in a product, 12 L N H T attention.

    The attention is full, T x T. This is the usual convention ("model FLOPs"), Chowdhery et al.
    2022, appendix B: 2 FLOPs for a multiply-add, the backward pass costs twice the forward pass,
    recomputation counts nothing, and causal masks get no discount. Only the routed experts that a
    token visits are counted. In an encoder-decoder, the figure is for one target token and its
    share of the row's `source` tokens, by default one.

    `trained` says which parameters have a gradient (None: all). A weight without a gradient counts
    4: for its output, and for the gradient that passes through it. It counts 2 if nothing trains in
    its part of the model or before it.
    """
    source = length if source is None else source

    def width(stack):
        return layer_runs(stack) * stack.num_heads * stack.head_size

    passes = _passes(config, trained)

    def backward(part):
        return 12 if passes(part) else 4

    if isinstance(config, EncoderDecoder):
        # the decoder attends to the source too
        of_decoder = backward("decoder/layers") * width(config.decoder) * (length + source)
        of_encoder = backward("encoder/layers") * width(config.encoder) * source
        attention = of_decoder + of_encoder * _ratio(length, source)
    else:
        attention = backward("layers") * width(config) * length
    return _weight_flops(config, length, source, trained) + round(attention)


def layer_runs(config: ModelConfig) -> int:
    """The number of layers that a token runs through.

    A stack of one's own that repeats layers says it by a method `layer_runs(config)`.
    """
    of_stack = getattr(config.stack, "layer_runs", None)
    return config.num_layers if of_stack is None else of_stack(config)


def _weight_flops(
    config: ModelConfig | EncoderDecoder, length: int, source: int, trained: Trained | None = None
) -> int:
    """FLOPs of the weights in products, for one token.

    Weights that read the source count for each source token.
    """
    of_source = (
        "encoder/",
        "decoder/layers/cross_attention/key",
        "decoder/layers/cross_attention/value",
    )

    def tokens(path):
        reads_source = isinstance(config, EncoderDecoder) and path.startswith(of_source)
        return _ratio(length, source) if reads_source else 1.0

    passes = _passes(config, trained)

    def flops(path: str) -> int:
        if trained is None or trained(path):
            return 6
        # a tied table is a product at the end of the model
        return 4 if passes(path.replace("embedding/tokens", "heads/tokens")) else 2

    terms = [
        flops(path) * size * share * tokens(path)
        for path, (size, share) in products(config).items()
    ]
    return round(sum(terms))


def _passes(config: ModelConfig | EncoderDecoder, trained: Trained | None) -> Callable[[str], bool]:
    """A function of a path: whether gradients pass through the part of the model at that path.

    They do if something trains in that part or before it.
    """
    order = ["embedding", "layers", ""]
    if isinstance(config, EncoderDecoder):
        encoder = ["encoder/embedding", "encoder/layers", "encoder/"]
        order = [*encoder, "decoder/embedding", "decoder/layers", ""]

    def index(path):
        return next(number for number, prefix in enumerate(order) if path.startswith(prefix))

    paths = params.paths(models.spec(config))
    trained_parts = [index(path) for path in paths if trained is None or trained(path)]
    first = min(trained_parts, default=len(order))
    return lambda path: index(path) >= first


def _ratio(length: int, source: int) -> float:
    return 1.0 if source == length else source / length


def products(config: ModelConfig | EncoderDecoder) -> dict[str, tuple[int, float]]:
    """{path: (size, fraction used for one token)} of every matrix that multiplies activations."""
    matrices = {}
    for path, leaf in params.paths(models.spec(config)).items():
        stack = config if isinstance(config, ModelConfig) else getattr(config, path.split("/")[0])
        share = 1.0
        if "expert" in leaf.axes[:-1]:  # the last axis of a router is its logits
            visited = feed(layout.of_parameter(stack, path)).visited
            E = leaf.shape[leaf.axes.index("expert")]
            share = 1.0 if visited is None else visited / E
        if "layers" in leaf.axes:
            share *= layer_runs(stack) / stack.num_layers
        head = next(
            (head for head in stack.heads if f"heads/{getattr(head, 'name', None)}/" in path), None
        )
        if isinstance(head, Classification):
            share = 1 / stack.context_length  # only one position is classified
        share_of_weight = getattr(stack.mixer, "share_of_weight", None)
        # a mixer may sum over the length with this weight
        if share_of_weight is not None and "length" in leaf.contracts:
            share = share_of_weight(stack)
        if leaf.contracts:
            matrices[path] = params.count(leaf), share
        elif path.endswith("embedding/tokens") and stack.tie_embeddings and language_model(stack):
            matrices[path] = params.count(leaf), 1.0
    return matrices


def utilization(
    config: ModelConfig | EncoderDecoder,
    length: int,
    tokens_per_second: float,
    devices: int,
    device_kind: str,
    source: int | None = None,
    trained: Trained | None = None,
) -> dict[str, float]:
    """Model FLOPs over the devices' peak (MFU), in two conventions.

    One takes `training_flops`, the other 6 N for a token, without attention. Neither counts
    recomputation; for hardware utilization use `flops.count` of the step. Raises ConfigError for
    unknown devices.
    """
    if device_kind not in CHIPS:
        raise ConfigError(f"{device_kind}: its peak is not known; there are {', '.join(CHIPS)}")

    def share(flops):
        return flops * tokens_per_second / (devices * CHIPS[device_kind].peak)

    weights = _weight_flops(config, length, length if source is None else source, trained)
    return {
        "6N+12LNHT": share(training_flops(config, length, source, trained)),
        "6N": share(weights),
    }


def table(config: ModelConfig | EncoderDecoder) -> str:
    """A table of all parameters: size, forward FLOPs for one token, shape and axes; then totals."""
    leaves = params.paths(models.spec(config))
    matrices = products(config)
    length = models.last_stack(config).context_length
    width = max(map(len, leaves))
    lines = [f"{'parameter':<{width}}  {'numbers':>15}  {'FLOPs a token':>13}  shape"]
    for path, leaf in leaves.items():
        size, share = matrices.get(path, (0, 0.0))
        shape = " ".join(
            f"{axis or '-'}={length}" for axis, length in zip(leaf.axes, leaf.shape, strict=True)
        )
        flops = f"{2 * size * share:.3g}" if size else "-"
        lines.append(f"{path:<{width}}  {math.prod(leaf.shape):>15,}  {flops:>13}  {shape}")
    total = sum(params.count(leaf) for leaf in leaves.values())
    step_flops = training_flops(config, length)
    note = f"with attention over {length} positions; {step_flops:.3g} FLOPs a trained token"
    return "\n".join([*lines, f"{'total':<{width}}  {total:>15,}  {step_flops / 3:>13.3g}  {note}"])
