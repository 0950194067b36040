"""Graphormer: a graph as a set of nodes, with attention biases from its shortest paths.

Ying et al. 2021, arXiv:2106.05234. A batch has graphs of up to A nodes:

    distances, paths = shortest_paths(edges, 5, A)       # of each graph, once, on the host
    ModelConfig(embedding=GraphNodes(values), mixer=GraphAttention(edge_types), positions=None,
                masks=(full(),), heads=(Classification(1, pooler=None),), ...)
    models.apply(config, params, nodes, inputs={"distances": distances, "paths": paths})

`nodes` [B, A, F] are the features of nodes, each a number from 0 on. `distances` [B, A, A] count
the edges from node i to node j; -1: no path leads there. A node of padding has -1 to itself, too.
`paths` [B, A, A, P] are the types of the first P edges of one shortest path; 0 stands behind its
end. The virtual node [VNode] is position 0 of the sequence, before the nodes: T = A + 1. A head
that pools the first position reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Bool, Float, Int, Integer

from jaxformer import ops
from jaxformer.errors import ConfigError, check_numbers, check_whole
from jaxformer.masks import full, segments
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Embedder, Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.ops.positions import learned
from jaxformer.params import Spec, Tree

NO_PATH = -1  # the distance of two nodes without a path, and of padding


def shortest_paths(
    edges: Integer[np.ndarray, "A A"], path: int, length: int | None = None
) -> tuple[Int[np.ndarray, "T T"], Int[np.ndarray, "T T P"]]:
    """(distances, types of the first `path` edges of a shortest path) from node i to node j.

    `edges[i, j]` is the type of the edge from i to j, from 1 on; 0: no edge. Loops do not count. Of
    several shortest paths one is taken. Nodes of padding follow, up to `length` nodes. Floyd 1962.
    Raises ConfigError for edges that are not square, negative types, and a `length` below A.
    """
    A = len(edges)
    check_whole("shortest_paths: path", path)
    check_whole("shortest_paths: length", A if length is None else length, least=A)
    if edges.shape != (A, A) or (edges < 0).any():
        raise ConfigError(
            f"shortest_paths: edges {list(edges.shape)}: expected types [A, A] of edges, 0 or more"
        )
    nodes = np.arange(A)
    distances = np.where(edges > 0, 1, A)  # A is longer than every path
    distances[nodes, nodes] = 0
    following = np.broadcast_to(nodes, (A, A))  # the node after i on the way to j
    for k in range(A):
        through = distances[:, k, None] + distances[None, k]
        is_shorter = through < distances
        distances = np.where(is_shorter, through, distances)
        following = np.where(is_shorter, following[:, k, None], following)
    paths = np.zeros((A, A, path), np.int32)
    place = np.broadcast_to(nodes[:, None], (A, A))
    for n in range(path):
        step = following[place, nodes]
        is_on_path = (distances < A) & (distances > n)
        paths[:, :, n] = np.where(is_on_path, edges[place, step], 0)
        place = np.where(is_on_path, step, place)
    distances = np.where(distances < A, distances, NO_PATH).astype(np.int32)
    behind = 0, (length or A) - A
    distances = np.pad(distances, behind, constant_values=NO_PATH)
    return distances, np.pad(paths, (behind, behind, (0, 0)))


def is_node(distances: Int[Array, "B A A"]) -> Bool[Array, "B A"]:
    """False for padding: only a node is at distance 0 from itself."""
    return jnp.diagonal(distances, axis1=1, axis2=2) == 0


def degrees(distances: Int[Array, "B A A"]) -> tuple[Int[Array, "B A"], Int[Array, "B A"]]:
    """(the number of edges that enter each node, of edges that leave it)."""
    is_edge = distances == 1
    return is_edge.sum(axis=1), is_edge.sum(axis=2)


def spatial_bias(
    table: Float[Array, "R N"], distances: Int[Array, "B A A"]
) -> Float[Array, "B A A N"]:
    """b_phi(i,j): one number for each distance and head. Section 3.1.2, eq. 6.

    Distances from R - 2 on share a row of the table. The last row is that of pairs without a path.
    """
    R = len(table)
    rows = jnp.where(distances < 0, R - 1, jnp.minimum(distances, R - 2))
    # a product, because the gradient of a table look-up is slow on a CPU
    return ops.einsum("bijr,rn->bijn", jax.nn.one_hot(rows, R, dtype=table.dtype), table)


def edge_bias(
    table: Float[Array, "P E N"], paths: Int[Array, "B A A P"]
) -> Float[Array, "B A A N"]:
    """c_ij: the mean over the edges e_n of the path of table[n, type of e_n]. Section 3.1.3, eq. 7.

    The paper's x_e . w_n is this look-up: a type is a one-hot feature. The first P edges count. A
    pair without edges has 0. A type that does not exist gives NaN.
    """
    E = table.shape[1]
    types = jax.nn.one_hot(paths - 1, E, dtype=table.dtype)  # 0 has no entry
    total = ops.einsum("bijpe,pen->bijn", types, table)
    count = jnp.maximum((paths > 0).sum(axis=-1), 1)
    is_known = ((paths >= 0) & (paths <= E)).all(axis=-1)
    return jnp.where(is_known, 1 / count, jnp.nan)[..., None].astype(table.dtype) * total


def with_virtual_node(
    bias: Float[Array, "B A A N"], virtual: Float[Array, " N"]
) -> Float[Array, "B N T T"]:
    """The biases of all positions. Pairs with [VNode] have one number a head. Section 3.2."""
    padded = jnp.pad(bias, ((0, 0), (1, 0), (1, 0), (0, 0)))
    is_node = jnp.arange(padded.shape[1]) > 0
    is_pair = (is_node[:, None] & is_node[None])[None, :, :, None]
    return jnp.where(is_pair, padded, virtual[None, None, None]).transpose(0, 3, 1, 2)


def graphs_of(inputs: Any, length: int) -> tuple[Int[Array, "B A A"], Int[Array, "B A A P"]]:
    """(distances, paths) of `models.apply(..., inputs=...)`, for graphs of `length` nodes.

    Raises ConfigError for inputs that lack one, and for other shapes.
    """
    found = inputs if isinstance(inputs, Mapping) else {}
    arrays = [jnp.asarray(found.get(name, ())) for name in ("distances", "paths")]
    for array, axes in zip(arrays, (3, 4), strict=True):
        is_square = array.ndim == axes and array.shape[1:3] == (length, length)
        if not (is_square and jnp.issubdtype(array.dtype, jnp.integer)):
            shapes = " and ".join(f"{each.dtype}{list(each.shape)}" for each in arrays)
            raise ConfigError(
                f"inputs: distances and paths {shapes}: expected integers [B, A, A] and "
                f"[B, A, A, P] with A={length}, as zoo.graphormer.shortest_paths makes them"
            )
    return arrays[0].astype(jnp.int32), arrays[1].astype(jnp.int32)


@dataclass(frozen=True)
class GraphNodes:
    """The embedding: [VNode], then each node's features and degrees. Sections 3.1.1 and 3.2.

    h_i is the sum of a vector for each feature, for the edges that enter, and for those that leave:
    eq. 5. A value that does not exist gives NaN. Raises ConfigError for nodes of another shape.
    """

    values: tuple[int, ...]  # for each feature of a node, the number of its values
    largest_degree: int = 63  # degrees from here on share a vector

    def __post_init__(self):
        check_numbers("GraphNodes.", self, largest_degree=1)
        if not (isinstance(self.values, tuple | list) and self.values):
            raise ConfigError(f"GraphNodes.values={self.values}: expected a number a feature")
        for count in self.values:
            check_whole("GraphNodes.values", count)

    def __call__(self, config: ModelConfig) -> Embedder:
        if config.positions is not None or set(config.masks) != {full()}:
            raise ConfigError(
                "model: the nodes of a graph have no order, and each sees all others; expected "
                "positions=None, masks=(full(),)"
            )
        D, start = config.d_model, normal(config.std)
        sizes = {f"feature_{k}": count for k, count in enumerate(self.values)}
        sizes |= {"in_degree": self.largest_degree + 1, "out_degree": self.largest_degree + 1}
        spec = {name: Spec((count, D), (None, "embed"), start) for name, count in sizes.items()}
        spec["virtual"] = Spec((D,), ("embed",), start)

        def apply(
            params: Tree, nodes: Int[Array, "B A F"], inputs: Any, context: Context
        ) -> Float[Array, "B T D"]:
            B, A, F = nodes.shape
            distances, _ = graphs_of(inputs, A)
            # padding may hold any number
            nodes = jnp.where(is_node(distances)[..., None], nodes.astype(jnp.int32), 0)
            into, out = (jnp.minimum(d, self.largest_degree) for d in degrees(distances))
            x = learned(into, params["in_degree"]) + learned(out, params["out_degree"])
            for k in range(F):
                x = x + learned(nodes[..., k], params[f"feature_{k}"])
            virtual = jnp.broadcast_to(params["virtual"], (B, 1, D))
            return jnp.concatenate([virtual, x], axis=1).astype(context.dtype or x.dtype)

        return Embedder(spec, apply, self.count)

    def count(self, nodes: Array) -> int:
        """T, the number of nodes and [VNode]. Raises ConfigError for nodes of another shape."""
        F = len(self.values)
        is_integer = jnp.issubdtype(nodes.dtype, jnp.integer)
        if not is_integer or nodes.ndim != 3 or nodes.shape[2] != F:
            raise ConfigError(
                f"nodes {nodes.dtype}{list(nodes.shape)}: expected integers [B, A, {F}], "
                f"{F} features of each of A nodes"
            )
        return nodes.shape[1] + 1


@dataclass(frozen=True)
class GraphAttention:
    """The mixer: attention with scores q_i . k_j / sqrt(H) + b_phi(i,j) + c_ij. Eq. 6 and 7.

    All layers share b and c, and each head has its own. Padding is hidden. Decoding is refused.
    """

    edge_types: int  # E, the number of types of edges
    farthest: int = 20  # distances in edges from here on share a number
    path: int = 5  # P, the edges of a path that have weights, from its first node on

    def __post_init__(self):
        check_numbers("GraphAttention.", self, edge_types=1, farthest=1, path=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        N, start = config.num_heads, normal(config.std)
        shared = {
            "distance": Spec((self.farthest + 2, N), (None, "heads"), start),
            "edge": Spec((self.path, self.edge_types, N), (None, None, "heads"), start),
            "virtual": Spec((N,), ("heads",), start),
        }
        mixer = attention(config, attend=self.attend)
        return mixer._replace(shared=shared, state=None, rolls=False)

    def attend(
        self,
        params: Tree,
        context: Context,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        **options: Any,
    ) -> Array | tuple[Array, Array]:
        """`ops.attention` with the biases, among the nodes of each graph and its [VNode]."""
        distances, paths = graphs_of(context.inputs, query.shape[1] - 1)
        if paths.shape[-1] != self.path:
            raise ConfigError(
                f"inputs: paths {list(paths.shape)}: expected [B, A, A, {self.path}], as "
                f"shortest_paths(edges, {self.path}) makes them"
            )
        tables = context.shared
        paths = jnp.where(distances[..., None] > 0, paths, 0)  # padding may hold any number
        bias = spatial_bias(tables["distance"], distances) + edge_bias(tables["edge"], paths)
        options["bias"] = with_virtual_node(bias, tables["virtual"])
        ids = jnp.pad(is_node(distances).astype(jnp.int32), ((0, 0), (1, 0)), constant_values=1)
        options["mask"] = options["mask"] & segments(ids)
        return ops.attention(query, key, value, **options)
