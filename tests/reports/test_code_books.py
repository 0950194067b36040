"""Reports of users of code books and of shortened sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from tests.zoo import test_hourglass as hourglasses, test_vector_quantised as books


@pytest.mark.thorough
@pytest.mark.report(
    "zalandoresearch/pytorch-vq-vae#5", right="The loss reads the book as it was before the step."
)
def test_the_book_moves_behind_the_loss():
    tree, batch = books.parameters_of(), books.batch_of(books.images_of())
    sums = books.sums_of(books.VectorQuantisation(least=0.0), tree, batch)
    found = books.apply(books.MODEL, tree, batch["images"]).heads["codes"]
    error = jnp.square(found.images - batch["images"]).mean(axis=(1, 2, 3)).sum()
    np.testing.assert_allclose(sums.metrics["error"][0], error, rtol=1e-5)
    assert (sums.updates["heads"]["codes"]["sums"] != tree["heads"]["codes"]["sums"]).any()


@pytest.mark.thorough
@pytest.mark.report(
    "espnet/espnet#6284", right="A code that starts again keeps its new vector in the next step."
)
def test_a_code_that_starts_again():
    books.test_a_code_without_use_starts_again_at_a_state()


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/vector-quantize-pytorch#205", right="A batch without any state restarts no code."
)
def test_nothing_to_start_again_at():
    books.test_a_batch_without_weight_restarts_nothing()


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/vector-quantize-pytorch#20", right="The book becomes the states of its codes."
)
def test_few_states():
    books.test_the_book_reaches_constant_states()


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/vector-quantize-pytorch#162", right="Scoring gives the codes that training gives."
)
def test_the_codes_of_scoring():
    tree, images = books.parameters_of(), jnp.asarray(books.images_of())
    scored = models.evaluation(books.MODEL)
    found, known = (books.apply(model, tree, images) for model in (scored, books.MODEL))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found.heads, known.heads))


@pytest.mark.report(
    "nadavbh12/VQ-VAE#11", right="A code that was never used is its start, and is not scaled up."
)
def test_a_code_that_was_never_used():
    books.test_a_book_without_use_is_its_start()


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/magvit2-pytorch#27", right="A shortened sequence tells no position of a later one."
)
@pytest.mark.parametrize("k", [2, 5])
def test_a_shortened_sequence_is_causal(k):
    hourglasses.test_no_token_sees_a_later_one(k)
