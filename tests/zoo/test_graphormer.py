"""Graphormer beside a second definition: NumPy in float64, one graph at a time, with loops."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.csgraph import shortest_path

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full
from jaxformer.models import Classification, Learned, ModelConfig
from jaxformer.zoo.graphormer import (
    NO_PATH,
    GraphAttention,
    GraphNodes,
    degrees,
    edge_bias,
    is_node,
    shortest_paths,
    spatial_bias,
)
from tests.zoo.gradients import assert_every_gradient
from tests.zoo.plain_layers import gelu, normed, softmax

FARTHEST, PATH, TYPES = 3, 2, 3
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=16,
    num_heads=2,
    context_length=8,
    d_ff=24,
    feedforward="gelu_tanh",
    embedding=GraphNodes((5, 3), largest_degree=2),
    mixer=GraphAttention(TYPES, farthest=FARTHEST, path=PATH),
    positions=None,
    heads=(Classification(4, pooler=None),),
    masks=(full(),),
)
apply = jax.jit(models.apply, static_argnums=0, static_argnames=("intermediates", "dtype"))


def random_edges(rng, nodes, density=0.3, directed=False):
    edges = rng.integers(1, TYPES + 1, (nodes, nodes)) * (rng.random((nodes, nodes)) < density)
    if not directed:
        edges = np.triu(edges, 1)
        edges = edges + edges.T
    return edges


def random_graphs(seed=0, sizes=(7, 4, 1), directed=False):
    """(features [A, 2], edges [A, A]) of a graph of each size."""
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        features = np.stack([rng.integers(5, size=size), rng.integers(3, size=size)], axis=1)
        found.append((features, random_edges(rng, size, directed=directed)))
    return found


def batch_of(graphs, length=None, filler=0):
    """(nodes, inputs) of graphs; padding holds `filler`."""
    A = length or max(len(features) for features, _ in graphs)
    nodes = np.full((len(graphs), A, 2), filler, np.int32)
    distances = np.full((len(graphs), A, A), NO_PATH, np.int32)
    paths = np.full((len(graphs), A, A, PATH), filler, np.int32)
    for i, (features, edges) in enumerate(graphs):
        a = len(features)
        nodes[i, :a] = features
        distances[i, :a, :a], paths[i, :a, :a] = shortest_paths(edges, PATH)
    inputs = {"distances": jnp.asarray(distances), "paths": jnp.asarray(paths)}
    return jnp.asarray(nodes), inputs


def random_parameters(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), jnp.float32),
        models.spec(model),
    )


def steps_between(edges):
    """Distances by scipy; inf without a path."""
    distances = shortest_path(edges > 0, unweighted=True)
    np.fill_diagonal(distances, 0)
    return distances


def biases(tree, edges):
    """[N, T, T] of one graph, pair by pair."""
    A = len(edges)
    distances = steps_between(edges)
    _, paths = shortest_paths(edges, PATH)
    N = len(tree["virtual"])
    bias = np.empty((N, A + 1, A + 1))
    bias[:, 0, :] = bias[:, :, 0] = tree["virtual"][:, None]
    for i in range(A):
        for j in range(A):
            distance = distances[i, j]
            row = FARTHEST + 1 if math.isinf(distance) else min(int(distance), FARTHEST)
            value = tree["distance"][row].copy()
            if 0 < distance < math.inf:
                on_path = [
                    tree["edge"][n, paths[i, j, n] - 1] for n in range(min(int(distance), PATH))
                ]
                value += np.mean(on_path, axis=0)
            bias[:, i + 1, j + 1] = value
    return bias


def attention(tree, x, bias):
    out = 0
    for n in range(len(bias)):
        q, k, v = (
            x @ tree[name]["kernel"][:, n] + tree[name]["bias"][n]
            for name in ("query", "key", "value")
        )
        weights = softmax(q @ k.T / math.sqrt(q.shape[1]) + bias[n])
        out = out + weights @ v @ tree["out"]["kernel"][n]
    return out + tree["out"]["bias"]


def classes(tree, features, edges):
    of_nodes = tree["embedding"]
    x = [of_nodes["virtual"]]
    for i in range(len(features)):
        into, out = (
            sum(1 for j in range(len(edges)) if j != i and line[j] > 0)
            for line in (edges[:, i], edges[i])
        )
        x.append(
            of_nodes["feature_0"][features[i, 0]]
            + of_nodes["feature_1"][features[i, 1]]
            + of_nodes["in_degree"][min(into, 2)]
            + of_nodes["out_degree"][min(out, 2)]
        )
    x = np.array(x)
    bias = biases(tree["shared"], edges)
    for i in range(2):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"])
        x = x + attention(layer["attention"], normed(layer["attention_norm"], x), bias)
        y = normed(layer["feedforward_norm"], x)
        up, down = layer["feedforward"]["up"], layer["feedforward"]["down"]
        x = x + gelu(y @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    head = tree["heads"]["classification"]
    return normed(tree["final_norm"], x)[0] @ head["kernel"] + head["bias"]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("directed", [False, True])
def test_a_graphormer_equals_its_definition(seed, directed):
    params, graphs = random_parameters(MODEL, seed), random_graphs(seed, directed=directed)
    nodes, inputs = batch_of(graphs)
    found = apply(MODEL, params, nodes, inputs=inputs).logits
    wide = jax.tree.map(np.float64, params)
    expected = [classes(wide, *graph) for graph in graphs]
    # float32: sums of some hundred terms near 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("directed", [False, True])
def test_distances_are_those_of_scipy(directed):
    rng = np.random.default_rng(directed)
    for nodes in (1, 2, 3, 5, 8, 13):
        for density in (0.0, 0.1, 0.2, 0.5):
            edges = random_edges(rng, nodes, density, directed)
            found, _ = shortest_paths(edges, 4)
            expected = steps_between(edges)
            np.testing.assert_array_equal(found, np.where(np.isinf(expected), -1, expected))


@pytest.mark.parametrize("directed", [False, True])
def test_a_path_is_a_walk_of_edges_as_long_as_the_distance(directed):
    """Some walk along the types of a path leads from i to j, and no type stands behind it."""
    rng = np.random.default_rng(10 + directed)
    for nodes in (2, 4, 7):
        edges = random_edges(rng, nodes, 0.25, directed)
        distances, paths = shortest_paths(edges, nodes)
        for i in range(nodes):
            for j in range(nodes):
                length = max(int(distances[i, j]), 0)
                assert (paths[i, j, :length] > 0).all() and not paths[i, j, length:].any()
                reached = np.arange(nodes) == i
                for kind in paths[i, j, :length]:
                    reached = (edges[reached] == kind).any(axis=0)
                assert reached[j] or distances[i, j] < 0
        padded = shortest_paths(edges, 2, nodes + 1)
        np.testing.assert_array_equal(padded[0][:-1, :-1], distances)
        np.testing.assert_array_equal(padded[1][:-1, :-1], paths[:, :, :2])
        assert (padded[0][-1] == NO_PATH).all() and (padded[0][:, -1] == NO_PATH).all()


def test_degrees_count_the_edges_that_enter_and_leave():
    edges = np.array([[0, 1, 2], [0, 0, 0], [0, 3, 1]])  # the last node has a loop, which is none
    distances = jnp.asarray(shortest_paths(edges, 1)[0])[None]
    into, out = degrees(distances)
    assert into[0].tolist() == [0, 2, 1] and out[0].tolist() == [2, 0, 1]


@pytest.mark.thorough
@pytest.mark.parametrize(("length", "filler"), [(7, 0), (7, 99), (9, 1)])
def test_padding_stays_hidden(length, filler):
    """Whatever stands there, also numbers that are no features."""
    params, graphs = random_parameters(MODEL), random_graphs()
    nodes, inputs = batch_of(graphs, length, filler)
    found = apply(MODEL, params, nodes, inputs=inputs).logits
    for i, graph in enumerate(graphs):
        alone, of_one = batch_of([graph])
        expected = apply(MODEL, params, alone, inputs=of_one).logits[0]
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-5)  # other sums


@pytest.mark.thorough
def test_the_order_of_nodes_changes_no_answer():
    params = random_parameters(MODEL)
    nodes, inputs = batch_of(random_graphs(sizes=(6, 6)))
    order = jnp.array([3, 0, 5, 1, 4, 2])
    mixed = {name: x[:, order][:, :, order] for name, x in inputs.items()}
    found = apply(MODEL, params, nodes[:, order], inputs=mixed)
    expected = apply(MODEL, params, nodes, inputs=inputs)
    tolerance = dict(rtol=1e-5, atol=1e-5)  # other sums of float32
    np.testing.assert_allclose(found.logits, expected.logits, **tolerance)
    np.testing.assert_allclose(found.hidden[:, 1:], expected.hidden[:, 1:][:, order], **tolerance)


def test_another_order_of_a_tree_gives_the_same_paths():
    """A tree has one path between two nodes, so the search cannot choose another one."""
    rng = np.random.default_rng(0)
    edges = np.zeros((9, 9), int)
    for child in range(1, 9):
        parent = rng.integers(child)
        edges[parent, child] = edges[child, parent] = rng.integers(1, TYPES + 1)
    order = rng.permutation(9)
    distances, paths = shortest_paths(edges, 4)
    mixed = shortest_paths(edges[order][:, order], 4)
    np.testing.assert_array_equal(mixed[0], distances[order][:, order])
    np.testing.assert_array_equal(mixed[1], paths[order][:, order])


def test_each_bias_reaches_the_answer():
    """Types of edges, distances and pairs with [VNode] each change it."""
    params = random_parameters(MODEL)
    nodes, inputs = batch_of(random_graphs())
    plain = apply(MODEL, params, nodes, inputs=inputs).logits
    for name in ("distance", "edge", "virtual"):
        table = params["shared"][name].at[..., 0].multiply(3.0)
        other = {**params, "shared": {**params["shared"], name: table}}
        changed = apply(MODEL, other, nodes, inputs=inputs).logits
        assert np.abs(changed - plain)[0].max() > 1e-3, name


@pytest.mark.thorough
def test_weights_sum_to_one_and_skip_padding():
    params = random_parameters(MODEL)
    nodes, inputs = batch_of(random_graphs(), 9)
    names = ("layers/*/attention/weights",)
    output = apply(MODEL, params, nodes, inputs=inputs, intermediates=names)
    weights = np.asarray(output.intermediates[names[0]])  # [L, B, N, T, S]
    assert weights.shape == (2, 3, 2, 10, 10)
    for i, size in enumerate((7, 4, 1)):
        np.testing.assert_allclose(weights[:, i, :, : size + 1].sum(axis=-1), 1, rtol=1e-5)
        assert not weights[:, i, :, :, size + 1 :].any()


@pytest.mark.thorough
def test_unknown_types_give_nan():
    table = jnp.ones((PATH, TYPES, 2))
    paths = jnp.array([[[[1, 0], [4, 0]], [[0, 0], [3, 2]]]])
    found = edge_bias(table, paths)
    np.testing.assert_array_equal(np.isnan(found[..., 0]), [[[False, True], [False, False]]])
    np.testing.assert_allclose(found[0, :, 0, 0], [1, 0])
    nodes, inputs = batch_of(random_graphs(sizes=(3,)))
    other = apply(MODEL, random_parameters(MODEL), nodes.at[0, 1, 0].set(5), inputs=inputs)
    assert np.isnan(other.logits).all()


def test_far_pairs_share_a_number_and_pairs_without_a_path_have_their_own():
    table = jnp.arange(5.0)[:, None]
    found = spatial_bias(table, jnp.array([[[0, 1, 2], [3, 4, 100], [-1, -1, 0]]]))
    np.testing.assert_array_equal(found[0, :, :, 0], [[0, 1, 2], [3, 3, 3], [4, 4, 0]])
    assert is_node(jnp.array([[[0, 1], [1, -1]]])).tolist() == [[True, False]]


@pytest.mark.thorough
def test_gradients_are_finite_and_reach_every_parameter():
    params = random_parameters(MODEL)
    nodes, inputs = batch_of(random_graphs(0, (7, 6, 5, 1)), 8)
    labels = jnp.array([0, 3, 1, 2])

    def loss(params, dtype):
        logits = models.apply(MODEL, params, nodes, inputs=inputs, dtype=dtype).logits
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).sum()

    assert_every_gradient(loss, params, 0.15)


@pytest.mark.thorough
def test_integers_of_8_bits_are_read():
    params = random_parameters(MODEL)
    nodes, inputs = batch_of(random_graphs())
    expected = apply(MODEL, params, nodes, inputs=inputs).logits
    small = {name: x.astype("int8") for name, x in inputs.items()}
    found = apply(MODEL, params, nodes.astype("int8"), inputs=small).logits
    np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    params = random_parameters(MODEL)
    nodes, inputs = batch_of(random_graphs())

    def refused(match, nodes=nodes, **changes):
        with pytest.raises(ConfigError, match=match):
            models.apply(MODEL, params, nodes, inputs={**inputs, **changes})

    with pytest.raises(ConfigError, match=r"distances and paths .*: expected integers \[B, A, A\]"):
        models.apply(MODEL, params, nodes)
    with pytest.raises(ConfigError, match=r"int32\[3, 7, 7\] and float32\[0\]"):
        models.apply(MODEL, params, nodes, inputs={"distances": inputs["distances"]})
    refused("with A=7", distances=inputs["distances"][:, :5, :5])
    refused(r"expected integers \[B, A, A\]", distances=inputs["distances"] * 1.0)
    refused(r"expected \[B, A, A, 2\]", paths=inputs["paths"][..., :1])
    refused(r"expected integers \[B, A, 2\]", nodes[..., :1])
    refused(r"expected integers \[B, A, 2\]", nodes * 1.0)
    with pytest.raises(ConfigError, match="have no order"):
        models.spec(replace(MODEL, positions=Learned()))
    with pytest.raises(ConfigError, match="have no order"):
        models.spec(replace(MODEL, masks=(causal(),)))
    with pytest.raises(ConfigError, match="at least 1"):
        GraphNodes((5, 0))
    with pytest.raises(ConfigError, match="expected a number a feature"):
        GraphNodes(())
    with pytest.raises(ConfigError, match=r"GraphAttention\.path=0"):
        GraphAttention(3, path=0)
    with pytest.raises(ConfigError, match=r"expected types \[A, A\]"):
        shortest_paths(np.zeros((2, 2), int) - 1, 2)
    with pytest.raises(ConfigError, match="length=1: expected a whole number of at least 2"):
        shortest_paths(np.zeros((2, 2), int), 2, 1)
