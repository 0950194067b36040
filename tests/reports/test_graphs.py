"""Transformers of graphs and molecules: what users of Graphormer and its kin reported."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.masks import full
from jaxformer.models.layer import Context
from jaxformer.zoo.graphormer import edge_bias
from tests.zoo import test_graphormer as graphs


@pytest.mark.thorough
@pytest.mark.report(
    "dmlc/dgl#5476",
    right="rows of padding, which see no key, stay finite, and so do their gradients",
)
def test_rows_of_padding_stay_finite():
    model = replace(graphs.MODEL, num_layers=1)
    params = graphs.random_parameters(model)
    nodes, inputs = graphs.batch_of(graphs.random_graphs(), 9)

    def total(params):
        return models.apply(model, params, nodes, inputs=inputs).hidden.sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.report(
    "microsoft/Graphormer#115",
    right="the mean along a path divides by its number of edges, and a pair without edges has 0",
)
def test_the_mean_along_a_path():
    table = jnp.array([[2.0], [5.0], [11.0]])[:, :, None]  # one type, one head
    paths = jnp.array([[[[0, 0, 0], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]]])
    np.testing.assert_allclose(edge_bias(table, paths)[0, :, :, 0], [[0, 2], [3.5, 6]])


@pytest.mark.thorough
@pytest.mark.report(
    "microsoft/Graphormer#87",
    right="padding may hold any number, and 0 is a value of a feature as others are",
)
@pytest.mark.parametrize("filler", [0, 2])
def test_padding_may_hold_any_number(filler):
    graphs.test_padding_stays_hidden(7, filler)


@pytest.mark.thorough
@pytest.mark.report(
    "rampasek/GraphGPS#40",
    right="another order of the nodes changes no answer of the virtual node",
)
def test_the_virtual_node_knows_no_order():
    graphs.test_the_order_of_nodes_changes_no_answer()


@pytest.mark.report(
    "leffff/graphormer-pyg#29",
    right="the biases of distances and edges are declared once, and all layers share them",
)
def test_one_bias_for_all_layers():
    tree = models.spec(graphs.MODEL)
    assert set(tree["shared"]) == {"distance", "edge", "virtual"}
    assert set(tree["layers"]["attention"]) == {"query", "key", "value", "out"}


@pytest.mark.report(
    "leffff/graphormer-pyg#5",
    right="a node with more edges than the largest degree shares the vector of that degree",
)
def test_a_degree_above_the_largest():
    stars = []
    for leaves in (2, 3):
        edges = np.zeros((leaves + 1, leaves + 1), int)
        edges[0, 1:] = edges[1:, 0] = 1
        stars.append((np.zeros((leaves + 1, 2), int), edges))
    nodes, inputs = graphs.batch_of(stars)
    embedder = graphs.MODEL.embedding(graphs.MODEL)
    params = graphs.random_parameters(graphs.MODEL)["embedding"]
    context = Context(full(), jnp.arange(5)[None])
    two, three = embedder.apply(params, nodes, inputs, context)
    np.testing.assert_array_equal(two[1], three[1])  # the middle of each star


@pytest.mark.report(
    "awslabs/dgl-lifesci#84",
    "rdkit/rdkit#5257",
    right="molecules without rings, whose scaffold is empty, do not all become test data",
)
@pytest.mark.parametrize("seed", range(8))
def test_molecules_without_rings(seed):
    pytest.importorskip("rdkit")
    from jaxformer.data import molecules

    assert molecules.scaffold(molecules.read("CCCO")) == ""
    assert not molecules.is_held_out("", seed, 8)


@pytest.mark.report(
    "deepchem/deepchem#3512",
    right="a SMILES that rdkit refuses does not end the making of splits",
)
def test_a_smiles_that_is_no_molecule_is_left_out():
    pytest.importorskip("rdkit")
    from jaxformer.data import molecules

    # a nitro group whose nitrogen lacks its charge
    assert molecules.readable("O=N([O-])c1ccccc1") is None


@pytest.mark.thorough
@pytest.mark.report(
    "DaoyuanLi2816/Molecule-Generator#22",
    right="the molecules of a batch do not meet",
)
def test_the_graphs_of_a_batch_do_not_meet():
    params = graphs.random_parameters(graphs.MODEL)
    first, second = (graphs.random_graphs(seed, (6, 5)) for seed in (3, 4))
    answers = []
    for other in (first[1], second[1]):
        nodes, inputs = graphs.batch_of([first[0], other])
        answers.append(graphs.apply(graphs.MODEL, params, nodes, inputs=inputs).logits[0])
    np.testing.assert_array_equal(*answers)
