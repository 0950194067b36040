"""Checkpoints, tried against what users of orbax, Lightning, transformers and others reported."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxformer.data import batching
from jaxformer.data.mixing import Mixture
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.runs import checkpoint, checkpoint_reader
from jaxformer.runs.checkpoint import Manager
from jaxformer.runs.run import Run, neighbours
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.same_data import warn_of_order
from jaxformer.training import Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import abstract_state

MODEL = ModelConfig(vocab_size=16, num_layers=1, d_model=8, num_heads=1, context_length=8)
TINY = Experiment(name="tiny", model=MODEL, data=Reverse(vocab_size=15, length=3), steps=1000)
STATE = {"w": jnp.arange(6.0)}
ABSTRACT = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), STATE)


def zeros(recipe):
    """A state of a run, without a program that draws it."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), abstract_state(recipe)
    )


def save(folder, history, **options):
    """Saves each (step, metric); returns the steps that are kept."""
    with Manager(folder, **{"every": 10, "keep_latest": 1, "keep_best": 1} | options) as manager:
        for step, metric in history:
            manager.save(step, {"w": STATE["w"] + step}, metric=metric, wait=True)
    return checkpoint.steps(folder)


@pytest.mark.report(
    "OpenNMT/OpenNMT-tf#839",
    "facebookresearch/fairseq#732",
    right="a mean is of neighbouring checkpoints, or refused",
    hit="the old best checkpoint filled up the last three: 733 for 900",
    listed="first 06",
)
def test_a_mean_is_of_neighbours():
    folder = RunFolder(epath.Path("runs/a"))
    for kept in ([300, 900, 1000], [100, 200, 300, 800, 900, 950, 1000], [1000]):
        for count in (2, 3, 4):
            wanted = [1000 - 100 * i for i in range(1, count)]
            if set(wanted) <= set(kept):
                assert neighbours(folder, kept, 1000, 100, count) == wanted
            else:
                with pytest.raises(
                    ConfigError, match=r"no mean of .* kept are .*; --checkpoints.keep-latest"
                ):
                    neighbours(folder, kept, 1000, 100, count)
    # the last step, between two multiples
    assert neighbours(folder, [800, 900, 1000], 950, 100, 3) == [
        900,
        800,
    ]
    with pytest.raises(ConfigError, match="and more than there were"):
        neighbours(folder, [100], 100, 100, 2)


@pytest.mark.thorough
@pytest.mark.report(
    "Deci-AI/super-gradients#1932",
    "keras-team/keras#11420",
    right="ranks of two scores are not compared",
    hit="step 10, ranked -30 by BLEU, pushed out the lowest loss",
    listed="second 09",
)
def test_the_best_of_each_score_is_kept(tmp_path):
    save(tmp_path, [(10, -30.0)], score="-bleu")
    assert save(tmp_path, [(20, 2.1), (30, 1.5), (40, 1.9), (50, 2.0)], score="loss") == [
        10,
        30,
        50,
    ]
    assert save(tmp_path, [(60, -31.0), (70, -20.0)], score="-bleu") == [30, 60, 70]


@pytest.mark.thorough
@pytest.mark.report(
    "Deci-AI/super-gradients#1932",
    right="a checkpoint of an older version keeps its rank",
    listed="second 09",
)
def test_manifests_without_a_name_are_read(tmp_path):
    """They were of one score; what they are ranked by is not known to be that of today."""
    save(tmp_path, [(10, 1.0), (20, 2.0)])
    (name,) = (tmp_path / "10").glob("_CHECKPOINT_METADATA")
    assert json.loads(json.loads(name.read_text())["custom_metadata"]["manifest"])["score"] is None
    assert save(tmp_path, [(30, 9.0), (40, 8.0), (50, math.nan)], score="loss") == [10, 40, 50]


@pytest.mark.report(
    "huggingface/transformers#12786",
    "huggingface/transformers#39560",
    "huggingface/transformers#28539",
    right="a step that is among the best is saved",
    listed="second 10",
    hit="an evaluation between two saves was never kept",
)
def test_what_is_among_the_best_is_known_before_a_save(tmp_path):
    with Manager(tmp_path, every=10, keep_latest=1, keep_best=2, score="loss") as manager:
        assert manager.is_among_best(5.0) and not manager.is_among_best(math.nan)
        for step, metric in ((10, 3.0), (20, 2.0)):
            manager.save(step, STATE, metric=metric, wait=True)
        found = [
            manager.is_among_best(metric) for metric in (1.0, 2.5, 3.0, 4.0, math.nan, math.inf)
        ]
        assert found == [True, True, False, False, False, False]
    with Manager(tmp_path, every=10, keep_latest=1, keep_best=2, score="-bleu") as manager:
        assert manager.is_among_best(100.0)  # the first of this score
    with Manager(tmp_path, every=10, keep_latest=1, keep_best=0) as manager:
        assert not manager.is_among_best(0.0)


@pytest.mark.report(
    "allenai/allennlp#1237", right="of two equal scores the earlier checkpoint is the best"
)
def test_an_equal_score_is_no_improvement(tmp_path):
    assert save(tmp_path, [(10, 2.0), (20, 1.0), (30, 1.0), (40, 1.0)]) == [20, 40]
    with Manager(tmp_path, keep_best=1, score="loss") as manager:
        manager.save(50, STATE, metric=1.0, wait=True)
        assert not manager.is_among_best(1.0)


@pytest.mark.thorough
@pytest.mark.report(
    "Lightning-AI/pytorch-lightning#2636",
    "Lightning-AI/pytorch-lightning#1008",
    "Bjarten/early-stopping-pytorch#28",
    right="a score of NaN is neither the best nor the last word",
)
def test_scores_after_nan_are_ranked(tmp_path):
    assert save(
        tmp_path, [(10, math.nan), (20, 3.0), (30, math.nan), (40, 2.0), (50, math.nan)]
    ) == [40, 50]
    assert save(tmp_path / "more", [(10, -math.inf), (20, math.nan), (30, 1.0)]) == [10, 30]


@pytest.mark.thorough
@pytest.mark.report(
    "google/orbax#526",
    "antonioterpin/flowgym#51",
    right="the newest steps stay also where all older ones are better",
)
def test_worse_steps_are_kept_to_go_on_from(tmp_path):
    assert save(
        tmp_path, [(10 * i, float(i)) for i in range(1, 7)], keep_latest=2, keep_best=2
    ) == [10, 20, 50, 60]
    with Manager(tmp_path) as manager:
        restored = manager.restore(ABSTRACT)
    assert restored is not None and restored[0] == 60
    np.testing.assert_array_equal(restored[1]["w"], np.arange(6.0) + 60)


@pytest.mark.report("OpenPipe/ART#117", right="the best step is known from the checkpoints alone")
def test_the_best_needs_no_other_file(tmp_path):
    save(tmp_path / "a", [(10, 1.0), (20, 2.0)], score="loss")
    # without the record, the lock and whatever else
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert save(tmp_path / "b", [(30, 3.0), (40, 4.0)], score="loss") == [10, 40]


@pytest.mark.report(
    "huggingface/transformers#35580",
    "facebookresearch/metaseq#53",
    "allenai/allennlp#2129",
    "nyu-mll/jiant#169",
    right="what a killed save left is no checkpoint, and goes",
)
def test_half_a_save_is_no_checkpoint(tmp_path):
    save(tmp_path, [(10, None)])
    shutil.copytree(tmp_path / "10", tmp_path / "20.orbax-checkpoint-tmp")
    for file in (tmp_path / "20.orbax-checkpoint-tmp").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.steps(tmp_path) == [10]
    with Manager(tmp_path) as manager:
        restored = manager.restore(ABSTRACT)
        assert restored is not None and restored[0] == 10
        assert not list(tmp_path.glob("20*"))


@pytest.mark.report(
    "bghira/SimpleTuner#2613",
    right="a damaged checkpoint is put aside, and the one before it taken",
)
def test_a_damaged_checkpoint_is_not_read(tmp_path):
    save(tmp_path, [(10, None), (20, None)], keep_latest=2)
    files = [
        path for path in (tmp_path / "20").rglob("*") if path.is_file() and path.parent.name == "d"
    ]
    for file in files:  # which of them is read depends on orbax's version
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    said = []
    with Manager(tmp_path, keep_latest=2, log=said.append) as manager:
        restored = manager.restore(ABSTRACT)
    assert restored is not None and restored[0] == 10 and (tmp_path / "20.corrupt").is_dir()
    assert len(said) == 1 and "step 20 is damaged" in said[0]


@pytest.mark.thorough
@pytest.mark.report(
    "m2lines/Samudra#282",
    "Megvii-BaseDetection/YOLOX#1318",
    "atomistic-machine-learning/schnetpack#785",
    right="raw weights and their average are both saved, and training goes on from the raw ones",
)
def test_weights_and_their_average_are_both_kept(tmp_path):
    recipe = build(replace(TINY, ema_decay=0.9))
    state = zeros(recipe)
    state = replace(state, ema=jax.tree.map(lambda leaf: leaf + 1, state.params))
    with Manager(tmp_path) as manager:
        manager.save(1, state, wait=True)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        restored = manager.restore(abstract)
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, restored[1], state)
    for part in ("params", "ema"):
        _, leaves, _ = checkpoint_reader.restore_params(tmp_path, abstract.params, part=part)
        jax.tree.map(np.testing.assert_array_equal, leaves, getattr(state, part))


@pytest.mark.thorough
@pytest.mark.report(
    "kohya-ss/sd-scripts#586",
    "wdkwdkwdk/CLONE_DK#2",
    right="a mean of adapted weights is that of the merged ones",
    hit="--average of a LoRA run multiplied the means of the factors",
)
def test_a_mean_of_adapters_is_that_of_their_products(tmp_path):
    experiment = replace(TINY, adaptation=Lora(rank=2), initial="somewhere")
    recipe = build(experiment)
    state, folder, merged = zeros(recipe), RunFolder(epath.Path(tmp_path)), []
    with Manager(folder.checkpoints, every=500, keep_latest=2) as manager:
        for step in (500, 1000):
            trained = jax.tree.map(
                lambda leaf, step=step: jnp.full_like(leaf, step / 500), state.params
            )
            merged.append(recipe.weights(trained))
            manager.save(step, replace(state, params=trained), {}, wait=True)
    run = Run(folder, experiment, None, average=2)
    run.__dict__.update(mesh=None, recipe=recipe)
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *merged)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), run.params, mean)


@pytest.mark.report(
    "mozilla/DeepSpeech#447", right="a start that goes on overwrites no checkpoint that exists"
)
def test_a_step_that_exists_is_not_written_again(tmp_path):
    save(tmp_path, [(10, None), (20, None)], keep_latest=2)
    said = []
    with Manager(tmp_path, keep_latest=2, log=said.append) as manager:
        for step in (10, 20, 15):
            manager.save(step, jax.tree.map(jnp.zeros_like, STATE))
        manager.wait()
        restored = manager.restore(ABSTRACT)
    assert checkpoint.steps(tmp_path) == [10, 20] and len(said) == 3
    assert restored is not None
    np.testing.assert_array_equal(restored[1]["w"], np.arange(6.0) + 20)


@pytest.mark.thorough
@pytest.mark.report(
    "mlcommons/algorithmic-efficiency#816", "AI-Hypercomputer/maxtext#3800", listed="third 28",
    right="a state goes on on another mesh with the same numbers",
)  # fmt: skip
def test_a_state_is_read_on_another_mesh(tmp_path):
    auto = jax.sharding.AxisType.Auto
    first = jax.make_mesh((4,), ("data",), axis_types=(auto,))
    second = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(auto, auto))
    state = {"w": jnp.arange(32.0).reshape(8, 4)}
    put = jax.device_put(state, jax.NamedSharding(first, jax.P("data")))
    with Manager(tmp_path) as manager:
        manager.save(1, put, wait=True)
        for sharding in (jax.NamedSharding(second, jax.P("tensor", "fsdp")), None):
            restored = manager.restore(
                {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}
            )
            assert restored is not None
            np.testing.assert_array_equal(restored[1]["w"], state["w"])


class Split:
    """A split of so many examples, which nobody reads."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


@pytest.mark.report(
    "huggingface/accelerate#2823",
    "wyim-pgl/transgenic#59",
    right="a run that goes on with another order of its examples says so",
    hit=(
        "a run of more than 65,536 examples that began under the former shuffle went on under "
        "the new one in silence"
    ),
)
def test_a_run_that_goes_on_in_another_order_says_so(caplog):
    """Such a checkpoint names no order.

    Smaller splits, and those that choose for themselves, have the order they had.
    """
    chooses = Split(10**6)
    chooses.batch_indices = lambda seed, size: None
    large, small = Split(65_537), Split(65_536)
    folder, now = RunFolder(epath.Path("runs/a")), {"order": batching.ORDER}
    for metadata, split, warns in [
        ({}, large, True),
        ({}, Mixture([small, large], [1, 1]), True),
        ({}, small, False),
        ({}, Mixture([small, small], [1, 1]), False),
        ({}, chooses, False),
        (now, large, False),
    ]:
        caplog.clear()
        warn_of_order(folder, metadata, SimpleNamespace(train=split))
        assert len(caplog.messages) == warns
        if warns:
            assert caplog.messages[0].startswith(
                "runs/a: the order of more than 65,536 examples changed"
            )
