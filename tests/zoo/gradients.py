"""What gradients of a part in a model have to be."""

import jax
import numpy as np


def assert_every_gradient(loss, params, tolerance):
    """`loss(params, dtype)` has a finite gradient for every parameter, and bfloat16 one like it.

    The difference, as a share of the norm of a leaf, is below the tolerance: bfloat16 keeps 8 bits,
    and the error grows over the products of a model.
    """
    grad = jax.jit(jax.grad(loss), static_argnums=1)
    exact, rounded = grad(params, np.dtype("float32")), grad(params, jax.numpy.bfloat16)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(rounded), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # a bias of keys changes no weight of a softmax
        if "'key'" in name and "'bias'" in name:
            continue
        assert np.abs(a).max() > 0 and np.isfinite(a).all(), name
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(a), name
