"""SOAP against its algorithm in float64 NumPy, layer by layer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import params
from jaxformer.errors import ConfigError
from jaxformer.training import SOAP, optimizers
from jaxformer.training.soap import matrix_of
from jaxformer.training.step import state_specs

from tests.training.test_step import EXPERIMENT  # isort: skip

ZEROS = jax.nn.initializers.zeros
SPEC = {
    # an attention's maps: inputs and outputs of several axes
    "query": params.Spec((2, 4, 2, 3), ("layers", "embed", "heads", "head"), ZEROS, ("embed",)),
    "out": params.Spec(
        (2, 2, 3, 4), ("layers", "heads", "head", "embed"), ZEROS, ("heads", "head")
    ),
    "experts": params.Spec((2, 3, 4, 5), ("layers", "expert", "embed", "mlp"), ZEROS, ("embed",)),
    "tokens": params.Spec((9, 4), ("vocab", "embed"), ZEROS),  # its side of 9 is not rotated
    "scale": params.Spec((4,), ("embed",), ZEROS),
}
CONFIG = SOAP(every=2, largest_side=8, weight_decay=0.1)


def trees(count):
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), SPEC)
        for _ in range(count)
    ]


def each_matrix(path, x):
    """[number of matrices, m, n] in float64."""
    matrix = matrix_of(SPEC[path])
    x = np.asarray(matrix.to_matrix(jnp.asarray(x)), np.float64)
    return x.reshape(-1, matrix.m, matrix.n)


class ByHand:
    """Algorithm 3 for one matrix; `bases` are the first eigenvectors, checked by the test.

    Where L has fewer directions than rows, its other eigenvectors are anybody's choice.
    """

    def __init__(self, bases, first, b2):
        self.q = list(bases)
        self.l = (1 - b2) * first @ first.T
        self.r = (1 - b2) * first.T @ first
        self.m = self.v = np.zeros_like(first)

    def step(self, g, t, config):
        b1, b2 = config.b1, config.b2
        q, p = self.q
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * (q.T @ g @ p) ** 2
        update = (q.T @ self.m @ p) / (1 - b1**t)
        update = update / (np.sqrt(self.v) / np.sqrt(1 - b2**t) + config.eps / np.sqrt(1 - b2**t))
        update = q @ update @ p.T
        self.l = b2 * self.l + (1 - b2) * g @ g.T
        self.r = b2 * self.r + (1 - b2) * g.T @ g
        if t % config.every == 0:
            self.renew()
        return update

    def renew(self):
        for i, gram in enumerate((self.l, self.r)):
            basis = self.q[i]
            if len(basis) > CONFIG.largest_side:  # the identity for good
                continue
            order = np.argsort(-np.diag(basis.T @ gram @ basis))
            self.v = np.take(self.v, order, axis=i)
            self.q[i] = np.linalg.qr(gram @ basis[:, order])[0]


@pytest.mark.thorough
def test_soap_is_its_algorithm_for_each_layer_and_expert():
    start, *gradients = trees(8)
    transform = optimizers.build(CONFIG, SPEC)
    state = transform.init(start)
    update = jax.jit(transform.update)
    updates, state = update(gradients[0], state, start)
    matrices = [path for path in SPEC if path != "scale"]
    for path in matrices:  # the first step is decay alone
        np.testing.assert_allclose(updates[path], -0.1 * start[path], rtol=1e-6)
    soap = state.inner_states["SOAP"].inner_state[0]
    hands = {path: [] for path in matrices}
    for path in matrices:
        matrix = matrix_of(SPEC[path])
        sides = []
        for name, size in (("left", matrix.m), ("right", matrix.n)):
            side = getattr(soap, name)[path]
            is_long = size > CONFIG.largest_side
            assert (side is None) == is_long
            eye = np.eye(size)
            basis = eye if is_long else np.asarray(side.basis, np.float64).reshape(-1, size, size)
            sides.append(np.broadcast_to(basis, (len(each_matrix(path, start[path])), size, size)))
        for i, first in enumerate(each_matrix(path, gradients[0][path])):
            bases = [sides[0][i], sides[1][i]]
            for basis, gram in zip(bases, (first @ first.T, first.T @ first), strict=True):
                np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-5)
                if len(basis) <= CONFIG.largest_side:
                    rotated = basis.T @ gram @ basis
                    values = np.linalg.eigvalsh(gram)[::-1]
                    np.testing.assert_allclose(rotated, np.diag(values), atol=1e-4)
            hands[path].append(ByHand(bases, first, CONFIG.b2))
    for t, gradient in enumerate(gradients[1:], 1):
        updates, state = update(gradient, state, start)
        for path in matrices:
            found = each_matrix(path, updates[path])
            decay = each_matrix(path, start[path])
            for i, g in enumerate(each_matrix(path, gradient[path])):
                expected = -hands[path][i].step(g, t, CONFIG) - 0.1 * decay[i]
                # float32, and QR of products whose columns differ in size by up to 1e3
                np.testing.assert_allclose(found[i], expected, atol=2e-3, err_msg=f"{path} {t}")
    adamw = optax.adamw(1.0, b1=0.95, b2=0.95, eps=1e-8, weight_decay=0.0)
    theirs = adamw.init(start["scale"])
    for gradient in gradients:
        expected, theirs = adamw.update(gradient["scale"], theirs, start["scale"])
    np.testing.assert_allclose(updates["scale"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_rotation_of_the_inputs_rotates_the_updates():
    """What Adam has not, and SOAP is for: Q' G gives Q' update, for any orthogonal Q'."""
    spec = {"w": params.Spec((4, 4), ("embed", "mlp"), ZEROS, ("embed",))}
    transform = optimizers.build(SOAP(every=2, weight_decay=0.0), spec)
    rng = np.random.default_rng(3)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0].astype(np.float32)
    gradients = [jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(4)]
    update = jax.jit(transform.update)

    def run(of):
        start = {"w": jnp.zeros((4, 4))}
        state = transform.init(start)
        for gradient in gradients:
            updates, state = update({"w": of(gradient)}, state, start)
        return updates["w"]

    # float32, through two decompositions
    np.testing.assert_allclose(run(lambda g: turn @ g), turn @ run(lambda g: g), atol=2e-3)


def test_what_is_kept_is_split_like_its_parameter_and_the_rest_is_whole():
    from jaxformer.parallel import Mesh, make_mesh
    from jaxformer.training.recipe import build

    made = replace(EXPERIMENT, optimizer=SOAP(), mesh=Mesh(fsdp=2, zero1=True))
    specs = state_specs(build(made), make_mesh(made.mesh))
    state = specs.opt_state.inner_states["SOAP"].inner_state[0]
    kernel = ("layers", "attention", "query", "kernel")

    def at(tree):
        for name in kernel:
            tree = tree[name]
        return tree

    assert "data" in str(at(state.mean)) and "data" in str(at(state.mean_square))
    assert not any(at(state.left).basis) and not any(at(state.right).gram)


@pytest.mark.parametrize(
    ("field", "value"), [("every", 0), ("largest_side", 0), ("b1", 1.0), ("eps", 0.0)]
)
def test_fields_without_meaning_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"optimizer.{field}"):
        replace(SOAP(), **{field: value})


def test_routes_and_rates():
    routes = optimizers.routes(CONFIG, SPEC)
    assert routes["query"] == "SOAP + decay" and routes["tokens"] == "SOAP + decay"
    assert routes["scale"] == "AdamW"
    scaled = {**SPEC, "query": replace(SPEC["query"], rate=0.5)}
    with pytest.raises(ConfigError, match="optimizer=SOAP: parameters have rates"):
        optimizers.build(CONFIG, scaled)
