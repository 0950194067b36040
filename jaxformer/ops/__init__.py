"""Pure functions on arrays, each usable alone: take one out into your own code."""

# ruff: noqa: F401, I001 (names that the package offers)
from jaxformer.ops.attention import attention
from jaxformer.ops.attention.linear import (
    LinearState, efficient_attention, elu_plus_one, favor_attention, favor_features, favor_relu_features, linear_attention,
    linear_attention_step, linformer_attention, orthogonal_projection,
)  # fmt: skip
from jaxformer.ops.attention.lsh import lsh_attention, random_rotations
from jaxformer.ops.attention.sparse import (
    bigbird_attention, bigbird_layout, bigbird_layout_seeded, bigbird_layout_zero, longformer_attention,
)  # fmt: skip
from jaxformer.ops.dropout import dropout
from jaxformer.ops.einsum import einsum
from jaxformer.ops.feedforward import bilinear, geglu, glu, mlp, reglu, swiglu
from jaxformer.ops.losses import cross_entropy, projected_cross_entropy
from jaxformer.ops.mixture import balance_loss, mixture, route
from jaxformer.ops.norms import layer_norm, rms_norm
from jaxformer.ops.positions import alibi, rope, shaw, sinusoidal, t5
