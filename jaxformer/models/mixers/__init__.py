"""Ways for positions to exchange information: attention (the default), its variants, and efficient approximations."""

# ruff: noqa: F401, I001 (names that the package offers)
from jaxformer.models.mixers import variants
from jaxformer.models.mixers.attention import attention
from jaxformer.models.mixers.efficient import (
    BigBird, Efficient, Linear, Linformer, LocalChunks, Longformer, Performer, Reformer,
)  # fmt: skip
