"""Descriptions tell experiments apart by everything that decides numbers, and by nothing else."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from typing import Any

import optax
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import config as C
from jaxformer.config.files import read
from jaxformer.masks import causal, window
from tests.config.values import ANYTHING, Adam, Lion, Scaled, first_mixer, second_mixer


@dataclass(frozen=True)
class Model:
    width: int = 8
    mixer: Any = None
    remat: str = C.execution("none")


@dataclass(frozen=True)
class Experiment:
    name: str
    model: Any = Model()
    optimizer: Any = Adam()
    steps: int = 100
    items: tuple = ()
    log_every: int = C.execution(10)


number = st.floats(allow_nan=False) | st.integers()
experiments = st.builds(
    Experiment,
    st.text(max_size=3),
    st.builds(
        Model,
        st.integers(),
        st.sampled_from([None, first_mixer, second_mixer]) | st.builds(Scaled, number),
    ),
    st.builds(Adam, number, st.tuples(number, number)) | st.builds(Lion, number, number),
    st.integers(),
    st.lists(st.builds(Lion, number), max_size=2).map(tuple),
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=50)
@given(
    experiments,
    experiments,
    st.sets(st.sampled_from([field.name for field in dataclasses.fields(Experiment)])),
)
def test_fingerprint_and_diff_tell_configs_apart(one, other, taken):
    two = dataclasses.replace(one, **{name: getattr(other, name) for name in taken})
    assert (C.fingerprint(one) == C.fingerprint(two)) == (one == two)
    first, second = C.describe(one), C.describe(two)
    assert bool(C.diff(first, second)) == (one != two)
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_form():
    described = C.describe(
        Experiment("x", Model(mixer=Scaled(3.0)), Lion(), items=(causal() & window(3), first_mixer))
    )
    kinds = {
        name: part.pop("code")
        for name, part in (("x", described), ("lion", described["optimizer"]))
    }
    assert all(re.fullmatch("[0-9a-f]{8}", code) for code in kinds.values())
    assert described["optimizer"] == {"type": "Lion", "learning_rate": 1e-4, "weight_decay": 0.1}
    assert described["type"] == "Experiment" and described["log_every"] == 10
    assert described["items"][0] == str(causal() & window(3))
    assert described["items"][1]["function"] == f"{first_mixer.__module__}:first_mixer"
    assert C.describe(optax.adam) == "optax._src.alias:adam"
    assert C.describe(float("inf")) == "inf"


def test_fingerprint_form():
    base = Experiment("x")
    assert len(C.fingerprint(base)) == 8 and int(C.fingerprint(base), 16) >= 0
    rates = [
        dataclasses.replace(base, optimizer=Adam(value)) for value in (1e-2, 0.01, 2, 2.0, True)
    ]
    prints = [C.fingerprint(rate) for rate in rates]
    assert prints[0] == prints[1] != prints[2] == prints[3] != prints[4]
    assert C.fingerprint(dataclasses.replace(base, optimizer=Adam(1e-3))) == C.fingerprint(base)


def test_diff():
    base = C.describe(Experiment("x"))
    change = lambda **changed: {
        name: pair
        for name, pair in C.diff(base, C.describe(Experiment("x", **changed))).items()
        if ".code" not in name
    }
    assert change(steps=7) == {"steps": (100, 7)}
    assert change(steps=True) == {"steps": (100, True)}
    assert change(optimizer=Lion()) == {
        "optimizer": ("Adam", "Lion"),
        "optimizer.learning_rate": (1e-3, 1e-4),
        "optimizer.betas": ([0.9, 0.999], None),
        "optimizer.weight_decay": (None, 0.1),
    }
    assert change(model=Model(mixer=Scaled(3.0))) == {
        "model.mixer": (None, "Scaled"),
        "model.mixer.factor": (None, 3.0),
    }
    assert change(model=Model(mixer=second_mixer)) == {
        "model.mixer": (None, f"{second_mixer.__module__}:second_mixer")
    }
    assert change(model=Model(mixer={})) == {"model.mixer": (None, {})}


def test_execution_fields_decide_nothing():
    base, other = Experiment("x"), Experiment("x", Model(remat="full"), log_every=1)
    assert C.fingerprint(base) == C.fingerprint(other)
    assert C.execution_fields(base) == {"model.remat", "log_every"}
    assert set(C.diff(C.describe(base), C.describe(other))) == {"model.remat", "log_every"}
    several = [Experiment("x", items=(Model(remat=remat),)) for remat in ("none", "full")]
    assert C.fingerprint(several[0]) == C.fingerprint(several[1])


@dataclass(frozen=True)
class Machine:
    way: Any = C.execution("fast", unless=callable)
    place: str = C.execution("here")


@pytest.mark.parametrize("way", ["fast", "slow", 3, first_mixer, second_mixer])
@pytest.mark.parametrize("place", ["here", "there"])
def test_a_value_that_decides_numbers_makes_its_execution_field_one_that_does(way, place):
    usual, machine = Machine(), Machine(way, place)
    assert (C.fingerprint(machine) == C.fingerprint(usual)) == (not callable(way))
    assert C.execution_fields(machine) == ({"place"} if callable(way) else {"way", "place"})
    assert ("way" in C.changes(machine)) == callable(way) and "place" not in C.changes(machine)
    assert {"way", "place"} < C.describe(machine).keys()
    inside = [Experiment("x", model) for model in (usual, machine)]
    assert (C.fingerprint(inside[0]) == C.fingerprint(inside[1])) == (not callable(way))


def test_fingerprint_ignores_a_new_field_with_a_default():
    other = make_dataclass("Other", [("depth", int, 3)], frozen=True)

    def fingerprints(inner):
        fields = [
            ("inner", inner | other, inner()),
            ("items", tuple[inner, ...], ()),
            ("plain", inner, inner(rate=0.3)),
        ]
        outer = make_dataclass("Outer", fields)
        changes = [{}, {"inner": inner(rate=0.2)}, {"inner": other()}, {"plain": inner(rate=0.1)}]
        return [C.fingerprint(outer(**change)) for change in changes]

    rate, extra = ("rate", float, 0.1), ("extra", tuple[int, ...], (1,))
    old = fingerprints(make_dataclass("Inner", [rate], frozen=True))
    assert fingerprints(make_dataclass("Inner", [rate, extra], frozen=True)) == old
    assert fingerprints(make_dataclass("Inner", [extra, rate], frozen=True)) == old
    assert len(set(old)) == len(old)


# The user's code

HEAD = """
import functools
from dataclasses import dataclass, field
from typing import Any
import jax, jax.numpy as jnp, numpy as np, optax
from jaxformer import config

@dataclass(frozen=True)
class Experiment:
    value: Any
    name: str = "x"
    log_every: int = config.execution(1)
"""


@pytest.fixture
def described(tmp_path, monkeypatch):
    """The description of `experiment = Experiment(VALUE)` at the end of a file of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def describe(text, value):
        path = tmp_path / "mine.py"
        path.write_text(f"{HEAD}\n{text}\n\nexperiment = Experiment({value})\n")
        experiment = read(str(path)).experiment
        found = C.describe(experiment)
        assert " at 0x" not in json.dumps(found)
        assert found == C.describe(experiment)
        return found, C.fingerprint(experiment)

    yield describe
    for name in set(sys.modules) - before:
        del sys.modules[name]


CLASS = (
    "@dataclass(frozen=True)\nclass Own:\n    rate: float = 1.0\n    def __call__(self, x):\n    "
    "    return {}"
)
DIFFERENT = {
    "lambda": (("", "lambda x: x"), ("", "lambda x: x + 1")),
    "function": (("def f(x):\n    return x", "f"), ("def f(x):\n    return -x", "f")),
    "class": ((CLASS.format("x"), "Own()"), (CLASS.format("-x"), "Own()")),
    "class itself": ((CLASS.format("x"), "Own"), (CLASS.format("-x"), "Own")),
    "plain class": (
        ("class A:\n    def f(self): return 1", "A()"),
        ("class A:\n    def f(self): return 2", "A()"),
    ),
    "attribute": (
        ("class A:\n    def __init__(self, x): self.x = x", "A(1)"),
        ("class A:\n    def __init__(self, x): self.x = x", "A(2)"),
    ),
    "private attribute": (
        ("class A:\n    def __init__(self, x): self._x = x", "A(1)"),
        ("class A:\n    def __init__(self, x): self._x = x", "A(2)"),
    ),
    "base class": (
        ("class B:\n    k = 1\nclass A(B):\n    pass", "A()"),
        ("class B:\n    k = 2\nclass A(B):\n    pass", "A()"),
    ),
    "closure": (
        ("def make(k):\n    return lambda x: k * x", "make(1)"),
        ("def make(k):\n    return lambda x: k * x", "make(2)"),
    ),
    "closure of a class": (
        ("def make(k):\n    class A:\n        def f(self): return k\n    return A()", "make(1)"),
        ("def make(k):\n    class A:\n        def f(self): return k\n    return A()", "make(2)"),
    ),
    "default argument": (
        ("K = 1\ndef f(x, k=K): return x", "f"),
        ("K = 2\ndef f(x, k=K): return x", "f"),
    ),
    "default in a loop": (
        ("fs = [lambda x, k=k: x for k in (1, 2)]", "fs[0]"),
        ("fs = [lambda x, k=k: x for k in (1, 2)]", "fs[1]"),
    ),
    "keyword default in a loop": (
        ("fs = [lambda x, *, k=k: x for k in (1, 2)]", "fs[0]"),
        ("fs = [lambda x, *, k=k: x for k in (1, 2)]", "fs[1]"),
    ),
    "closures of a loop": (
        ("fs = [(lambda k: lambda x: k)(k) for k in (1, 2)]", "fs[0]"),
        ("fs = [(lambda k: lambda x: k)(k) for k in (1, 2)]", "fs[1]"),
    ),
    "lambdas on a line": (
        ("a, b = lambda x: x, lambda x: -x", "a"),
        ("a, b = lambda x: x, lambda x: -x", "b"),
    ),
    "nested lambdas": (("a = lambda: (lambda x: x)", "a"), ("a = lambda: (lambda x: x)", "a()")),
    "inner of nested lambdas": (
        ("a = lambda: (lambda x: x)", "a()"),
        ("a = lambda: (lambda x: -x)", "a()"),
    ),
    "partial": (
        ("def f(x, k): return x", "functools.partial(f, k=1)"),
        ("def f(x, k): return x", "functools.partial(f, k=2)"),
    ),
    "positional of a partial": (
        ("def f(x, k): return x", "functools.partial(f, 1)"),
        ("def f(x, k): return x", "functools.partial(f, 2)"),
    ),
    "array": (("", "np.arange(3)"), ("", "np.arange(3) + 1")),
    "jax array": (("", "jnp.arange(3)"), ("", "jnp.arange(3) + 1")),
    "type of an array": (("", "np.zeros(4, np.float32)"), ("", "np.zeros(4, np.int32)")),
    "shape of an array": (("", "np.zeros((2, 2))"), ("", "np.zeros(4)")),
    "array of objects": (("", "np.array([1, 'a'], object)"), ("", "np.array([1, 'b'], object)")),
    "random key": (("", "jax.random.key(0)"), ("", "jax.random.key(1)")),
    "global constant": (("K = 1\nf = lambda x: K", "f"), ("K = 2\nf = lambda x: K", "f")),
    "global array": (
        ("K = np.zeros(2)\nf = lambda x: K", "f"),
        ("K = np.ones(2)\nf = lambda x: K", "f"),
    ),
    "global dict": (("K = {'a': 1}\nf = lambda x: K", "f"), ("K = {'a': 2}\nf = lambda x: K", "f")),
    "global config": (
        (CLASS.format("x") + "\nK = Own(1)\nf = lambda x: K(x)", "f"),
        (CLASS.format("x") + "\nK = Own(2)\nf = lambda x: K(x)", "f"),
    ),
    "constant of a method": (
        ("K = 1\nclass A:\n    def f(self): return K", "A()"),
        ("K = 2\nclass A:\n    def f(self): return K", "A()"),
    ),
    "helper": (
        ("def g(x): return x\ndef f(x): return g(x)", "f"),
        ("def g(x): return -x\ndef f(x): return g(x)", "f"),
    ),
    "helper of a helper": (
        ("def h(x): return x\ndef g(x): return h(x)\ndef f(x): return g(x)", "f"),
        ("def h(x): return -x\ndef g(x): return h(x)\ndef f(x): return g(x)", "f"),
    ),
    "two lambdas as helpers": (
        ("g = lambda x: x\nh = lambda x: x\ndef f(x): return g(x) + h(x)", "f"),
        ("g = lambda x: x\nh = lambda x: -x\ndef f(x): return g(x) + h(x)", "f"),
    ),
    "closures as helpers": (
        (
            (
                "def make(k):\n    return lambda x: k\ng, h = make(1), make(2)\ndef f(x): return "
                "g(x) - h(x)"
            ),
            "f",
        ),
        (
            (
                "def make(k):\n    return lambda x: k\ng, h = make(2), make(1)\ndef f(x): return "
                "g(x) - h(x)"
            ),
            "f",
        ),
    ),
    "compiled helper": (
        ("g = jax.jit(lambda x: x)\ndef f(x): return g(x)", "f"),
        ("g = jax.jit(lambda x: -x)\ndef f(x): return g(x)", "f"),
    ),
    "the same name of two libraries": (
        ("import numpy as n\nf = lambda x: n.sin(x)", "f"),
        ("import jax.numpy as n\nf = lambda x: n.sin(x)", "f"),
    ),
    "imported under one name": (
        ("from optax import adam as make\nf = lambda x: make(x)", "f"),
        ("from optax import lion as make\nf = lambda x: make(x)", "f"),
    ),
    "mutual recursion": (
        ("def f(x): return g(x)\ndef g(x): return f(x)", "f"),
        ("def f(x): return g(x)\ndef g(x): return -f(x)", "f"),
    ),
    "jit": (("", "jax.jit(lambda x: x)"), ("", "jax.jit(lambda x: -x)")),
    "wrapped": (
        (
            (
                "def w(f):\n    @functools.wraps(f)\n    def g(x): return f(x)\n    return "
                "g\n@w\ndef f(x): return x"
            ),
            "f",
        ),
        (
            (
                "def w(f):\n    @functools.wraps(f)\n    def g(x): return f(x)\n    return "
                "g\n@w\ndef f(x): return -x"
            ),
            "f",
        ),
    ),
    "wrapper of the library's": (
        (
            (
                "def w(f):\n    @functools.wraps(f)\n    def g(x): return f(x)\n    return g\nf "
                "= w(optax.adam)"
            ),
            "f",
        ),
        (
            (
                "def w(f):\n    @functools.wraps(f)\n    def g(x): return -f(x)\n    return g\nf "
                "= w(optax.adam)"
            ),
            "f",
        ),
    ),
    "custom derivative": (
        ("f = jax.custom_vjp(lambda x: x)\nf.defvjp(lambda x: (x, None), lambda r, g: (g,))", "f"),
        ("f = jax.custom_vjp(lambda x: x)\nf.defvjp(lambda x: (x, None), lambda r, g: (-g,))", "f"),
    ),
    "method": (
        ("class A:\n    def __init__(self, x): self.x = x\n    def f(self): return 1", "A(1).f"),
        ("class A:\n    def __init__(self, x): self.x = x\n    def f(self): return 1", "A(2).f"),
    ),
    "optax": (("", "optax.adam(1e-3)"), ("", "optax.adam(1e-2)")),
    "optax schedule": (
        ("", "optax.cosine_decay_schedule(1e-3, 10)"),
        ("", "optax.cosine_decay_schedule(1e-3, 20)"),
    ),
    "named tuples": (
        (
            (
                "from typing import NamedTuple\nclass A(NamedTuple):\n    x: int\nclass "
                "B(NamedTuple):\n    x: int"
            ),
            "A(1)",
        ),
        (
            (
                "from typing import NamedTuple\nclass A(NamedTuple):\n    x: int\nclass "
                "B(NamedTuple):\n    x: int"
            ),
            "B(1)",
        ),
    ),
    "rules of one name": (
        ("from jaxformer.masks import Mask\ndef rule(mask, q, kv): return q == kv", "Mask(rule)"),
        ("from jaxformer.masks import Mask\ndef rule(mask, q, kv): return q >= kv", "Mask(rule)"),
    ),
}
SAME = {
    "comments and formatting": (
        ("def f(x):\n    # why\n    return  g( x )\ndef g(x):\n    return (x +\n  1)", "f"),
        ("# more\n\n\ndef f(x): return g(x)  # what\ndef g(x): return x + 1", "f"),
    ),
    "formatting of a lambda": (
        ("", "(lambda x:x+1)"),
        ("\n\n", "(\n    lambda x: x + 1  # why\n)"),
    ),
    "an unused constant": (("K = 1\nf = lambda x: x", "f"), ("K = 2\nf = lambda x: x", "f")),
    "a local name": (
        ("k = 1\ndef f(k):\n    return k", "f"),
        ("k = 2\ndef f(k):\n    return k", "f"),
    ),
    "order of fields": (
        ("@dataclass\nclass A:\n    a: int\n    b: int\nA.__module__ = 'jaxformer'", "A(a=1, b=2)"),
        ("@dataclass\nclass A:\n    a: int\n    b: int\nA.__module__ = 'jaxformer'", "A(b=2, a=1)"),
    ),
    "order of a set": (("", "{'a', 'b', 'c'}"), ("", "{'c', 'b', 'a'}")),
    "execution": (("", "1, log_every=1"), ("", "1, log_every=2")),
    "execution in what a function uses": (
        ("K = Experiment(1, log_every=1)\nf = lambda x: K", "f"),
        ("K = Experiment(1, log_every=2)\nf = lambda x: K", "f"),
    ),
}


@pytest.mark.thorough_after(26)
@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_what_decides_numbers_tells_experiments_apart(pair, described):
    (one, print_one), (two, print_two) = (described(*each) for each in pair)
    assert one != two and print_one != print_two
    paths = set(C.diff(one, two))
    assert paths and all(path.startswith("value") for path in paths)


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_what_decides_no_numbers_is_no_difference(pair, described):
    (_, one), (_, two) = (described(*each) for each in pair)
    assert one == two


def test_objects_of_an_edited_file_keep_their_description(described, tmp_path):
    described(CLASS.format("x"), "Own()")
    old = read(str(tmp_path / "mine.py")).experiment
    before = C.describe(old)
    described("\n\n" + CLASS.format("-x"), "Own()")
    assert C.describe(old) == before


@pytest.mark.thorough
def test_long_chains_of_helpers_are_described_in_linear_time(described):
    text = "def f0(x): return x\n" + "".join(
        f"def f{i + 1}(x): return f{i}(x) + f{i}(-x)\n" for i in range(60)
    )
    text += "".join(f"def g{i + 1}(x): return f{i}(x) + f{i // 2}(x)\n" for i in range(60))
    text += f"def last(x): return {' + '.join(f'g{i + 1}(x)' for i in range(60))}"
    described(text, "last")


# Whatever a field may hold


@pytest.mark.thorough_after(43)
@pytest.mark.parametrize("make", ANYTHING.values(), ids=ANYTHING)
def test_whatever_a_field_holds_is_described_without_addresses(make):
    described = json.dumps(C.describe(Experiment("x", make())), sort_keys=True, allow_nan=False)
    assert " at 0x" not in described and " object at" not in described
    assert described == json.dumps(C.describe(Experiment("x", make())), sort_keys=True)
    C.fingerprint(Experiment("x", make()))


@pytest.mark.thorough
def test_descriptions_are_the_same_in_another_process():
    """Also with other hashes of strings, and so another order of sets."""
    code = (
        "import json; from jaxformer import config; from tests.config.values import "
        "ANYTHING, Scaled\n"
        "made = {name: Scaled(inner=make()) for name, make in ANYTHING.items()}\n"
        "print(json.dumps({name: [config.describe(one), config.fingerprint(one)] for name, "
        "one in made.items()}))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    made = {name: Scaled(inner=make()) for name, make in ANYTHING.items()}
    assert json.loads(done.stdout) == {
        name: [C.describe(one), C.fingerprint(one)] for name, one in made.items()
    }
