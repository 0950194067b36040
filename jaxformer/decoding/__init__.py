"""Autoregressive decoding over a key/value cache."""

from jaxformer.decoding.cache import Cache, init_cache
from jaxformer.decoding.generate import generate, stream
from jaxformer.decoding.sampling import Sampling
from jaxformer.decoding.steps import decode_step, prefill, prepare

__all__ = ["Cache", "Sampling", "decode_step", "generate", "init_cache", "prefill", "prepare", "stream"]
