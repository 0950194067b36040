"""Configs, functions and values of every kind, for the tests of what a config may hold."""

import enum
import functools
import re
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import ConfigError
from jaxformer.masks import Mask, causal


def message(function, *args) -> str:
    """The one line with which a user's mistake is answered."""
    with pytest.raises(ConfigError) as caught:
        function(*args)
    assert "\n" not in str(caught.value) and " at 0x" not in str(caught.value)
    return str(caught.value)


@dataclass(frozen=True)
class Adam:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class Lion:
    learning_rate: float = 1e-4
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Scaled:
    """A function that is a config."""

    factor: float = 2.0  # multiplies the input
    inner: Callable | None = None

    def __call__(self, x):
        return self.factor * x


def first_mixer(x):
    return x


def second_mixer(x):
    return x


class Colour(enum.Enum):
    red = 1
    blue = 2


class Point(NamedTuple):
    x: int
    y: Any = None


class Callable_:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return self.k * x

    def method(self, x):
        return x

    @property
    def double(self):
        return 2 * self.k

    @staticmethod
    def static(x):
        return x


class Maps(flax.linen.Module):
    features: int = 3

    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(self.features)(x)


def cyclic():
    items: list = [1]
    items.append(items)
    return items


ANYTHING = {
    "None": lambda: None,
    "nan": lambda: float("nan"),
    "complex": lambda: 1j,
    "range": lambda: range(3),
    "slice": lambda: slice(1, 2),
    "bytes": lambda: b"abc",
    "path": lambda: Path("a/b"),
    "enum": lambda: Colour.red,
    "enum class": lambda: Colour,
    "pattern": lambda: re.compile("a+"),
    "dict": lambda: {"a": 1, 2: {3.0: None}, None: 1, ("x", 1): 2, first_mixer: 3},
    "ordered": lambda: OrderedDict(a=1),
    "set": lambda: {"a", "b", "c", 1, None, first_mixer, second_mixer},
    "frozenset": lambda: frozenset({("a", 1), ("b", 2)}),
    "cyclic": cyclic,
    "namedtuple": lambda: Point(1, first_mixer),
    "made namedtuple": lambda: namedtuple("Made", "a b")(1, 2),
    "object": object,
    "lock": threading.Lock,
    "module": lambda: np,
    "builtin": lambda: len,
    "builtin method": lambda: "abc".upper,
    "ufunc": lambda: np.sin,
    "jax ufunc": lambda: jnp.add,
    "jax function": lambda: jax.nn.gelu,
    "dtype": lambda: np.dtype("float32"),
    "jax dtype": lambda: jnp.bfloat16,
    "numpy scalar": lambda: np.float32(1.5),
    "numpy float": lambda: np.float64(1.5),
    "numpy bool": lambda: np.bool_(True),
    "bfloat16": lambda: jnp.ones((2, 3), jnp.bfloat16),
    "struct": lambda: jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "key": lambda: jax.random.key(3),
    "callable object": lambda: Callable_(2),
    "method": lambda: Callable_(2).method,
    "static method": lambda: Callable_.static,
    "jit": lambda: jax.jit(first_mixer, static_argnums=0),
    "vmap": lambda: jax.vmap(jax.grad(first_mixer)),
    "checkpoint": lambda: jax.checkpoint(lambda x: x),
    "cache": lambda: functools.cache(first_mixer),
    "partial": lambda: functools.partial(functools.partial(first_mixer, 1), x=lambda: 0),
    "linen": lambda: Maps(4),
    "dense": lambda: flax.linen.Dense(3, kernel_init=flax.linen.initializers.lecun_normal()),
    "nnx": lambda: flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0)),
    "optax": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 1.0, 5))
    ),
    "optax masked": lambda: optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()}, lambda p: "a"
    ),
    "optax injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "mask": lambda: causal() | Mask(lambda mask, q, kv: q == kv),
}
