"""Floating-point operations of a model, and what the chip could have done."""

from jaxformer import models, params
from jaxformer.models.config import ModelConfig

# Dense bfloat16 peak, FLOP/s a device, from the makers' data sheets as of 2026-11. Unknown devices have no MFU.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def training_flops(config: ModelConfig, length: int) -> int:
    """FLOPs a token of one training step: 6 for each weight in a product, 12 L N H T for full T x T attention.

    2 FLOPs a multiply-add, backward twice the forward, nothing for recomputation, no discount for causal masks: the
    convention of Chowdhery et al. 2022, appendix B ("model FLOPs"), under which MFU figures are usually quoted.
    """
    leaves = params.paths(models.spec(config))
    multiplied = sum(params.count(leaf) for leaf in leaves.values() if leaf.contracts)
    if config.tie_embeddings:
        multiplied += config.vocab_size * config.d_model
    return 6 * multiplied + 12 * config.num_layers * config.num_heads * config.head_size * length


def peak_flops(device_kind: str) -> float | None:
    """Peak of one device in FLOP/s (bfloat16), or None where we do not know it."""
    return PEAK_FLOPS.get(device_kind)


def table(config: ModelConfig) -> str:
    """Parameters by module, with shapes and axes, and the FLOPs of a token."""
    leaves = params.paths(models.spec(config))
    width = max(map(len, leaves))
    rows = [
        f"{path:<{width}}  {params.count(leaf):>15,}  "
        + " ".join(f"{axis}={size}" for axis, size in zip(leaf.axes, leaf.shape, strict=True))
        for path, leaf in leaves.items()
    ]
    total = sum(params.count(leaf) for leaf in leaves.values())
    flops = training_flops(config, config.context_length)
    rows.append(
        f"{'total':<{width}}  {total:>15,}  {flops:.3g} FLOPs a trained token at context {config.context_length}"
    )
    return "\n".join(rows)
