"""What a token of decoding moves in memory on a CPU: the cache is written where it lies."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer.decoding.generate  # noqa: F401
from jaxformer import decoding, models
from jaxformer.models import ModelConfig
from jaxformer.ops.attention.cached import _write_rows, _write_rows_in_loop

CONFIG = ModelConfig(64, 1, 32, 4, context_length=64, num_kv_heads=2)


def programs(monkeypatch, rows, dtype):
    """The texts of the compiled loops over tokens that `generate` runs."""
    module = sys.modules["jaxformer.decoding.generate"]
    run = module._run
    texts = []

    def watched(*arguments):
        texts.append(run.lower(*arguments).compile().as_text())
        return run(*arguments)

    monkeypatch.setattr(module, "_run", watched)
    params = models.init(CONFIG, jax.random.key(0))
    prompts = [[1, 2, 3]] * rows
    decoding.generate(CONFIG, params, prompts, 4, rows=rows, dtype=dtype)
    return texts


def copies(monkeypatch, rows, dtype):
    """The shapes of the copies of a cache in the loop over tokens; those of one token are left
    out."""
    (text,) = programs(monkeypatch, rows, dtype)
    cache = rf"\[{rows},{CONFIG.kv_heads},\d+,{CONFIG.head_size}\]"
    assert re.search(rf"{cache}\S* dynamic-update-slice\(", text)
    copied = re.findall(rf"= \w+({cache})\S* copy\(", text)
    return [shape for shape in copied if f",1,{CONFIG.head_size}]" not in shape]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_no_step_copies_the_cache(monkeypatch, rows, dtype):
    """A cache [rows, K, S, H] of a layer has keys and values; a copy of each for every token took
    half of the time of eight rows."""
    assert not copies(monkeypatch, rows, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_rows_in_a_loop_are_rows_in_turn(dtype):
    """Slots are counted modulo their number; a row with the position -1 is left as it is."""
    rng = np.random.default_rng(0)
    for B, S in ((2, 1), (3, 5), (5, 8)):
        state = jnp.asarray(rng.integers(-9, 9, (B, 2, S, 4)), dtype)
        new = jnp.asarray(rng.integers(-9, 9, (B, 2, 1, 4)), dtype)
        positions = rng.integers(-1, 2 * S, (B, 1))
        expected = np.array(state)
        for b, position in enumerate(positions[:, 0]):
            if position >= 0:
                expected[b, :, position % S] = new[b, :, 0]
        for write in (_write_rows, _write_rows_in_loop):
            found = jax.jit(write)(state, new, jnp.asarray(positions, jnp.int32))
            np.testing.assert_array_equal(found, expected)
