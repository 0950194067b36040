"""Autoregressive decoding over a key/value cache."""

from jaxformer.decoding.cache import Cache, init_cache
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampling, sample

__all__ = ["Cache", "Sampling", "generate", "init_cache", "sample"]
