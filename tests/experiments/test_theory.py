"""The numbers of the experiments about the theory."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.reverse import experiment as reverse
from experiments.theory import (
    approximation,
    dot_products,
    induction,
    lengths,
    patching,
    recurrence,
    residuals,
    small,
    warmup,
)
from jaxformer import models
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.params import abstract
from jaxformer.runs import checkpoint_reader, loop
from jaxformer.tools.analysis import attention_maps


@pytest.mark.thorough
@pytest.mark.parametrize("d", [4, 64, 1024])
def test_the_division_keeps_variance_and_entropy(d):
    scaled, plain = (dot_products.measure(d, scaled) for scaled in (True, False))
    assert plain["variance"] == pytest.approx(d, rel=0.1) and scaled["variance"] == pytest.approx(
        1, rel=0.1
    )
    assert (
        scaled["entropy"] == pytest.approx(4.37, abs=0.06) and plain["entropy"] < scaled["entropy"]
    )
    assert (plain["slope"] < 0.5 * scaled["slope"]) == (d > 16)


@pytest.mark.thorough
def test_gradients_without_residuals_do_not_reach_the_first_layer():
    """At depth 24 by a factor of ten at least: the issue's figure."""
    configs = residuals.variants(24)
    norms = {
        name: residuals.gradient_norms(configs[name])
        for name in ("residuals, pre-norm", "no residuals, no norm")
    }
    assert norms["no residuals, no norm"][0] < norms["residuals, pre-norm"][0] / 10
    assert norms["residuals, pre-norm"][0] > norms["residuals, pre-norm"][-1]


@pytest.mark.thorough
def test_a_stack_without_residuals_is_what_it_says():
    config = residuals.variants(2)["no residuals, post-norm"]
    params, tokens = models.init(config, jax.random.key(0)), jnp.arange(8)[None]
    names = ("layers/*/residual",)
    plain = models.apply(config, params, tokens, intermediates=names).intermediates[names[0]]
    silent = jax.tree.map(lambda leaf: leaf, params)
    silent["layers"]["feedforward"]["down"]["kernel"] = jnp.zeros_like(
        params["layers"]["feedforward"]["down"]["kernel"]
    )
    found = models.apply(config, silent, tokens, intermediates=names).intermediates[names[0]]
    assert plain.shape == (2, 1, 8, 64) and np.abs(plain).max() > 0.1
    np.testing.assert_allclose(found, 0, atol=1e-6)  # nothing goes around the feed-forward


@pytest.mark.slow
def test_the_heads_of_the_reversal_look_at_the_anti_diagonal(tmp_path):
    """A head has at least 0.8 of its weight there: the issue's figure."""
    result = loop.train(reverse, tmp_path)
    params = checkpoint_reader.restore_params(
        result.folder / "checkpoints", abstract(models.spec(reverse.model))
    )[1]
    rows = batching.take_rows(
        batching.open_dataset(reverse.data, reverse.model).train, np.arange(50)
    )
    name = "layers/*/attention/weights"
    weights = models.apply(
        reverse.model, params, jnp.asarray(rows["tokens"]), intermediates=(name,)
    ).intermediates[name]
    targets = jnp.broadcast_to(3 - jnp.arange(4)[None], (50, 4))
    assert attention_maps.head_means(attention_maps.weight_at(weights, targets)).max() >= 0.8


@pytest.mark.slow
def test_a_patch_changes_the_answers_as_predicted(tmp_path):
    """Values are fetched by the last layer: before it they are where they were written, after it
    where they are asked for."""
    result = loop.train(patching.experiment, tmp_path)
    wanted = abstract(models.spec(patching.experiment.model))
    params = checkpoint_reader.restore_params(result.folder / "checkpoints", wanted)[1]
    found = patching.patched(params, *patching.texts(64))
    for name in ("embedding", "layers/0/residual", "layers/1/residual"):
        fetched = name == "layers/1/residual"
        assert found[name, "questions" if fetched else "values"] > 0.95
        assert found[name, "values" if fetched else "questions"] < 0.05


@pytest.mark.thorough
def test_the_error_of_a_performer_falls_as_the_root_of_its_features():
    """Where attention is flat.

    Linear attention comes no nearer to the softmax than the mean of the values.
    """
    x = approximation.inputs(0.1, length=128)
    points = approximation.performer(x, (16, 64, 256))
    assert -0.8 < approximation.slope(points) < -0.3
    assert [p.flops for p in points] == sorted(p.flops for p in points)
    target = approximation.exact(x)
    mean = jnp.broadcast_to(x.value.mean(axis=1, keepdims=True), target.shape)
    assert approximation.linear(x).error > 0.8 * approximation.relative_error(mean, target)


@pytest.mark.thorough
def test_sharp_attention_has_a_high_rank_that_bounds_a_linformer():
    flat, sharp = (approximation.inputs(sharpness, length=64) for sharpness in (0.25, 4.0))
    (stable, rank, best), (stable_sharp, rank_sharp, best_sharp) = (
        approximation.spectrum(approximation.attention_matrix(x)) for x in (flat, sharp)
    )
    assert stable < 1.5 < stable_sharp and rank < rank_sharp and np.all(best[:32] < best_sharp[:32])
    for x, bound in ((flat, best), (sharp, best_sharp)):
        errors = [point.error for point in approximation.linformer(x, (8, 32))]
        assert errors[1] < errors[0] and errors[0] > 0.8 * bound[7] and errors[1] > 0.8 * bound[31]


@pytest.mark.thorough
def test_more_rounds_of_hashing_come_nearer():
    points = approximation.reformer(
        approximation.inputs(4.0, length=64), 4.0, rounds=(1, 8), chunk=8
    )
    assert points[1].error < 0.5 * points[0].error and points[1].flops == pytest.approx(
        8 * points[0].flops, rel=0.1
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", lengths.SCALINGS)
def test_a_scaling_by_one_is_no_scaling(name):
    config, scaled = lengths.ENCODINGS["rotary"], lengths.rescaled(name, 1.0)
    params, tokens = models.init(config, jax.random.key(0)), jnp.arange(16)[None]
    one, other = (
        jax.jit(partial(models.apply, c))(params, tokens).logits for c in (config, scaled)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", lengths.ENCODINGS)
def test_tables_of_positions_refuse_what_others_read(name):
    config = lengths.ENCODINGS[name]
    params = models.init(config, jax.random.key(0))
    if name in ("learned", "axial"):
        with pytest.raises(ConfigError, match="do not fit the 64 learned positions"):
            lengths.tested(config, params, 2 * lengths.TRAINED)
    else:
        accuracy, loss = lengths.tested(config, params, 2 * lengths.TRAINED)
        assert 0 <= accuracy < 0.5 and np.isfinite(loss)


@pytest.mark.slow
def test_alibi_carries_a_model_to_twice_its_length():
    found = lengths.study("ALiBi", steps=80, lengths=(64, 128))["ALiBi"]
    assert all(accuracy > 0.5 for accuracy, _ in found)


@pytest.mark.thorough
def test_the_induction_target_of_a_repeated_list_is_its_next_token():
    batch = induction.draw(jax.random.key(0), 8)
    targets = attention_maps.induction_targets(batch["tokens"])
    followed = jnp.take_along_axis(batch["tokens"], jnp.maximum(targets, 0), axis=1)
    again = targets >= 0
    assert again.any() and bool(jnp.all(jnp.where(again, followed == batch["labels"], True)))
    records = [
        {"step": step, "loss": loss} for step, loss in ((1, 4.0), (2, 3.5), (3, 1.0), (4, 0.0))
    ]
    assert induction.crossing(records, "loss") == 3


@pytest.mark.slow
def test_an_induction_head_forms_with_two_layers_and_not_with_one():
    """Loss and score turn at the same time."""
    one, two = (induction.train(layers, 300) for layers in (1, 2))
    assert two[-1]["induction"] > 0.5 > 0.2 > one[-1]["induction"] and two[0]["induction"] < 0.2
    assert two[-1]["test loss"] < 0.3 and one[-1]["test loss"] > 2
    assert abs(induction.crossing(two, "induction") - induction.crossing(two, "test loss")) <= 40


@pytest.mark.thorough
def test_gradients_near_the_output_are_larger_with_post_norm():
    pre, post = (
        warmup.gradient_norms(replace(config, num_layers=6)) for config in warmup.PLACES.values()
    )
    assert post[-1] > 1.5 * pre[-1] and pre[0] > 1.5 * pre[-1]


@pytest.mark.thorough
def test_models_side_by_side_train_as_they_do_alone():
    """A copy of `warmup.train` is the plain loop with its rate."""
    config = replace(warmup.BASE, num_layers=1)
    losses = warmup.train(config, 4, every=4)[1][-1]  # [warm-up, rate]
    forward = jax.jit(lambda params, tokens: models.apply(config, params, tokens).logits)
    rate = lambda step: warmup.RATES[1] * jnp.minimum((step + 1) / warmup.WARMUPS[1], 1)
    params, _ = small.train(
        forward, warmup.initial(config), warmup.draw, optax.adam(rate, b2=0.98), 4, 4
    )
    test = warmup.draw(jax.random.key(1))
    assert float(small.cross_entropy(forward(params, test["tokens"]), test)) == pytest.approx(
        losses[1, 1], abs=1e-4
    )


@pytest.mark.thorough
def test_the_gradient_of_a_recurrence_fades_with_distance_and_that_of_attention_does_not():
    recurrent, attention = (recurrence.gradient_norms(name, length=34) for name in recurrence.NAMES)
    assert recurrent[32] < 1e-2 * recurrent[8] and attention[32] > 0.3 * attention[8]


@pytest.mark.thorough
def test_attention_recalls_a_fact():
    batch = recurrence.draw(5, jax.random.key(0), 4, length=9)
    assert (
        bool(jnp.all(batch["tokens"][:, 3] == batch["labels"][:, -1]))
        and float(batch["weights"].sum()) == 4
    )
    found = recurrence.recalled("attention", 100, distances=(2, 8), length=12)
    assert found.shape == (2,) and found.min() > 0.9


def test_a_figure_has_few_ticks_no_small_letters_and_few_bytes(tmp_path, capsys):
    def draw():
        figure = Figure()
        left, right = figure.subplots(1, 2)
        left.plot(np.arange(1000), label="a line")
        left.legend(fontsize=6)
        right.loglog(10.0 ** np.arange(-30, 30), 10.0 ** np.arange(-30, 30))
        return figure

    figure = small.readable(draw())
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
            assert 2 <= len(ticks) <= small.MOST_TICKS
    assert all(text.get_fontsize() >= small.LEAST_FONT_SIZE for text in figure.findobj(Text))
    small.save_figure(draw, str(tmp_path / "figure.png"))
    assert capsys.readouterr().out == f"figure: {tmp_path / 'figure.png'}\n"
    assert 1000 < (tmp_path / "figure.png").stat().st_size < 60_000
