"""Layers of a Transformer in NumPy, for one sequence: witnesses of the papers' parts."""

import math

import numpy as np


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def standardised(x, eps=1e-5):
    """A layer norm without parameters."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)


def normed(tree, x, eps=1e-5):
    """A layer norm."""
    return standardised(x, eps) * tree["scale"] + tree["bias"]


def attention(tree, x):
    """Full attention of a sequence [T, D], head by head."""
    _, heads, width = tree["query"]["kernel"].shape
    out = 0
    for n in range(heads):
        q, k, v = (
            x @ tree[name]["kernel"][:, n] + tree[name]["bias"][n]
            for name in ("query", "key", "value")
        )
        out = out + softmax(q @ k.T / math.sqrt(width)) @ v @ tree["out"]["kernel"][n]
    return out + tree["out"]["bias"]
