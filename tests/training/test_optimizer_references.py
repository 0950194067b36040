"""Lion, Adafactor and Muon against their published formulas in float64 NumPy, step by step."""

import jax
import numpy as np
import pytest

from jaxformer import params
from jaxformer.training import Adafactor, Lion, Muon, optimizers

ZEROS = jax.nn.initializers.zeros
STEPS = 5
SPEC = {
    "kernel": params.Spec((2, 130, 132), ("layers", "embed", "mlp"), ZEROS, ("embed",)),
    "small": params.Spec((2, 3, 8, 6), ("layers", "expert", "embed", "mlp"), ZEROS, ("embed",)),
    "scale": params.Spec((2, 7), ("layers", "embed"), ZEROS),
}


def draw(rng):
    return {name: rng.normal(size=leaf.shape).astype("f4") for name, leaf in SPEC.items()}


def run(config):
    """(the gradients, parameters after each step of rate 0.1), parameters first."""
    rng = np.random.default_rng(0)
    p = draw(rng)
    gradients = [draw(rng) for _ in range(STEPS)]
    transform = optimizers.build(config, SPEC)
    state = transform.init(p)
    update = jax.jit(transform.update)
    found = [p]
    for gradient in gradients:
        updates, state = update(gradient, state, p)
        p = jax.tree.map(lambda p, u: np.asarray(p + 0.1 * u), p, updates)
        found.append(p)
    return gradients, found


def compare(config, rule, names, atol):
    """`rule(gradients of one layer's array, its first value) -> [value after each step]`."""
    gradients, found = run(config)
    for name in names:
        stack = optimizers.stack_sizes(SPEC[name])
        for index in np.ndindex(stack):
            own = [gradient[name][index].astype(np.float64) for gradient in gradients]
            expected = rule(own, found[0][name][index].astype(np.float64), name)
            for t, value in enumerate(expected, 1):
                np.testing.assert_allclose(
                    found[t][name][index], value, rtol=1e-5, atol=atol, err_msg=f"{name} {t}"
                )


@pytest.mark.thorough
def test_lion_is_algorithm_2():
    """Chen et al. 2023: the sign of an interpolation, then another one as momentum."""

    def rule(gradients, p, name):
        m, values = np.zeros_like(p), []
        for g in gradients:
            u = np.sign(0.9 * m + (1 - 0.9) * g)
            m = 0.99 * m + (1 - 0.99) * g
            p = p - 0.1 * (u + (0.5 * p if name != "scale" else 0))
            values.append(p)
        return values

    compare(Lion(weight_decay=0.5), rule, SPEC, 1e-6)


@pytest.mark.thorough
def test_adafactor_is_algorithms_4_and_5():
    """Shazeer & Stern 2018: factored where both sides have 128, with b2_t = 1 - t^-0.8, updates
    clipped to a root mean square of 1, and steps relative to max(1e-3, that of the parameter)."""

    def rms(x):
        return np.sqrt(np.mean(np.square(x)))

    def rule(gradients, p, name):
        rows = columns = v = 0.0
        values = []
        for t, g in enumerate(gradients, 1):
            b2 = 1 - t**-0.8
            square = g**2 + 1e-30
            if name == "kernel":
                rows = b2 * rows + (1 - b2) * square.mean(axis=1)
                columns = b2 * columns + (1 - b2) * square.mean(axis=0)
                mean = np.outer(rows, columns) / rows.mean()
            else:
                v = b2 * v + (1 - b2) * square
                mean = v
            u = g / np.sqrt(mean)
            u = u / max(1.0, rms(u))
            p = p - 0.1 * max(1e-3, rms(p)) * u
            values.append(p)
        return values

    compare(Adafactor(), rule, SPEC, 1e-5)


def orthogonal(x):
    """Five Newton-Schulz steps with the published coefficients, on the side that is shorter."""
    x = x / (np.linalg.norm(x) + 1e-8)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        a = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


@pytest.mark.thorough
@pytest.mark.parametrize("update_rms", [None, 0.2])
def test_muon_is_its_formula(update_rms):
    """Jordan et al. 2024, with optax's bias corrections of momentum and gradient: these weigh the
    first few gradients more than the authors' code does, and the same later."""

    def rule(gradients, p, name):
        inputs, outputs = p.shape
        scale = np.sqrt(max(1, outputs / inputs))
        if update_rms is not None:
            scale = update_rms * np.sqrt(max(inputs, outputs))
        m, values = np.zeros_like(p), []
        for t, g in enumerate(gradients, 1):
            m = 0.95 * m + (1 - 0.95) * g
            nesterov = 0.95 * m / (1 - 0.95 ** (t + 1)) + (1 - 0.95) * g / (1 - 0.95**t)
            p = p - 0.1 * (scale * orthogonal(nesterov) + 0.1 * p)
            values.append(p)
        return values

    # float32 products, which five iterations carry on
    compare(Muon(update_rms=update_rms, weight_decay=0.1), rule, ("kernel", "small"), 1e-3)
