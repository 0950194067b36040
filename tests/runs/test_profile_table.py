"""The table of a profile: times are shared, instructions are found by their scopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.models import ModelConfig
from jaxformer.runs.profile_table import (
    Ran,
    Source,
    direction_of,
    lines_of,
    part_of,
    read_profile,
    shared_time,
    sources_of,
    table_of,
)


@pytest.mark.parametrize("seed", range(5))
def test_shared_times_add_up_to_the_time_in_which_anything_ran(seed):
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 60, 12)
    intervals = [
        (float(a), float(a + n)) for a, n in zip(starts, rng.integers(0, 9, 12), strict=True)
    ]
    times = shared_time(intervals)
    expected = np.zeros(12)
    for moment in range(80):  # a unit of time after another
        running = [i for i, (start, end) in enumerate(intervals) if start <= moment < end]
        expected[running] += 1 / max(len(running), 1)
    np.testing.assert_allclose(times, expected, atol=1e-9)


@pytest.mark.parametrize(
    ("opcode", "op_name", "part", "direction"),
    [
        ("fusion", "jit(train_step)/jvp(attention)/attention/mul", "attention", "forward"),
        ("fusion", "jit(f)/transpose(jvp(attention))/norm/mul", "norms", "backward"),
        ("dot", "jit(f)/transpose(jvp(feedforward))/btd,df->btf/dot", "feed-forward", "backward"),
        (
            "dot",
            "jit(f)/transpose(jvp(layers))/checkpoint/rematted_computation/feedforward/dot",
            "feed-forward",
            "again",
        ),
        ("all-reduce-start", "jit(f)/transpose(jvp(attention))/psum", "collectives", "backward"),
        ("fusion", "jit(f)/optimizer/cond/branch_1_fun/add", "optimizer", "forward"),
        ("fusion", "jit(f)/jvp(cross_attention)/add", "cross attention", "forward"),
        ("copy", "", "other", "forward"),
        ("fusion", "jit(f)/attention_of_mine/add", "other", "forward"),
    ],
)
def test_an_instruction_belongs_to_its_innermost_scope(opcode, op_name, part, direction):
    source = Source(opcode, op_name)
    assert (part_of(source), direction_of(source)) == (part, direction)


def test_the_table_is_that_of_one_step_and_loops_do_not_count_twice():
    sources = {
        ("step", "while.1"): Source("while", "jit(f)/while"),
        ("step", "dot.2"): Source("dot", "jit(f)/jvp(attention)/dot"),
        ("step", "add.3"): Source("fusion", "jit(f)/transpose(jvp(attention))/add"),
    }
    ms = 1e6  # nanoseconds
    ran = []
    for start in (
        0.0,
        10 * ms,
    ):  # two steps, each with 2 + 3 of 10 ms; then 1 ms of another program
        ran += [
            Ran("step", "while.1", start, start + 9 * ms),
            Ran("step", "dot.2", start, start + 2 * ms),
            Ran("step", "add.3", start + 4 * ms, start + 7 * ms),
        ]
    ran.append(Ran("other", "dot.2", 19 * ms, 20 * ms))
    table = table_of(ran, sources, steps=2)
    nothing = {"forward": 0, "again": 0, "backward": 0}
    assert table.parts == {
        "attention": nothing | {"forward": 2, "backward": 3},
        "other": nothing | {"forward": 0.5},
    }
    assert (table.idle, table.step) == (pytest.approx(4.5), pytest.approx(10))
    lines = lines_of(table)
    assert lines[1].split() == ["attention", "5.00", "50%", "2.00", "3.00"]
    assert lines[-1].split() == ["the", "step", "10.00", "100%"]
    assert table_of([], sources, 2).step == 0


MODEL = ModelConfig(vocab_size=32, num_layers=2, d_model=16, num_heads=2, context_length=16)


@pytest.mark.thorough
def test_a_trace_is_read(tmp_path):
    """The compiled program knows its scopes, and the trace knows its instructions."""
    params = models.init(MODEL, jax.random.key(0))
    tokens = jnp.zeros((2, 16), jnp.int32)

    @jax.jit
    def gradient(params):
        return jax.grad(lambda params: models.apply(MODEL, params, tokens).logits.sum())(params)

    jax.block_until_ready(gradient(params))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(gradient(params))
    programs = jax.local_devices()[0].client.live_executables()
    found = {
        part_of(source)
        for (name, _), source in sources_of(programs).items()
        if name == "jit_gradient"
    }
    assert {"attention", "feed-forward", "norms", "embedding", "head and loss"} <= found
    lines = read_profile(str(tmp_path), steps=1)
    assert lines[0].split() == ["ms", "of", "a", "step", "forward", "again", "backward"]
    assert {"attention", "feed-forward", "norms"} <= {line.split()[0] for line in lines}
    assert read_profile(str(tmp_path / "nothing"), steps=1) == []
