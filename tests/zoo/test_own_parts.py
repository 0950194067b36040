"""A part of the user's own takes the place of a paper's part: it needs its attributes, no class."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models, params as parameters
from jaxformer.objectives import StepContext
from jaxformer.zoo.dino import SelfDistillation
from jaxformer.zoo.patchtst import quantile_regression
from tests.zoo import test_dino, test_evoformer, test_llava, test_patchtst, test_vivit


@dataclass(frozen=True)
class Own:
    """A part with some attributes of another one, and of no class of ours."""

    inner: Any

    def __call__(self, config):
        return self.inner(config)


@dataclass(frozen=True)
class OwnPlaces(Own):
    places = property(lambda self: self.inner.places)


@dataclass(frozen=True)
class OwnPatches(Own):
    patches = property(lambda self: self.inner.patches)


@dataclass(frozen=True)
class OwnQuantiles(Own):
    horizon = property(lambda self: self.inner.horizon)
    levels = property(lambda self: self.inner.levels)


@dataclass(frozen=True)
class OwnAlignment(Own):
    pair_width = property(lambda self: self.inner.pair_width)


@dataclass(frozen=True)
class OwnDirections(Own):
    count = property(lambda self: self.inner.count)
    name = property(lambda self: self.inner.name)


@dataclass(frozen=True)
class OwnSource(Own):
    source = property(lambda self: self.inner.source)


def assert_same_outputs(ours, own, x):
    params = models.init(ours, jax.random.key(0))
    expected, found = (models.apply(model, params, x) for model in (ours, own))
    jax.tree.map(np.testing.assert_array_equal, found.heads, expected.heads)


@pytest.mark.thorough
def test_an_embedding_of_videos():
    ours = test_vivit.MODEL
    own = replace(ours, embedding=OwnPlaces(ours.embedding))
    size = ours.embedding
    videos = jax.random.normal(jax.random.key(1), (2, size.frames, *size.image, size.channels))
    assert_same_outputs(ours, own, videos)


@pytest.mark.thorough
def test_an_embedding_and_a_head_of_series():
    ours = test_patchtst.MODEL
    heads = (OwnQuantiles(ours.heads[0]),)
    own = replace(ours, embedding=OwnPatches(ours.embedding), heads=heads)
    series = jax.random.normal(jax.random.key(1), (3, ours.embedding.length))
    assert_same_outputs(ours, own, series)
    batch = {"series": series, "future": jnp.ones((3, 4)), "weights": jnp.ones(3)}
    params = models.init(ours, jax.random.key(0))
    context = StepContext(jax.random.key(0))
    found, expected = (quantile_regression(m, params, batch, context).loss for m in (own, ours))
    assert found == expected


@pytest.mark.thorough
def test_an_embedding_of_alignments():
    ours = test_evoformer.MODEL
    own = replace(ours, embedding=OwnAlignment(ours.embedding))
    types = jax.random.randint(jax.random.key(1), (1, 3, 4), 0, ours.embedding.types)
    assert_same_outputs(ours, own, types)


@pytest.mark.thorough
def test_a_head_that_counts_directions():
    ours = test_dino.MODEL
    own = replace(ours, heads=(OwnDirections(ours.heads[0]),))
    objective, batch = SelfDistillation(test_dino.same), test_dino.batch_of()
    params = models.init(ours, jax.random.key(0))
    tree = parameters.init(objective.spec(own), jax.random.key(1))
    context = StepContext(jax.random.key(0), step=jnp.int32(1), params=tree)
    found, expected = (objective(m, params, batch, context).loss for m in (own, ours))
    assert found == expected


@pytest.mark.thorough
def test_an_embedding_that_reads_the_sources_of_decoding():
    ours = test_llava.MODEL
    own = replace(ours, embedding=OwnSource(ours.embedding))
    params = test_llava.random_parameters(ours)
    prompts = [ours.embedding.prompt([1, 2])]
    images = list(test_llava.images_of(1))
    found, expected = (
        decoding.generate(model, params, prompts, 3, sources=images) for model in (own, ours)
    )
    assert found == expected
