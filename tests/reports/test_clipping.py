"""QK-clip: what users of Megatron-LM, MaxText and ms-swift reported."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.training.recipe import build
from jaxformer.training.step import first_state, make_train_step
from jaxformer.zoo.qk_clip import QKClip, qk_clip
from tests.zoo import test_qk_clip as clipping


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/Megatron-LM#7382",
    right="a head whose scores are never positive keeps its weights",
)
@pytest.mark.parametrize("largest", [-5.0, 0.0, -3e38])
def test_scores_that_are_never_positive_change_nothing(largest):
    tree = P.init(models.spec(clipping.MODEL), jax.random.key(1))
    tree["layers"]["attention"]["largest_score"] = jnp.full((2, 4), largest)
    jax.tree.map(np.testing.assert_array_equal, QKClip(1.0)(tree), tree)


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/Megatron-LM#7382",
    "AI-Hypercomputer/maxtext#3277",
    right="layers with another mixer, or records of another shape, are no obstacle",
)
def test_layers_with_another_mixer_have_no_record():
    model = replace(clipping.MODEL, mixer=(qk_clip, None))
    recipe = build(replace(clipping.EXPERIMENT, model=model))
    step = jax.jit(make_train_step(recipe))
    state, metrics = step(first_state(recipe), clipping.batch())
    assert np.isfinite(metrics["loss"])
    records = {path: leaf for path, leaf in P.paths(state.params).items() if "largest" in path}
    assert len(records) == 1 and next(iter(records.values())).shape == (1, 4)


@pytest.mark.thorough
@pytest.mark.report(
    "modelscope/ms-swift#9901",
    right="devices with different rows have one record, the largest over all rows",
)
def test_all_devices_have_the_largest_score_of_all_rows():
    def record(mesh):
        recipe = build(replace(clipping.EXPERIMENT, mesh=mesh))
        state, _ = jax.jit(make_train_step(recipe))(first_state(recipe), clipping.batch())
        return state.params["layers"]["attention"]["largest_score"]

    expected = record(Mesh(data=1))
    mesh = Mesh(data=8)
    with jax.set_mesh(make_mesh(mesh)):
        found = record(mesh)
    for shard in found.addressable_shards:
        np.testing.assert_allclose(shard.data, expected, rtol=1e-5)  # float32, another order
