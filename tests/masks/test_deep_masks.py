"""Masks of thousands of operators: up to a limit everything works, beyond it one line says so;
never a RecursionError."""

import jax
import pytest

from jaxformer import config
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask, causal, window
from jaxformer.masks.mask import DEEPEST, MOST


def nested(depth):
    """Alternately & and |, which do not merge."""
    mask = causal()
    for level in range(depth - 1):
        mask = mask & window(level) if level % 2 else mask | window(level)
    return mask


def negated(depth):
    mask = causal()
    for _ in range(depth - 1):
        mask = ~mask
    return mask


def wide(count):
    mask = causal()
    for _ in range(count - 2):
        mask = mask & causal()
    return mask


def own(depth):
    """A user's rule, whose parts are not ours to flatten."""
    rule = lambda mask, q, kv: mask.parts[0]._evaluate(q, kv) if mask.parts else kv <= q
    mask = Mask(rule)
    for _ in range(depth - 1):
        mask = Mask(rule, parts=(mask,))
    return mask


LARGEST = {"nested": (nested, DEEPEST), "negated": (negated, DEEPEST), "own": (own, DEEPEST)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LARGEST)
def test_the_deepest_mask_works_everywhere(name):
    build, depth = LARGEST[name]
    mask = build(depth)
    assert hash(mask) == hash(build(depth)) or name == "own"
    assert len(repr(mask)) > depth and config.describe(mask)
    assert mask.dense(4, 4).shape[2:] == (4, 4)
    assert mask.blocks(8, 8, 4).shape == (2, 2) and 0 <= mask.density(8, 8) <= 1
    assert jax.tree.leaves(mask) == [] and mask.static and mask.sized(8) == mask
    jax.jit(lambda q: mask(q, q))(jax.numpy.arange(4))


@pytest.mark.thorough
def test_the_widest_mask_can_be_named():
    mask = wide(MOST)
    assert (
        hash(mask) == hash(wide(MOST))
        and repr(mask).count("&") == MOST - 2
        and config.describe(mask)
    )


@pytest.mark.parametrize("build", [nested, negated, own])
@pytest.mark.parametrize("beyond", [1, 1_000, 100_000])
def test_a_deeper_one_is_refused_when_it_is_built(build, beyond):
    with pytest.raises(ConfigError, match=rf"at most {MOST} masks, {DEEPEST} deep"):
        build(DEEPEST + beyond)


@pytest.mark.thorough
def test_a_wider_one_is_refused_when_it_is_built():
    with pytest.raises(ConfigError, match=f"at most {MOST} masks"):
        wide(MOST + 1)
    mask = causal() | window(2)
    with pytest.raises(ConfigError, match=f"at most {MOST} masks"):
        for _ in range(64):
            mask = mask & mask  # each time twice as many


@pytest.mark.parametrize(
    "text",
    [
        " & ".join(["causal()"] * 900),
        "~" * 9_000 + "causal()",
        "(" * 5_000 + "causal()" + ")" * 4_900,
        "causal() | (" * 80 + "causal()" + ")" * 80,
        "~" * 100 + "causal()",
        " & ".join(["causal() | causal()"] * 400),
    ],
)
def test_expressions_of_thousands_of_operators(text):
    names = {"causal": causal}
    try:
        mask = config.expressions.evaluate(text, names)
    except ConfigError as error:
        assert len(str(error)) < 200
    else:
        assert repr(mask) and config.describe(mask) and hash(mask)
