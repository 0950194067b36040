"""Steps that change nothing: spikes, numbers that stay bad, what is kept of them, and where they
come from."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import sharding
from jaxformer.data.tasks import Copy
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.runs import loop, run
from jaxformer.runs.manifest import fingerprints
from jaxformer.runs.reporter import NonFinite
from jaxformer.runs.reproduction import explain, out_of_vocabulary, replay
from jaxformer.training import AdamW, Checkpoints, Constant, Experiment, Spikes
from jaxformer.training.recipe import build
from jaxformer.training.step import first_state, is_spike, make_train_step

EXPERIMENT = Experiment(
    name="bad",
    model=ModelConfig(
        vocab_size=13, num_layers=3, d_model=16, num_heads=2, context_length=9, init_std=0.2
    ),
    data=Copy(vocab_size=8, length=4),
    schedule=Constant(),
    steps=20,
    batch_size=8,
    max_skipped=3,
    log_every=1,
    checkpoints=Checkpoints(every=5),
    eval_batches=1,
)


def batch_of(factor=1.0):
    tokens = np.random.default_rng(0).integers(0, 13, (8, 9)).astype(np.int32)
    return {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, axis=1),
        "weights": np.full((8, 9), factor, np.float32),
    }


@pytest.mark.thorough
@settings(deadline=None, max_examples=30)
@given(st.integers(2, 6), st.floats(1, 8), st.floats(-2, 2), st.integers(0, 100))
def test_a_spike_is_far_above_a_full_window(window, deviations, shift, seed):
    """Against NumPy; while the window is not full nothing is one."""
    values = np.random.default_rng(seed).normal(shift, 1, (2, window)).astype(np.float32)
    spikes, limit = Spikes(deviations, window), values.mean(1) + deviations * values.std(1)
    above, below = limit + 0.01 * np.abs(limit) + 0.01, limit - 0.01 * np.abs(limit) - 0.01
    assert is_spike(spikes, jnp.array(values), jnp.array([above[0], below[1]]))
    assert is_spike(spikes, jnp.array(values), jnp.array([below[0], above[1]]))
    assert not is_spike(spikes, jnp.array(values), jnp.array(below))
    values[:, 0] = np.nan
    assert not is_spike(spikes, jnp.array(values), jnp.array([1e9, 1e9], jnp.float32))


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_a_bad_step_changes_no_bit_and_a_good_one_the_same_ones_on_each_platform(
    monkeypatch, platform
):
    """A GPU selects leaf by leaf, others a branch.

    The state is donated, so a leaf that it needs twice would show here.
    """
    # a key's bias has a gradient of rounding errors alone, and other gradients may be as small by
    # chance: Adam would divide
    # them by their size. With an epsilon as large as a gradient it does not
    model = replace(EXPERIMENT.model, use_bias=False)
    optimizer = AdamW(eps=1e-3)
    recipe = build(
        replace(EXPERIMENT, model=model, optimizer=optimizer, ema_decay=0.9, rms=("update",))
    )
    expected, metrics = jax.jit(make_train_step(recipe))(first_state(recipe), batch_of())
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    step, state = jax.jit(make_train_step(recipe), donate_argnums=0), first_state(recipe)
    before = fingerprints(jax.tree.leaves((state.params, state.opt_state, state.ema)))
    state, bad = step(state, batch_of(np.nan))
    assert (
        fingerprints(jax.tree.leaves((state.params, state.opt_state, state.ema))) == before
        and bad["skipped"] == 1
    )
    sizes = [
        float(value) for name, value in bad.items() if "update" in name for value in np.ravel(value)
    ]
    assert sizes and not any(sizes)
    state, good = step(replace(state, step=state.step - 1), batch_of())
    assert (
        jax.tree.structure(state) == jax.tree.structure(expected) and good.keys() == metrics.keys()
    )
    # float32: the two programs may round a product and a sum once or twice
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        state.params,
        expected.params,
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state.ema, expected.ema
    )


@pytest.mark.thorough
def test_a_spike_changes_no_bit_of_parameters_and_optimizer_and_counts():
    # a calm loss
    recipe = build(
        replace(EXPERIMENT, spikes=Spikes(window=4), optimizer=AdamW(learning_rate=1e-5))
    )
    step, state = jax.jit(make_train_step(recipe)), first_state(recipe)
    for _ in range(6):
        state, metrics = step(state, batch_of())
        assert metrics["skipped"] == 0
    strange = batch_of() | {"labels": (batch_of()["labels"] + 5) % 13}
    before = fingerprints(jax.tree.leaves((state.params, state.opt_state, state.recent)))
    for count in (1, 2):
        state, metrics = step(state, strange)
        assert metrics["skipped"] == count and np.isfinite(metrics["loss"])
        assert (
            fingerprints(jax.tree.leaves((state.params, state.opt_state, state.recent))) == before
        )
    state, metrics = step(state, batch_of())
    assert metrics["skipped"] == 0
    assert fingerprints(jax.tree.leaves(state.params)) != before


@pytest.mark.thorough
def test_after_too_many_bad_steps_in_a_row_even_a_good_one_changes_nothing():
    """So the state is still that of the first bad step when the host hears of the last."""
    recipe = build(EXPERIMENT)
    step, state = jax.jit(make_train_step(recipe)), first_state(recipe)
    before = fingerprints(jax.tree.leaves((state.params, state.opt_state)))
    for factor in (np.inf, np.nan, np.inf, 1.0, 1.0):
        state, metrics = step(state, batch_of(factor))
    assert metrics["skipped"] >= EXPERIMENT.max_skipped
    assert fingerprints(jax.tree.leaves((state.params, state.opt_state))) == before


@dataclass(frozen=True)
class Poisoned(Copy):
    """From some example on, one whose weights are not finite."""

    bad: int = 0

    def open(self, model):
        dataset = super().open(model)
        return replace(dataset, train=Rows(dataset.train, self.bad))


@dataclass(frozen=True)
class Rows:
    split: object
    bad: int

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        row = self.split[index]
        return (
            row | {"weights": np.full_like(row["weights"], np.nan)}
            if index % 2 == self.bad
            else row
        )


@pytest.mark.thorough
def test_a_run_that_stays_bad_keeps_the_step_and_says_where_it_is_bad(tmp_path, caplog):
    experiment = replace(EXPERIMENT, data=Poisoned(vocab_size=8, length=4))
    with pytest.raises(NonFinite, match="not finite for 3 steps in a row, up to step 2"):
        loop.train(experiment, tmp_path)
    caplog.clear()
    # started again it ends there again, and says as much
    with pytest.raises(NonFinite, match="up to step 2"):
        loop.train(experiment, tmp_path)
    (line,) = [r.getMessage() for r in caplog.records if "gradient norm" in r.getMessage()]
    assert "batch: weights is not finite in rows" in line and "--replay" in line
    (folder,) = tmp_path.glob("bad-*")
    opened = run.Run(run.RunFolder(loop.epath.Path(folder)), experiment)
    found = replay(opened)
    assert found["step"] == 2 and np.isnan(found["loss"])
    assert found["found"][0].startswith("batch: weights is not finite in rows")


@pytest.mark.thorough
@pytest.mark.parametrize("layer", [0, 2])
def test_the_first_bad_layer_is_named(layer):
    """A NaN in one number of one layer: in the parameters, or made by them."""
    recipe = build(EXPERIMENT)
    state = first_state(recipe)
    kernel = state.params["layers"]["attention"]["query"]["kernel"]
    bad = jax.tree.map(lambda leaf: leaf, state.params)
    bad["layers"]["attention"]["query"]["kernel"] = kernel.at[layer, 3, 0].set(jnp.nan)
    found = explain(EXPERIMENT, replace(state, params=bad), batch_of())["found"]
    assert found[0] == f"parameter layers/attention/query/kernel is not finite in row {layer} of 3"
    activations = [line for line in found if line.startswith("activation")]
    rows = ", ".join(map(str, range(layer, 3)))
    expected = "all of it" if layer == 0 else f"row{'s' * (layer < 2)} {rows} of 3"
    assert activations == [f"activation of layers is not finite in {expected}"]


@pytest.mark.thorough
def test_a_healthy_step_and_a_label_outside_of_the_vocabulary_are_told_apart():
    recipe = build(EXPERIMENT)
    healthy = explain(EXPERIMENT, first_state(recipe), batch_of())
    assert np.isfinite(healthy["loss"]) and "everything is finite" in healthy["found"][0]
    labels = batch_of()["labels"].copy()
    labels[5, 2] = 99999
    found = explain(EXPERIMENT, first_state(recipe), batch_of() | {"labels": labels})["found"]
    assert found[0] == "batch: labels outside of the vocabulary of 13 in row 5 of 8"


def test_a_source_is_held_against_the_vocabulary_of_the_encoder():
    """It may be larger or smaller than that of the decoder; images have none."""
    model = EncoderDecoder(
        replace(EXPERIMENT.model, vocab_size=6, heads=()), EXPERIMENT.model, share_embeddings=False
    )
    tokens, source = np.full((8, 9), 12, np.int32), np.full((8, 9), 5, np.int32)
    batch = batch_of() | {"tokens": tokens, "source": source}
    assert out_of_vocabulary(model, batch) == []
    images = replace(
        model.encoder,
        vocab_size=0,
        context_length=5,
        embedding=Patches((8, 8), (4, 4)),
        masks=(full(),),
    )
    assert (
        out_of_vocabulary(
            replace(model, encoder=images), batch | {"source": np.full((8, 8, 8, 3), 200, np.uint8)}
        )
        == []
    )
    source[3, 1] = 6
    assert out_of_vocabulary(model, batch) == [
        "batch: source outside of the vocabulary of 6 in row 3 of 8"
    ]
