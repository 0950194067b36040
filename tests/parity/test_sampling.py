"""Filters leave the same tokens as those of transformers, with the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import Sampling
from jaxformer.decoding.filters import (
    BadWords,
    ForcedPrefix,
    History,
    LogitBias,
    MinLength,
    MinP,
    NoRepeatNgram,
    Repetition,
    Temperature,
    TopK,
    TopP,
    Typical,
)  # fmt: skip
from tests.decoding.test_filters import ROWS, SHARES, run

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
WIDTH, LENGTHS, PROMPTS = 50, (12, 1, 7, 30), (5, 1, 6, 1)


def both(name, ours, theirs, dtype=np.float32):
    """What both leave of a row, largest first: of equal logits torch, whose sort is not stable,
    keeps any."""
    import torch

    logits = ROWS[name].astype(np.float32)
    left = (
        np.asarray(run(ours, jnp.asarray(logits)[None], None)),
        theirs(None, torch.from_numpy(logits[None].astype(dtype))),
    )
    return [
        np.sort(np.asarray(rows)[0][np.isfinite(np.asarray(rows)[0])])[::-1].astype(np.float32)
        for rows in left
    ]


def assert_a_few_apart(name, ours, theirs):
    """A float32 sum of 50,257 terms and one in float64 may end a few tokens apart."""
    short, long = sorted((ours, theirs), key=len)
    assert not np.setdiff1d(short, long).size
    assert len(long) - len(short) <= (0 if len(ROWS[name]) < 1000 else 3), (
        name,
        len(ours),
        len(theirs),
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_same_tokens_are_left(name):
    from transformers.generation import logits_process as hf

    for k in (1, 7, 300, 10**6):
        np.testing.assert_array_equal(*both(name, TopK(k), hf.TopKLogitsWarper(k)))
    for p in (0.0, 1e-3, 0.05, 0.3, 1.0):
        np.testing.assert_array_equal(*both(name, MinP(p), hf.MinPLogitsWarper(p)))
    for p in SHARES:
        assert_a_few_apart(name, *both(name, TopP(p), hf.TopPLogitsWarper(p)))
    # in float32 torch's running sum is off by 7e-6, the mass of 31 tokens
    for mass in (
        1e-3,
        0.2,
        0.9,
        0.999,
    ):
        assert_a_few_apart(
            name, *both(name, Typical(mass), hf.TypicalLogitsWarper(mass), np.float64)
        )


def texts_and_logits(seed, ties=False):
    """Rows of different length, small words that repeat, and logits of which some are removed
    already."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 4, length).tolist() for length in LENGTHS]
    logits = rng.integers(-3, 4, (4, WIDTH)) if ties else 3 * rng.normal(size=(4, WIDTH))
    return texts, np.where(rng.random((4, WIDTH)) < 0.2, -np.inf, logits).astype(np.float32)


def assert_same(ours, theirs, texts, logits):
    """`theirs`: from the number of prompt tokens of a row to a processor, which sees the row
    alone."""
    import torch

    tokens = np.full((4, 40), 1)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    history = History(*(jnp.asarray(array, jnp.int32) for array in (tokens, LENGTHS, PROMPTS)))
    left = np.asarray(run(ours, jnp.asarray(logits), history))
    for row, (text, prompt) in enumerate(zip(texts, PROMPTS, strict=True)):
        expected = theirs(prompt)(torch.tensor([text]), torch.from_numpy(logits[row : row + 1]))[
            0
        ].numpy()
        # a product, rounded once
        np.testing.assert_allclose(left[row], expected, rtol=2e-7, err_msg=str(row))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_filters_that_read_the_history(seed, ties):
    from transformers.generation import logits_process as hf

    texts, logits = texts_and_logits(seed, ties)
    check = lambda ours, theirs: assert_same(ours, theirs, texts, logits)
    for penalty in (0.6, 1.0, 1.7):
        check(
            Repetition(penalty),
            lambda prompt, penalty=penalty: hf.RepetitionPenaltyLogitsProcessor(penalty),
        )
    for n in (1, 2, 3, 5, 13):
        check(NoRepeatNgram(n), lambda prompt, n=n: hf.NoRepeatNGramLogitsProcessor(n))
    words = [
        [7],
        [1, 2],
        [3, 3, 0],
        [0, 1, 2, 3],
        [49],
        *np.random.default_rng(seed).integers(0, 4, (20, 3)).tolist(),
    ]
    check(BadWords(words), lambda prompt: hf.NoBadWordsLogitsProcessor(words))
    bias = {4: 0.5, 9: -3.0, 0: -np.inf}
    check(
        LogitBias(bias),
        lambda prompt: hf.SequenceBiasLogitsProcessor(
            {(token,): float(b) for token, b in bias.items()}
        ),
    )
    for length in (0, 1, 8, 100):
        theirs = lambda prompt, length=length: hf.MinNewTokensLengthLogitsProcessor(
            prompt, length, [2, 30]
        )
        check(MinLength(length, [2, 30]), theirs)
    check(Temperature(0.3), lambda prompt: hf.TemperatureLogitsWarper(0.3))


def test_a_forced_first_token():
    from transformers.generation import logits_process as hf

    texts, logits = texts_and_logits(0)
    texts = [text[:1] for text in texts]  # theirs is the second token of a text
    history = History(jnp.asarray(texts, jnp.int32), jnp.ones(4, jnp.int32), jnp.ones(4, jnp.int32))
    import torch

    expected = hf.ForcedBOSTokenLogitsProcessor(17)(torch.tensor(texts), torch.from_numpy(logits))
    np.testing.assert_array_equal(
        run(ForcedPrefix([17, 3]), jnp.asarray(logits), history), expected.numpy()
    )


@pytest.mark.parametrize("seed", range(3))
def test_all_of_sampling_in_order(seed):
    """Kept sets and values of the chain that `generate` of transformers builds from the same
    numbers."""
    import torch
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    options = dict(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=WIDTH))
    chain = model._get_logits_processor(
        GenerationConfig(do_sample=True, typical_p=0.8, **options), input_ids_seq_length=1
    )
    _, logits = texts_and_logits(seed)
    expected = chain(torch.zeros((4, 1), dtype=torch.long), torch.from_numpy(logits)).numpy()
    left = jnp.asarray(logits)
    for keep in Sampling(typical=0.8, **options).filters():
        left = jax.jit(lambda keep, logits: keep(logits, None))(keep, left)
    np.testing.assert_allclose(left, expected, rtol=2e-7)
