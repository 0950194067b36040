"""The numbers of the experiments about the theory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reverse import experiment as reverse
from experiments.theory import dot_products, patching, residuals
from jaxformer import models
from jaxformer.analysis import attention_maps
from jaxformer.data import batching
from jaxformer.params import abstract
from jaxformer.training import checkpoint, loop


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


@pytest.mark.slow
def test_the_heads_of_the_reversal_look_at_the_anti_diagonal(tmp_path):
    """A head has at least 0.8 of its weight there: the issue's figure."""
    result = loop.train(reverse, tmp_path)
    params = checkpoint.restore_params(result.folder / "checkpoints", abstract(models.spec(reverse.model)))[1]
    rows = batching.take_rows(batching.open_dataset(reverse.data, reverse.model).train, np.arange(50))
    name = "layers/*/attention/weights"
    weights = models.apply(reverse.model, params, jnp.asarray(rows["tokens"]), intermediates=(name,)).intermediates[name]
    targets = jnp.broadcast_to(3 - jnp.arange(4)[None], (50, 4))
    assert attention_maps.head_means(attention_maps.weight_at(weights, targets)).max() >= 0.8


@pytest.mark.slow
def test_a_patch_changes_the_answers_as_predicted(tmp_path):
    """Values are fetched by the last layer: before it they are where they were written, after it where they are asked for."""
    result = loop.train(patching.experiment, tmp_path)
    params = checkpoint.restore_params(result.folder / "checkpoints", abstract(models.spec(patching.experiment.model)))[1]
    found = patching.patched(params, *patching.texts(64))
    for name in ("embedding", "layers/0/residual", "layers/1/residual"):
        fetched = name == "layers/1/residual"
        assert found[name, "questions" if fetched else "values"] > 0.95
        assert found[name, "values" if fetched else "questions"] < 0.05
