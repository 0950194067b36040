"""Alignments and triangles: what users of AlphaFold's public reproductions reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.zoo import evoformer, triangles
from tests.zoo import test_evoformer as tests

B, S, R, C, Z = tests.B, tests.S, tests.R, tests.C, tests.Z


def parameters(name, seed=0):
    return tests.random_parameters(tests.PARTS[name][0], seed)


def change(function, x, place):
    """Which outputs change if the input changes at one place."""
    other = x.at[place].multiply(-1.0)
    return np.abs(function(other) - function(x)).max(axis=-1)[0] > 1e-6


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/alphafold2#88",
    right="attention around the starting node reads a row, around the ending node a column",
)
def test_starting_and_ending_nodes():
    z = jnp.asarray(tests.cells()[1])
    mask = jnp.ones((B, R))
    tree = parameters("starting")
    tree["bias"] = jax.tree.map(jnp.zeros_like, tree["bias"])  # it reads other pairs, too
    changed = change(lambda x: triangles.attend_starting(tree, x, mask), z, (0, 1, 4))
    assert changed[1].all() and not np.delete(changed, 1, axis=0).any()
    changed = change(lambda x: triangles.attend_ending(tree, x, mask), z, (0, 1, 4))
    assert changed[:, 4].all() and not np.delete(changed, 4, axis=1).any()


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/alphafold2#86",
    right="the outer product multiplies: without one of the two vectors nothing is left",
)
def test_an_outer_product_is_no_sum():
    m, mask = jnp.asarray(tests.cells()[0]), jnp.ones((B, S, R))
    tree = parameters("outer")
    for i in range(2):
        factors = {name: leaf.at[..., i, :].set(0) for name, leaf in tree["factors"].items()}
        found = evoformer.outer_product_mean(tree | {"factors": factors}, m, mask)
        np.testing.assert_array_equal(found, jnp.broadcast_to(tree["out"]["bias"], found.shape))


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/alphafold2#89",
    "lucidrains/alphafold2#85",
    right="the pairs bias the attention over residues; a row is one sequence",
)
def test_the_pairs_bias_the_rows():
    m, z, _ = map(jnp.asarray, tests.cells())
    mask = jnp.ones((B, S, R))
    tree = parameters("row")
    changed = change(lambda x: evoformer.row_attention(tree, x, z, mask), m, (0, 3, 2))
    assert changed[3].all() and not np.delete(changed, 3, axis=0).any()
    # a new pair 2-4 changes residue 2 of each sequence, and no other residue
    found = [evoformer.row_attention(tree, m, x, mask) for x in (z, z.at[0, 2, 4].multiply(-1))]
    moved = np.abs(found[1] - found[0]).max(axis=-1)[0] > 1e-6
    assert moved[:, 2].all() and not np.delete(moved, 2, axis=1).any()


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/alphafold2#90",
    "hpcaitech/FastFold#105",
    right="the pairs read the alignment of the same layer, after its update",
)
def test_the_order_of_the_two_halves():
    tests.test_a_model_equals_its_definition()


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/esm#491",
    "elttaes/Revisiting-PLMs#6",
    right="padding in the depth or the length of an alignment changes no answer",
)
def test_padding_in_depth_and_length():
    tests.test_padding_changes_nothing()


@pytest.mark.thorough
@pytest.mark.report(
    "aqlaboratory/openfold#295",
    right="the sum of a triangle update has no overflow in 16 bits",
)
@pytest.mark.parametrize("update", [triangles.multiply_outgoing, triangles.multiply_incoming])
def test_a_triangle_update_in_float16(update):
    """Factors of some hundred: their products are beyond 65,504, the largest float16."""
    z, mask = jnp.asarray(tests.cells()[1]), jnp.ones((B, R))
    tree = parameters("outgoing")
    tree["factors"] = jax.tree.map(lambda leaf: 300 * leaf, tree["factors"])
    exact = update(tree, z, mask)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)
    found = update(low, z.astype(jnp.float16), mask)
    assert found.dtype == jnp.float16
    # 11 bits of the factors and of the sums' norm
    np.testing.assert_allclose(np.float32(found), exact, atol=0.02 * float(jnp.abs(exact).max()))
