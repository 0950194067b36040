"""Multi-token prediction: what users of others reported, tried here."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.decoding import Sampling, generate, speculate
from jaxformer.masks import causal, window
from jaxformer.models import ModelConfig
from jaxformer.objectives import MultiToken, StepContext
from jaxformer.objectives.multi_token import drafter
from jaxformer.ops.positions import Rope

V, T = 7, 8
MODEL = ModelConfig(
    V, 1, 16, 2, context_length=T, norm="rms_norm", positions=Rope(), use_bias=False, init_std=0.5
)
KEY = jax.random.key(0)
rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def trees():
    """(the model's parameters, the objective's)."""
    objective = MultiToken(modules=2)
    return [
        jax.jit(partial(P.init, spec))(jax.random.key(i))
        for i, spec in enumerate((models.spec(MODEL), objective.spec(MODEL)))
    ]


def of_modules(trees, batch):
    """[(sum of the cross entropy, weight)] of two modules."""
    run = jax.jit(MultiToken(modules=2), static_argnums=0)
    sums = run(MODEL, trees[0], batch, StepContext(KEY, params=trees[1]))
    return [[float(x) for x in sums.metrics[f"module_{k}_loss"]] for k in (1, 2)]


def batch_of():
    text = rng.integers(0, V, (1, T + 1))
    return {
        "tokens": jnp.asarray(text[:, :-1], jnp.int32),
        "labels": jnp.asarray(text[:, 1:], jnp.int32),
        "weights": jnp.ones((1, T)),
    }


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/Megatron-LM#1661",
    "NVIDIA/Megatron-LM#6205",
    right="in a packed row no module predicts, or reads, a token of the next text; padding too",
)
def test_the_end_of_a_packed_text(trees):
    batch = batch_of()
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 0, 0]], jnp.int32)
    packed = batch | {"segment_ids": segments, "weights": jnp.float32(segments != 0)}
    found = of_modules(trees, packed)
    assert [weight for _, weight in found] == [4, 2]
    other = jnp.where(segments == 1, batch["tokens"], (batch["tokens"] + 1) % V)
    first_alone = packed | {"weights": jnp.float32(segments == 1)}
    assert of_modules(trees, first_alone | {"tokens": other}) == of_modules(trees, first_alone)


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/Megatron-LM#1609",
    right="the last label is predicted by module 1 of the position before the last, and not lost",
)
def test_the_last_label_of_a_row(trees):
    batch = batch_of()
    changed = batch | {"labels": batch["labels"].at[0, -1].add(1) % V}
    for before, after in zip(of_modules(trees, batch), of_modules(trees, changed), strict=True):
        assert before[0] != after[0]
    assert [weight for _, weight in of_modules(trees, batch)] == [T - 1, T - 2]


@pytest.mark.thorough
@pytest.mark.report(
    "ikawrakow/ik_llama.cpp#1718",
    "ml-explore/mlx-swift-lm#516",
    right="a draft of several tokens beyond a sliding window leaves the text that of the model",
)
@pytest.mark.parametrize("ahead", [1, 2])
def test_drafts_beyond_a_window(trees, ahead):
    model = replace(MODEL, masks=(causal() & window(3),), num_layers=1)
    params = trees[0]
    draft = drafter(model, params, trees[1])
    greedy = Sampling(temperature=0.0)
    prompts = [[1, 2, 3, 4, 5, 6], [2]]
    found = speculate(model, params, prompts, 14, draft=draft, ahead=ahead, sampling=greedy)
    assert found.tokens == generate(model, params, prompts, 14, sampling=greedy)
    assert all(0 <= a <= p for a, p in zip(found.accepted, found.proposed, strict=True))
