"""Pure functions on arrays, each usable alone: take one out into your own code."""

from jaxformer.ops.attention import attention, dropout
from jaxformer.ops.contraction import einsum
from jaxformer.ops.feedforward import glu, mlp
from jaxformer.ops.losses import cross_entropy, projected_cross_entropy
from jaxformer.ops.norms import layer_norm, rms_norm
from jaxformer.ops.positions import rope, sinusoidal

__all__ = [
    "attention", "cross_entropy", "dropout", "einsum", "glu", "layer_norm", "mlp", "projected_cross_entropy", "rms_norm",
    "rope", "sinusoidal",
]  # fmt: skip
