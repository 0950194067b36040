"""Autoregressive decoding over a key/value cache.

`generate` and `stream` sample, `speculate` samples with a draft, `search` is beam search,
`contrast` is contrastive search, `score` gives the log-likelihood of a text.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.decoding.beam import Beams
from jaxformer.decoding.cache import Cache, init_cache
from jaxformer.decoding.contrastive import contrast
from jaxformer.decoding.generate import generate, stream
from jaxformer.decoding.sampling import Sampling
from jaxformer.decoding.search import Hypothesis, Score, score, search
from jaxformer.decoding.speculative import Draft, HiddenDraft, Lookup, Speculation, speculate
from jaxformer.decoding.steps import (
    decode_step,
    prefill,
    prepare,
    quantize,
    round_to_blocks,
    round_to_int8,
)
