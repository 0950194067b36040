"""The page docs/your-own-diffusion.md: an embedding, a block, a head and an objective of one's
own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from tests.joints.harness import (
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    assert_short,
    read_page,
)

PAGE = read_page("your-own-diffusion")


def test_the_page_is_short():
    assert_short(PAGE)


@pytest.mark.thorough
def test_the_page_survives_a_kill_and_runs_on_eight_devices(tmp_path):
    folder = assert_resumes_to_the_same_bits(PAGE, tmp_path)
    assert_same_on_eight_devices(PAGE, tmp_path, whole=folder)


@pytest.mark.thorough
def test_a_block_of_adaln_zero_starts_as_the_identity_and_then_reads_the_time():
    scope: dict = {"__name__": "page"}
    exec(compile(PAGE["bars"], "bars", "exec"), scope)
    config = scope["experiment"].model
    tree = models.init(config, jax.random.key(0))
    x, inputs = jnp.ones((2, 16, 4)), {"time": jnp.array([0.1, 0.9])}
    assert not models.apply(config, tree, x, inputs=inputs).logits.any()
    hidden = models.apply(config, tree, x, inputs=inputs).hidden
    expected = x @ tree["embedding"]["kernel"] + tree["embedding"]["positions"][None]
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, tree)
    one, other = models.apply(config, moved, x, inputs=inputs).logits
    assert np.abs(one - other).max() > 1e-3
