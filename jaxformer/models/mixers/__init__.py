"""Mixers: ways to mix positions. Attention is here; the mixers of single papers are in `zoo`."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.models.mixers.attention import attention
