"""Ways for positions to exchange information: attention (the default), its variants, and efficient approximations."""

from jaxformer.models.mixers import variants
from jaxformer.models.mixers.attention import attention
from jaxformer.models.mixers.efficient import (
    BigBird,
    Efficient,
    Linear,
    Linformer,
    LocalChunks,
    Longformer,
    Performer,
    Reformer,
)

__all__ = [
    "BigBird", "Efficient", "Linear", "Linformer", "LocalChunks", "Longformer", "Performer", "Reformer", "attention",
    "variants",
]  # fmt: skip
