"""Filters of sampling leave the same tokens as those of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import sampling
from tests.decoding.test_sampling import ROWS, SHARES

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


def both(name, ours, theirs):
    """What both leave of a row, largest first: of equal logits torch, whose sort is not stable, keeps any."""
    import torch

    logits = ROWS[name].astype(np.float32)
    left = np.asarray(ours(jnp.asarray(logits)[None]))[0], theirs(None, torch.from_numpy(logits)[None])[0].numpy()
    return [np.sort(row[np.isfinite(row)])[::-1] for row in left]


@pytest.mark.parametrize("name", ROWS)
def test_the_same_tokens_are_left(name):
    from transformers.generation import logits_process as hf

    for k in (1, 7, 300, 10**6):
        ours, theirs = both(name, lambda x, k=k: sampling.top_k(x, k), hf.TopKLogitsWarper(k))
        np.testing.assert_array_equal(ours, theirs)
    for p in (1e-3, 0.05, 0.3, 1.0):
        ours, theirs = both(name, lambda x, p=p: sampling.min_p(x, p), hf.MinPLogitsWarper(p))
        np.testing.assert_array_equal(ours, theirs)
    for p in SHARES:
        ours, theirs = both(name, lambda x, p=p: sampling.top_p(x, p), hf.TopPLogitsWarper(p))
        # two float32 sums of 50,257 terms, relative to 1, may end a few tokens apart
        short, long = sorted((ours, theirs), key=len)
        np.testing.assert_array_equal(short, long[: len(short)])
        assert len(long) - len(short) <= (0 if len(ROWS[name]) < 1000 else 3), (p, len(ours), len(theirs))
