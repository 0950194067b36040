"""Pure functions on arrays, each usable alone: take one out into your own code."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.ops.attention import attention
from jaxformer.ops.bias import alibi, shaw, t5
from jaxformer.ops.dropout import dropout
from jaxformer.ops.einsum import einsum
from jaxformer.ops.feedforward import bilinear, geglu, glu, mlp, reglu, swiglu
from jaxformer.ops.losses import cross_entropy, projected_cross_entropy
from jaxformer.ops.mixture import balance_loss, mixture, route
from jaxformer.ops.norms import layer_norm, rms_norm
from jaxformer.ops.positions import rope, sinusoidal
