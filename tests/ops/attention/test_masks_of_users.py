"""A rule is known by its identity: a user's own rule that is named like one of ours means what it
says, everywhere."""

import importlib
import inspect
import pkgutil
import sys
from dataclasses import astuple, replace
from functools import partial, reduce
from operator import and_

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops, zoo
from jaxformer.masks import Mask, rules
from jaxformer.ops.attention import (
    blocks,
    blockwise,
    cached,
    cudnn,
    query_blocked,
    ring,
    splash,
    tokamax,
)
from jaxformer.ops.attention.call import Call
from jaxformer.ops.attention.kernel import never_refuses
from jaxformer.ops.attention.reference import REFERENCE, reference, softmax

T, N = 8, 2
# float32 sums of 8 terms of order one
FLOAT32 = dict(rtol=1e-5, atol=1e-5)
QUERY, KEY, VALUE = (
    jax.random.normal(key, (2, T, N, 4)) for key in jax.random.split(jax.random.key(0), 3)
)
IDS = jnp.ones((2, T), jnp.int32)
HALF = np.arange(16).reshape(4, 4) % 3 == 0

OURS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(2),
    "strided": masks.strided(2),
    "chunked": masks.chunked(3),
    "columns": masks.columns(3, 1),
    "prefix": masks.prefix(3),
    "global_tokens": masks.global_tokens(2),
    "block_sparse": masks.block_sparse(HALF, 2),
    "random_blocks": masks.random_blocks(1, 2, 0, T),
    "segments": masks.segments(IDS),
    "lengths": masks.lengths(kv=jnp.array([T, T])),
    "by_head": masks.by_head(masks.causal(), masks.full()),
    "and_": masks.causal() & masks.window(1),
    "or_": masks.prefix(2) | masks.window(1),
    "not_": ~masks.causal(),
}


def pattern(mask, q, kv):
    return (3 * q + kv) % 4 > 1


def users(ours: Mask, name: str) -> Mask:
    """Our mask with a rule of the user's instead, which `functools.wraps` made look like ours."""

    def rule(mask, q, kv):
        return pattern(mask, q, kv)

    rule.__name__ = rule.__qualname__ = name
    rule.__module__ = rules.__name__ if name in OURS else __name__
    return replace(ours, rule=rule)


def exact(attend, mask):
    return attend(QUERY, KEY, VALUE, mask=mask, scale=0.5)


def by_cudnn(query, key, value, *, mask, scale):
    planned = cudnn.plan(mask, T, T)
    if isinstance(planned, str):
        raise NotImplementedError(planned)
    return cudnn.run(
        query, key, value, bias=None, scale=scale, planned=planned, implementation="xla"
    )


def by_tokamax(query, key, value, *, mask, scale):
    """What the package is told to show; the package itself may be absent."""
    options, rest = tokamax.plan(mask.sized(T), T, T)
    shown = tokamax._named(options, T, T)
    if rest is not None:
        shown = shown & rest.dense(T, T)
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    weights = softmax(jnp.where(shown, scores, -jnp.inf), None)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def by_splash(query, key, value, *, mask, scale):
    """What the kernel is told to show, and the reference: the kernel itself takes a second to
    compile."""
    if reason := splash.refuses(query, key, value, Call(mask, scale=scale)):
        raise NotImplementedError(reason)
    dynamic = [part for part in mask.conjuncts() if not part.static]
    static = reduce(and_, [part for part in mask.conjuncts() if part.static] or [masks.full()]).at(
        mask.first(T, T)
    )
    q, kv = np.arange(128)[:, None], np.arange(128)[None]
    shown = [
        table.mask_function(q, kv)
        if hasattr(table, "mask_function")
        else table[slice(0, 128), slice(0, 128)]
        for table in splash._tables(static, N, T, T, (128, 128))
    ]
    parts = [masks.block_sparse(np.stack(shown)[:, :T, :T], 1), *dynamic]
    return ops.attention(
        query, key, value, mask=reduce(and_, parts), scale=scale, implementation="reference"
    )


def softmax_of_reference(query, key, value, *, mask, scale):
    return reference(query, key, value, Call(mask.sized(T), scale=scale))[0]


def by_cache(query, key, value, *, mask, scale):
    """All keys in the slots of a cache, and one that no query sees as the new one."""
    slots = lambda x: x.transpose(0, 2, 1, 3)
    B, places = len(query), jnp.broadcast_to(jnp.arange(T)[None], (len(query), T))
    old = cached.Slots(slots(key), slots(value), places)
    new = cached.Slots(slots(key[:, :1]), slots(value[:, :1]), jnp.full((B, 1), -1))
    return cached.attention(
        query, places, old, new, Call(mask.sized(T), scale=scale), [T], jnp.int32(0)
    )


def gradient_of_gradients(query, key, value, *, mask, scale):
    """The gradient of a scalar of blockwise attention's gradients, with respect to the value."""

    def size_of_gradient(value):
        slope = jax.grad(
            lambda x: jnp.sum(jnp.sin(blockwise.attention(query, key, x, Call(mask, scale=scale))))
        )
        return jnp.sum(slope(value) ** 2)

    return jax.grad(size_of_gradient)(value)


def called(attend):
    """A kernel as a function of its mask and scale."""
    return lambda *arrays, mask, scale: attend(*arrays, Call(mask, scale=scale))


EXACT = {
    "ops.attention.blockwise.attention": called(blockwise.attention),
    "ops.attention.cached.attention": by_cache,
    "ops.attention.cudnn.attention": by_cudnn,
    "ops.attention.tokamax.attention": by_tokamax,
    "ops.attention.query_blocked.attention": called(query_blocked.attention),
    "ops.attention.ring.attention": called(ring.attention),
    "ops.attention.ring.blockwise_or_ring": called(ring.blockwise_or_ring),
    "ops.attention.splash.attention": by_splash,
    "ops.attention.attention": partial(ops.attention, implementation="blockwise"),
    "ops.attention.reference.attention": called(REFERENCE.attention),
    "ops.attention.reference.reference": softmax_of_reference,
}
OTHERS = {
    "ops.attention.blocks.choose_grid": lambda mask: astuple(blocks.choose_grid(mask, 64, 64, N)),
    "ops.attention.blocks.find_visits": lambda mask: blocks.find_visits(
        mask, blocks.Grid(T, T, 4, 4, 4)
    ),
    "ops.attention.kernel.never_refuses": lambda mask: never_refuses(QUERY, KEY, VALUE, Call(mask)),
    "ops.attention.cudnn.plan": lambda mask: isinstance(cudnn.plan(mask, T, T), str),
    "ops.attention.cudnn.refuses": lambda mask: isinstance(cudnn.plan(mask, T, T), str),
    "ops.attention.tokamax.plan": lambda mask: len(tokamax.plan(mask, T, T).options),
    "ops.attention.tokamax.mask_bytes": lambda mask: tokamax.mask_bytes(Call(mask), T, T),
    "ops.attention.tokamax.refuses": lambda mask: isinstance(
        tokamax.refuses(QUERY, KEY, VALUE, Call(mask)), str
    ),
    "ops.attention.ring.refuses": lambda mask: ring.refuses(QUERY, KEY, VALUE, Call(mask)),
    "ops.attention.query_blocked.is_cheaper": lambda mask: query_blocked.is_cheaper(
        QUERY, KEY, Call(mask)
    ),
    "ops.attention.query_blocked.leaves_out": lambda mask: query_blocked.leaves_out(
        QUERY, KEY, Call(mask)
    ),
    "ops.attention.query_blocked.query_blocks": lambda mask: query_blocked.query_blocks(
        QUERY, KEY, Call(mask)
    ),
    "ops.attention.query_blocked.refuses": lambda mask: query_blocked.refuses(
        QUERY, KEY, VALUE, Call(mask)
    ),
    "ops.attention.splash.refuses": lambda mask: exact(by_splash, mask),
    # with the same blocks as `attention`; it reads the mask on several devices alone
    "ops.attention.splash.refuses_on_mesh": lambda mask: splash.refuses_on_mesh(
        QUERY, KEY, VALUE, Call(mask)
    ),
    "ops.attention.reference.second_gradients": lambda mask: exact(gradient_of_gradients, mask),
    "ops.attention.reference.visible_scores": lambda mask: exact(softmax_of_reference, mask),
    "zoo.efficient_attention.attention": lambda mask: zoo.efficient_attention.attention(
        QUERY, KEY, VALUE, mask=mask
    ),
    "zoo.performer.attention": lambda mask: zoo.performer.attention(
        QUERY, KEY, VALUE, jnp.eye(4), mask=mask
    ),
    "zoo.linear_attention.attention": lambda mask: zoo.linear_attention.attention(
        QUERY, KEY, VALUE, mask=mask
    ),
    "zoo.visible.visibility": lambda mask: zoo.linear_attention.attention(
        QUERY, KEY, VALUE, mask=mask
    ),
    "zoo.linformer.attention": lambda mask: zoo.linformer.attention(
        QUERY, KEY, VALUE, jnp.ones((T, 3)), mask=mask
    ),
    "zoo.reformer.attention": lambda mask: zoo.reformer.attention(
        QUERY,
        VALUE,
        zoo.reformer.random_rotations(jax.random.key(1), N, 4, 2, 2),
        chunk=4,
        mask=mask,
    ),
    "zoo.bigbird.attention": lambda mask: zoo.bigbird.attention(
        QUERY, KEY, VALUE, np.zeros((N, 2, 1), np.int32), block=2, mask=mask
    ),
    "zoo.visible.segment_ids": lambda mask: zoo.visible.segment_ids(
        "test", mask, QUERY, KEY, VALUE
    ),
    "zoo.transformer_xl.check_causal": lambda mask: zoo.transformer_xl.check_causal(mask),
    "zoo.qk_clip.largest_scores": lambda mask: zoo.qk_clip.largest_scores(QUERY, KEY, mask),
    "zoo.longformer.attention": lambda mask: zoo.longformer.attention(
        QUERY, KEY, VALUE, QUERY, KEY, VALUE, window=2, global_tokens=1, mask=mask
    ),
}


def outcome(call, mask):
    try:
        return jax.tree.map(np.asarray, call(mask))
    except (NotImplementedError, ValueError) as error:
        return type(error)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(
        lambda a, b: a == b if isinstance(a, type) else np.testing.assert_allclose(a, b, **FLOAT32),
        a,
        b,
    )


def test_every_reader_of_masks_is_here():
    found = set()
    for package in (ops, sys.modules["jaxformer.ops.attention"], zoo):
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(each.name)
            for name, value in vars(module).items():
                function = inspect.unwrap(value) if callable(value) else value
                own = (
                    inspect.isfunction(function)
                    and value.__module__ == each.name
                    and not name.startswith("_")
                )
                if own and {"mask", "call"} & inspect.signature(function).parameters.keys():
                    found.add(f"{each.name.removeprefix('jaxformer.')}.{name}")
    assert found == EXACT.keys() | OTHERS.keys()
    assert OURS.keys() == {name for name, rule in vars(rules).items() if _is_rule(rule)}


def _is_rule(value) -> bool:
    return inspect.isfunction(value) and list(inspect.signature(value).parameters) == [
        "mask",
        "q",
        "kv",
    ]


# what kernels have code of their own for
QUICK = (
    "full",
    "causal",
    "window",
    "segments",
    "lengths",
    "by_head",
    "and_",
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in OURS]
)
def test_a_users_rule_is_not_taken_for_ours_of_its_name(name):
    mask, other = users(OURS[name], name), users(OURS[name], "something_else")
    with jax.disable_jit():  # nothing to compile: the operations are the same for every mask
        expected = exact(EXACT["ops.attention.reference.reference"], Mask(pattern))
        np.testing.assert_array_equal(mask.dense(T, T)[0, 0], Mask(pattern).dense(T, T)[0, 0])
        for reader, attend in EXACT.items():
            out = outcome(partial(exact, attend), mask)
            if out is not NotImplementedError:
                np.testing.assert_allclose(out, expected, **FLOAT32, err_msg=reader)
        for call in OTHERS.values():
            for a, b in ((mask, other), (masks.causal() & mask, masks.causal() & other)):
                assert_same(outcome(call, a), outcome(call, b))
    assert str(mask).startswith("Mask(")


@pytest.mark.thorough
def test_a_users_rule_over_heads_is_asked_for_all_of_them():
    """Splash asks each head for its own part of `by_head`; what a user's rule makes of its parts'
    heads is the user's."""
    turned = Mask(
        lambda mask, q, kv: mask.parts[0]._evaluate(q, kv)[:, ::-1], parts=(OURS["by_head"],)
    )
    expected = exact(EXACT["ops.attention.reference.reference"], turned)
    for mask in (turned, masks.full() & turned, masks.by_head(masks.full(), masks.full()) & turned):
        np.testing.assert_allclose(exact(by_splash, mask), expected, **FLOAT32)


@pytest.mark.parametrize(
    "mask", [np.ones((T, T), bool), jnp.ones((2, T), bool), "causal", 3], ids=lambda x: str(type(x))
)
def test_what_is_no_mask_is_refused_in_one_line(mask):
    arrays = [QUERY, KEY, VALUE]
    for attend, more in {
        ops.attention: (),
        zoo.linear_attention.attention: (),
        zoo.efficient_attention.attention: (),
        zoo.performer.attention: (jnp.eye(4),),
        zoo.linformer.attention: (jnp.ones((T, 3)),),
        partial(inspect.unwrap(zoo.longformer.attention), window=2): arrays,
        partial(inspect.unwrap(zoo.bigbird.attention), block=2): (np.zeros((N, 2, 1), np.int32),),
    }.items():
        with pytest.raises(
            ValueError,
            match=r"attention: a mask is a value of jaxformer.masks, not .*segments\(ids\)",
        ):
            inspect.unwrap(attend)(*arrays, *more, mask=mask)
    rotations = zoo.reformer.random_rotations(jax.random.key(1), N, 4, 2, 2)
    with pytest.raises(ValueError, match="lsh_attention: a mask is a value"):
        inspect.unwrap(zoo.reformer.attention)(QUERY, VALUE, rotations, chunk=4, mask=mask)
