"""The numbers of the experiments about the theory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.theory import dot_products, residuals
from jaxformer import models


@pytest.mark.parametrize("d", [4, 64, 1024])
def test_the_division_keeps_variance_and_entropy(d):
    scaled, plain = (dot_products.measure(d, scaled) for scaled in (True, False))
    assert plain["variance"] == pytest.approx(d, rel=0.1) and scaled["variance"] == pytest.approx(1, rel=0.1)
    assert scaled["entropy"] == pytest.approx(4.37, abs=0.06) and plain["entropy"] < scaled["entropy"]
    assert (plain["slope"] < 0.5 * scaled["slope"]) == (d > 16)


def test_gradients_without_residuals_do_not_reach_the_first_layer():
    """At depth 24 by a factor of ten at least: the issue's figure."""
    configs = residuals.variants(24)
    norms = {name: residuals.gradient_norms(configs[name]) for name in ("residuals, pre-norm", "no residuals, no norm")}
    assert norms["no residuals, no norm"][0] < norms["residuals, pre-norm"][0] / 10
    assert norms["residuals, pre-norm"][0] > norms["residuals, pre-norm"][-1]


def test_a_stack_without_residuals_is_what_it_says():
    config = residuals.variants(2)["no residuals, post-norm"]
    params, tokens = models.init(config, jax.random.key(0)), jnp.arange(8)[None]
    names = ("layers/*/residual",)
    plain = models.apply(config, params, tokens, intermediates=names).intermediates[names[0]]
    silent = jax.tree.map(lambda leaf: leaf, params)
    silent["layers"]["feedforward"]["down"]["kernel"] = jnp.zeros_like(params["layers"]["feedforward"]["down"]["kernel"])
    found = models.apply(config, silent, tokens, intermediates=names).intermediates[names[0]]
    assert plain.shape == (2, 1, 8, 64) and np.abs(plain).max() > 0.1
    np.testing.assert_allclose(found, 0, atol=1e-6)  # nothing goes around the feed-forward
