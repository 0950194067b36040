"""The benches' own arithmetic: shares of wall time add up, ratios are of the best on each side."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from experiments.bench import compare, shapes, trace
from jaxformer.runs import memory


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(1, 1000), st.sampled_from("abc")),
        min_size=1,
        max_size=20,
    )
)
def test_shares_of_wall_time_add_up(runs):
    """To the time in which anything runs; and with the time of none, to the whole."""
    found = [trace.Thunk(1e6 * start, 1e6 * (start + length), name) for start, length, name in runs]
    shares, counts = trace.wall_time(found)
    covered = np.zeros(2000, bool)
    for start, length, _ in runs:
        covered[start : start + length] = True
    np.testing.assert_allclose(sum(shares.values()), covered.sum(), rtol=1e-9)
    whole = max(one.end for one in found) - min(one.start for one in found)
    np.testing.assert_allclose(sum(counts), 1e-6 * whole, rtol=1e-9)
    np.testing.assert_allclose(sum(counts[1:]), covered.sum(), rtol=1e-9)


def test_an_operation_is_described_by_its_shapes_and_its_place():
    text = """
      %x.1 = f32[4,8]{1,0} parameter(0)
      ROOT %fusion.12 = f32[8]{0} fusion(%x.1), kind=kLoop, metadata={op_name="jit(step)/a/b/c/d" stack_frame_id=2}
    """  # noqa: E501  (the compiler's own lines)
    assert trace.describe(text)["fusion.12"] == "fusion  f32[4,8] -> f32[8]  b/c/d"


def test_a_ratio_is_of_the_best_on_each_side(capsys):
    lines = lambda *times: [dict(ms=ms) for ms in times]
    found = {
        (compare.OURS, "float32"): lines(10, 12, 50),
        (f"{compare.OURS}, 4 parts", "float32"): lines(8, 8, 8),
        ("torch eager", "float32"): lines(16, 16, 16),
        ("torch compiled", "float32"): lines(20, 4, 30),
        ("torch eager", "bfloat16"): lines(6),
        (compare.OURS, "bfloat16"): lines(4),
    }
    ratios = compare.report("case", found, flops=1e9, each_peer=True)
    assert ratios == pytest.approx({"float32": 2.0, "bfloat16": 1.5, "best of each": 1.5})
    assert "ratio torch compiled float32 / jaxformer: 5.00" in capsys.readouterr().out


def test_on_a_gpu_only_the_last_of_the_calls_that_count_is_waited_for(monkeypatch):
    """There a step is launched while the one before it runs, as in a run that reads its losses
    late."""
    for platform, expected in (
        ("gpu", ["call", "wait", "call", "call", "call", "wait"]),
        ("cpu", ["call", "wait"] * 4),
    ):
        monkeypatch.setattr(compare, "platform", lambda platform=platform: platform)
        monkeypatch.setattr(compare, "SETTLE", 0.0)
        seen: list[str] = []
        line = compare.measure(
            lambda seen=seen: seen.append("call"), lambda _, seen=seen: seen.append("wait"), 3, 1
        )
        assert seen == expected and line["ms"] >= 0


def test_a_shape_is_found_with_its_parts():
    assert shapes.find("large/4") == (shapes.TRAIN["large"], 4)
    assert shapes.find("small") == (shapes.TRAIN["small"], 1)
    assert shapes.find("1.3b-2048") == (shapes.GPU["1.3b-2048"], 1)


@pytest.mark.thorough
@pytest.mark.skipif(
    memory._of_glibc("mallopt") is None, reason="the memory is kept by glibc's malloc"
)
@pytest.mark.parametrize(
    "command",
    [["train", "--one", "small", "float32"], ["attention", "--one", "causal", "2048", "float32"]],
)
def test_a_measured_call_faults_in_no_memory(command):
    """As in a run. In a process that starts JAX before it keeps memory, these calls fault in 2,000
    and 10,000 pages each."""
    name, *arguments = command
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.bench.{name}", *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert json.loads(done.stdout.splitlines()[-1])["faults"] < 300
