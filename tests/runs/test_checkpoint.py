"""Checkpoints: what is restored is what was saved, whatever happened meanwhile to process, disk or
mesh."""

import asyncio
import contextlib
import errno
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from etils import epath
from flax import struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import jaxformer
from jaxformer.errors import ConfigError
from jaxformer.parallel import processes
from jaxformer.runs import checkpoint, checkpoint_reader
from jaxformer.runs.checkpoint import CheckpointError, Manager
from jaxformer.runs.checkpoint_reader import restore_params
from jaxformer.runs.manifest import fingerprints

with contextlib.suppress(RuntimeError):  # the backend is up already; conftest.py has set the number
    jax.config.update("jax_num_cpu_devices", 8)

needs_8_devices = pytest.mark.skipif("len(jax.devices()) < 8")


@struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any
    ema: Any = None
    key: Any = None


def make(step: int, width: int = 16, **extra) -> State:
    """A state in which every leaf tells the step."""
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(jax.random.key(step), i), shape)
    params = {
        "layers": {"query": {"kernel": draw(0, 2, width, width)}, "scale": draw(1, width)},
        "embed": draw(2, 32, width),
    }
    updates, opt_state = optax.adamw(1e-3).update(params, optax.adamw(1e-3).init(params), params)
    del updates
    return State(
        jnp.int32(step), params, opt_state, key=jax.random.key_data(jax.random.key(step)), **extra
    )


def bits(leaf) -> bytes:
    leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf).tobytes()


def assert_same(actual, expected):
    """Bit for bit, with the same Python types, shapes and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bits(a) == bits(b)


def abstract(state):
    return jax.eval_shape(lambda: state)


def saved(folder: Path, steps, **options) -> list[str]:
    """Writes `make(step)` for each step; returns what was logged."""
    log = []
    with Manager(folder, keep_latest=len(steps), log=log.append, **options) as manager:
        for step in steps:
            manager.save(step, make(step), {"step": step}, wait=True)
    return log


def data_files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.fixture
def collected():
    """Collects what orbax left behind in this test, and not in a later one."""
    yield
    gc.collect()


def reads_damage(test):
    """For a test in which orbax reads a damaged step: it closes its event loop over reads that are
    still running."""
    test = pytest.mark.usefixtures("collected")(test)
    return pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)


# Fingerprints


def numpy_fingerprint(words: np.ndarray) -> str:
    """The witness: the documented formula in 64-bit integers, reduced at the end."""
    index = np.arange(words.size, dtype=np.uint64)
    m = np.uint64(2**32)
    word = words.astype(np.uint64) ^ (index * np.uint64(0x9E3779B1) % m)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor) % m
    word ^= word >> np.uint64(16)
    second = sum(int(w) * (2 * int(i) + 1) for w, i in zip(word, index, strict=True)) % 2**32
    return f"{int(word.sum() % m):08x}{second:08x}"


@pytest.mark.thorough
def test_fingerprint_is_the_documented_sum():
    x = jax.random.normal(jax.random.key(0), (5, 7, 3))
    assert fingerprints([x]) == [numpy_fingerprint(np.asarray(x).view(np.uint32).ravel())]
    half = x.astype(jnp.bfloat16)
    assert fingerprints([half]) == [numpy_fingerprint(np.asarray(half).view(np.uint16).ravel())]
    with jax.disable_jit():
        assert fingerprints([x]) == [numpy_fingerprint(np.asarray(x).view(np.uint32).ravel())]


DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint32",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "bool",
    "complex64",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_both_halves(dtype):
    rng = np.random.default_rng(0)
    whole = rng.integers(
        0, 2 if dtype == "bool" else 256, size=96 * jnp.dtype(dtype).itemsize, dtype=np.uint8
    )
    as_leaf = lambda raw: jax.device_put(raw.view(jnp.dtype(dtype)).reshape(4, -1, 3))
    (before,) = fingerprints([as_leaf(whole)])
    for _ in range(40):
        flipped = whole.copy()
        flipped[rng.integers(whole.size)] ^= 1 if dtype == "bool" else 1 << rng.integers(8)
        (after,) = fingerprints([as_leaf(flipped)])
        assert after[:8] != before[:8] and after[8:] != before[8:]


def test_damage_that_linear_sums_would_miss():
    x = jax.random.normal(jax.random.key(0), (6, 8))
    two_signs = x.at[0, 0].multiply(-1).at[3, 5].multiply(-1)
    swapped = x.at[0].set(x[1]).at[1].set(x[0])
    prints = fingerprints(
        [x, -x, two_signs, swapped, x.T, jnp.zeros((6, 8)), -jnp.zeros((6, 8)), jnp.zeros(0)]
    )
    assert len(set(prints)) == len(prints)


@pytest.mark.thorough
@needs_8_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_fingerprint_does_not_depend_on_the_mesh(axis_type):
    x = jax.random.normal(jax.random.key(0), (16, 8, 24))
    layouts = [x]
    for shape in ((4, 2), (2, 4), (8, 1)):
        mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(axis_type,) * 2)
        specs = P("a", "b"), P(None, "b", "a"), P(("b", "a")), P()
        layouts += [jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs]
    assert len(set(fingerprints(layouts))) == 1


# Saving and restoring


@pytest.mark.thorough
def test_round_trip_is_exact_and_gives_back_the_same_types(tmp_path):
    odd = {
        "half": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "nan": jax.lax.bitcast_convert_type(jnp.uint32([0x7FC00001, 0xFF812345]), jnp.float32),
        "subnormal": jnp.float32([1e-40, -1e-45]),
        "float16": jnp.ones((2, 3), jnp.float16),
        "bool": jnp.array([True, False]),
        "uint32": jnp.uint32([2**32 - 1]),
        "typed key": jax.random.split(jax.random.key(3), 4),
        "other key": jax.random.key(3, impl="rbg"),
        "empty": jnp.zeros((0, 4)),
        "scalar": 7,
        "numpy": np.arange(3, dtype=np.int32),
        "none": None,
        "list": [jnp.zeros(2), (jnp.ones(1),)],
    }
    state = make(3, ema=odd)
    with Manager(tmp_path) as manager:
        assert manager.restore(abstract(state)) is None
        manager.save(
            3, state, {"config": {"name": "x", "sizes": [1, 2]}, "digest": "ab"}, metric=1.25
        )
        step, restored, metadata = manager.restore(abstract(state))
    assert step == 3 and metadata == {"config": {"name": "x", "sizes": [1, 2]}, "digest": "ab"}
    assert_same(restored, jax.tree.map(jnp.asarray, state))
    assert isinstance(restored, State) and isinstance(restored.opt_state[0], optax.ScaleByAdamState)


@pytest.mark.thorough
def test_state_may_be_donated_and_changed_while_it_is_saved(tmp_path):
    step = jax.jit(
        lambda s: jax.tree.map(lambda a: a + 1 if a.dtype != jnp.uint32 else a, s), donate_argnums=0
    )
    with Manager(tmp_path, keep_latest=9) as manager:
        for i in range(4):
            state = make(i, width=256)
            manager.save(i, state)
            for _ in range(3):
                state = step(state)
        for i in range(4):
            assert_same(
                manager.restore(abstract(make(0, width=256)), step=i)[1], make(i, width=256)
            )


@pytest.mark.thorough
def test_no_save_is_skipped_while_another_runs(tmp_path):
    with Manager(tmp_path, keep_latest=8) as manager:
        for step in range(8):
            manager.save(step, make(step))
    assert checkpoint.steps(tmp_path) == list(range(8))


@pytest.mark.thorough
@needs_8_devices
def test_restores_onto_any_mesh(tmp_path):
    def on(shape, state):
        mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        spec = lambda a: (
            P(*["data", "tensor"][: a.ndim]) if a.ndim >= 2 and a.shape[0] % 8 == 0 else P()
        )
        return jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), state)

    state = make(
        1, ema={"typed": jax.random.split(jax.random.key(0), 8), "empty": jnp.zeros((0, 8))}
    )
    sharded = jax.tree.map(jax.device_put, state, on((4, 2), state))
    assert len(sharded.params["embed"].sharding.device_set) == 8
    with Manager(tmp_path) as manager:
        manager.save(1, sharded)
        for shardings in (on((4, 2), state), on((2, 4), state), on((1, 8), state), None):
            struct_ = abstract(state)
            if shardings is not None:
                place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
                struct_ = jax.tree.map(place, struct_, shardings)
            _, restored, _ = manager.restore(struct_)
            assert_same(restored, state)
            expected = shardings or jax.tree.map(
                lambda _: SingleDeviceSharding(jax.devices()[0]), state
            )
            for leaf, sharding in zip(
                jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True
            ):
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@needs_8_devices
def test_sharding_that_does_not_divide_is_not_called_damage(tmp_path):
    saved(tmp_path, [1])
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    odd = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract(make(1)))
    scale = jax.ShapeDtypeStruct((2, 16, 16), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    odd.params["layers"]["query"]["kernel"] = scale
    with Manager(tmp_path) as manager, pytest.raises(ValueError, match="partitioned 8 times"):
        manager.restore(odd)
    assert checkpoint.steps(tmp_path) == [1]


def test_metadata_must_be_json_and_paths_unique(tmp_path):
    with Manager(tmp_path) as manager:
        with pytest.raises(TypeError):
            manager.save(1, make(1), {"f": print})
        with pytest.raises(ValueError, match="same path"):
            manager.save(1, {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)})
    assert checkpoint.steps(tmp_path) == []


def test_no_implicit_transfers(tmp_path):
    state = make(1)
    with Manager(tmp_path) as manager, jax.transfer_guard("disallow"):
        manager.save(1, state, wait=True)
        manager.restore(abstract(state))


# What is kept


def expected_kept(
    history: list[tuple[int, float | None]], every: int, latest: int, best: int
) -> set[int]:
    steps = {}
    for step, metric in history:
        steps[step] = metric
        ranked = sorted(
            (math.inf if math.isnan(m) else m, s) for s, m in steps.items() if m is not None
        )
        regular = sorted(step for step in steps if step % every == 0)
        keep = {max(steps), *regular[-latest:]} | {s for _, s in ranked[:best]}
        steps = {s: m for s, m in steps.items() if s in keep}
    return set(steps)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_keeps_the_latest_and_the_best(tmp_path, seed):
    rng = random.Random(seed)
    latest, best, every = rng.randint(1, 3), rng.randint(0, 2), (10, 20, 1)[seed % 3]
    draw = lambda: rng.choice([None, math.nan, math.inf, rng.random(), rng.random(), rng.random()])
    history = [(10 * i, draw()) for i in range(7)]
    for part in (history[:4], history[4:]):  # the second manager has to read the metrics from disk
        with Manager(tmp_path, every, keep_latest=latest, keep_best=best, score="loss") as manager:
            for step, metric in part:
                manager.save(step, {"a": jnp.float32(step)}, metric=metric)
    assert set(checkpoint.steps(tmp_path)) == expected_kept(history, every, latest, best)
    assert {path.name for path in tmp_path.iterdir()} == {
        str(s) for s in checkpoint.steps(tmp_path)
    }


def test_nan_loses_to_any_number(tmp_path):
    with Manager(tmp_path, keep_latest=1, keep_best=1) as manager:
        for step, metric in enumerate([math.nan, 5.0, math.nan, None]):
            manager.save(step, {"a": jnp.zeros(1)}, metric=metric)
    assert checkpoint.steps(tmp_path) == [1, 3]


@pytest.mark.thorough
@pytest.mark.usefixtures("collected")
def test_saves_leave_nothing_in_memory(tmp_path):
    """A call of tensorstore left 24 lists at each save: 1 MB in 100 steps of an outside check."""
    lists = {}  # {step: lists in memory}
    with Manager(tmp_path, keep_latest=1, keep_best=0) as manager:
        for step in range(1, 26):
            manager.save(step, {"a": jnp.arange(300.0)}, metric=1.0 / step)
            manager.wait()
            if step in (10, 25):
                gc.collect()
                lists[step] = sum(type(one) is list for one in gc.get_objects())
    assert lists[25] - lists[10] < 60


@pytest.mark.thorough
@pytest.mark.parametrize("least", [1 << 12, 1 << 27])
def test_what_does_not_fit_at_once_is_saved_and_read_in_turn(tmp_path, monkeypatch, least):
    """Leaves of 16 kB: one after the other, or as always all at once.

    The state is donated as soon as `save` returns.
    """
    seen, real = [], checkpoint.memory.in_flight
    monkeypatch.setattr(checkpoint.memory, "LEAST", least)
    monkeypatch.setattr(
        checkpoint.memory, "in_flight", lambda leaves: seen.append(real(list(leaves))) or seen[-1]
    )
    monkeypatch.setattr(checkpoint, "PIECE", 1 << 10)
    draw = lambda step: {
        f"{i}": jax.random.normal(jax.random.key(i + step), (64, 64)) for i in range(9)
    }
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            state = draw(step)
            manager.save(step, state)
            jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)(state)
        for step in (1, 2):
            assert_same(manager.restore(abstract(draw(0)), step=step)[1], draw(step))
    assert seen == [(9 << 14) // 8 if least < 1 << 14 else None] * 4


@pytest.mark.thorough
@needs_8_devices
def test_files_have_pieces_that_another_mesh_reads_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE", 1 << 10)
    x = jax.random.normal(jax.random.key(0), (64, 64))
    with Manager(tmp_path) as manager:
        manager.save(1, {"x": x}, wait=True)
        files = {"driver": "file", "path": f"{tmp_path}/1/state/"}
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()
        (key,) = [key for key in store.list().result() if key.endswith(b".zarray")]
        assert math.prod(json.loads(store[key])["chunks"]) * 4 <= 1 << 10
        sharding = NamedSharding(
            jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P(None, "data")
        )
        like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}
        assert_same(manager.restore(like)[1], {"x": x})


def test_a_step_is_saved_once_and_in_order(tmp_path):
    with Manager(tmp_path) as manager:
        for step in (1, 3):
            manager.save(step, make(step), wait=True)
        for step in (2, 3):
            with pytest.raises(
                CheckpointError, match=f"step {step} was not saved: .*step 3 exists"
            ):
                manager.save(step, make(7), wait=True)
        manager.save(4, make(4), wait=True)
        assert manager.steps() == [1, 3, 4]
        assert_same(manager.restore(abstract(make(1)), step=3)[1], make(3))


# Readers


@pytest.mark.thorough
@reads_damage
def test_params_alone(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        restore_params(tmp_path / "none", abstract(make(1).params))
    with Manager(tmp_path) as manager:  # readers do not mind the writer
        for step in (1, 2):
            manager.save(step, make(step), {"step": step}, wait=True)
        step, params, metadata = restore_params(tmp_path, abstract(make(1).params))
        assert step == 2 and metadata == {"step": 2}
        assert_same(params, make(2).params)
        assert_same(restore_params(tmp_path, abstract(make(1).params), step=1)[1], make(1).params)
    with pytest.raises(
        CheckpointError,
        match=(
            r"does not fit the model: .*params/layers/scale is float32\[16\], and nothing in the "
            r"model"
        ),
    ):
        restore_params(tmp_path, {"embed": jax.ShapeDtypeStruct((32, 16), jnp.float32)})
    spoil_arrays(tmp_path / "2")
    before = sorted(tmp_path.rglob("*"))
    assert restore_params(tmp_path, abstract(make(1).params))[0] == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_mismatch_is_reported_by_leaf_and_renames_nothing(tmp_path):
    saved(tmp_path, [1, 2])
    wrong = abstract(make(1, ema={"new": jnp.zeros(3)}))
    wrong.params["embed"] = jax.ShapeDtypeStruct((33, 16), jnp.float32)
    wrong.params["layers"]["scale"] = jax.ShapeDtypeStruct((16,), jnp.bfloat16)
    del wrong.params["layers"]["query"]
    with Manager(tmp_path) as manager, pytest.raises(ConfigError) as caught:
        manager.restore(wrong)
    assert str(caught.value) == (
        f"{tmp_path}/2: the checkpoint does not fit the model: ema/new is nothing, and "
        f"float32[3] in the model, "
        "params/embed is float32[32,16], and float32[33,16] in the model, "
        "params/layers/query/kernel is float32[2,16,16], and nothing in the model and 1 more; "
        "use the config it was saved with, or another folder"
    )
    assert checkpoint.steps(tmp_path) == [1, 2]


# Damage


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def zero(file: Path, rng: random.Random) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    saved(folder, [1, 2])
    return folder


def damaged_copy(original: Path, copy: Path, damage, name: Path | str, rng: random.Random) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    damage(copy / "2" / name, rng)


def spoil_arrays(step: Path) -> None:
    """Zeros in place of the array data."""
    for file in data_files(step / "state" / "d"):
        zero(file, random.Random(0))


def assert_harmless_or_detected(folder: Path) -> bool:
    """Whether step 2 was found damaged. What comes back is in any case what was saved."""
    log = []
    with Manager(folder, log=log.append) as manager:
        step, state, metadata = manager.restore(abstract(make(1)))
    assert_same(state, make(step))
    assert metadata == {"step": step}
    assert step == 2 or (
        (folder / "2.corrupt").is_dir() and len(log) == 1 and "step 2 is damaged: " in log[0]
    )
    return step == 1


@pytest.mark.thorough
@reads_damage
@pytest.mark.parametrize("damage", [flip, zero, truncate, delete])
def test_damage_to_any_file_is_harmless_or_detected(two_steps, tmp_path, damage, capfd):
    rng = random.Random(0)
    found = 0
    for path in data_files(two_steps / "2"):
        damaged_copy(two_steps, tmp_path / "c", damage, path.relative_to(two_steps / "2"), rng)
        found += assert_harmless_or_detected(tmp_path / "c")
        with Manager(tmp_path / "c") as manager:
            manager.save(3, make(3), wait=True)  # the run continues
            assert_same(manager.restore(abstract(make(1)))[1], make(3))
    assert found >= 3
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
@reads_damage
def test_flips_in_array_data_are_caught_by_the_fingerprint_alone(two_steps, tmp_path):
    rng = random.Random(1)
    name = max(data_files(two_steps / "2"), key=lambda path: path.stat().st_size).relative_to(
        two_steps / "2"
    )
    found = 0
    for _ in range(8):
        damaged_copy(two_steps, tmp_path / "c", flip, name, rng)
        found += assert_harmless_or_detected(tmp_path / "c")
    assert found >= 6  # the rest hit what no leaf needs, such as an index to other versions


@pytest.mark.fault
@reads_damage
@pytest.mark.parametrize("damage", [flip, zero, truncate, delete])
def test_damage_to_every_file_many_times(two_steps, tmp_path, damage):
    rng = random.Random(2)
    for path in data_files(two_steps / "2"):
        name = path.relative_to(two_steps / "2").as_posix()
        for _ in range(30 if damage is flip else 3):
            damaged_copy(two_steps, tmp_path / "c", damage, name, rng)
            assert_harmless_or_detected(tmp_path / "c")


@pytest.mark.fault
@reads_damage
def test_flips_anywhere(two_steps, tmp_path):
    rng = random.Random(3)
    files = [path.relative_to(two_steps / "2") for path in data_files(two_steps / "2")]
    for _ in range(150):
        damaged_copy(two_steps, tmp_path / "c", flip, rng.choice(files), rng)
        assert_harmless_or_detected(tmp_path / "c")


def test_a_leaf_that_differs_is_named(tmp_path, monkeypatch):
    """The files are as written, but what was written is not what the step had made (bad memory, a
    bug in between)."""
    real = checkpoint.orbax.args.StandardSave
    spoil = lambda data: {**data, "params/embed": data["params/embed"].at[3, 5].multiply(1.0000001)}
    log = []
    with Manager(tmp_path, log=log.append) as manager:
        manager.save(1, make(1), wait=True)
        monkeypatch.setattr(
            checkpoint.orbax.args, "StandardSave", lambda data, pieces: real(spoil(data), pieces)
        )
        manager.save(2, make(2), wait=True)
        assert manager.restore(abstract(make(1)))[0] == 1
    assert "step 2 is damaged: params/embed: the fingerprint" in log[-1]


@pytest.mark.thorough
@reads_damage
def test_several_damaged_steps_and_none_good(tmp_path):
    saved(tmp_path, [1, 2, 3])
    for step in (2, 3):
        spoil_arrays(tmp_path / str(step))
    with Manager(tmp_path) as manager:
        assert manager.restore(abstract(make(1)))[0] == 1
        assert checkpoint.steps(tmp_path) == [1]
        spoil_arrays(tmp_path / "1")
        with pytest.raises(
            CheckpointError, match=re.escape(f"{tmp_path}: every checkpoint is damaged: 1 (")
        ):
            manager.restore(abstract(make(1)))
    with (
        Manager(tmp_path) as manager,
        pytest.raises(CheckpointError, match=r"damaged: 1 \(.*, 2\.corrupt, 3\.corrupt"),
    ):
        manager.restore(abstract(make(1)))  # a restart does not begin at zero in silence either
    # where none is good, none is renamed, and the next start looks again
    assert checkpoint.steps(tmp_path) == [1]


@pytest.mark.thorough
@reads_damage
def test_a_step_damaged_twice_keeps_both(tmp_path):
    saved(tmp_path, [1])
    for _ in range(2):
        with Manager(tmp_path) as manager:
            manager.save(2, make(2), wait=True)
        spoil_arrays(tmp_path / "2")
        with Manager(tmp_path) as manager:
            manager.restore(abstract(make(1)))
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2.corrupt", "2.corrupt-2"}


@pytest.mark.thorough
@reads_damage
def test_a_named_step_does_not_fall_back(tmp_path):
    saved(tmp_path, [1, 2])
    with Manager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 1, 2"):
            manager.restore(abstract(make(1)), step=5)
        assert manager.restore(abstract(make(1)), step=1)[0] == 1
        delete(tmp_path / "2" / "_CHECKPOINT_METADATA", random.Random(0))
        with pytest.raises(
            CheckpointError,
            match=r"damaged: 2 \(_CHECKPOINT_METADATA is missing or has changed\); other steps: 1",
        ):
            manager.restore(abstract(make(1)), step=2)


def test_what_is_no_damage_is_refused_and_renames_nothing(tmp_path, monkeypatch):
    """Rights, memory and a network that fails say nothing about the files."""
    saved(tmp_path, [1, 2])

    def load(*_):
        raise ValueError("PERMISSION_DENIED: [Errno 13] Permission denied")

    monkeypatch.setattr(checkpoint_reader.ocp, "load", load)
    with (
        Manager(tmp_path) as manager,
        pytest.raises(CheckpointError, match=r"2: the checkpoint cannot be read: .*DENIED"),
    ):
        manager.restore(abstract(make(1)))
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_a_step_under_another_number_is_refused(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "1").rename(tmp_path / "8")
    with (
        Manager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="is that of another step"),
    ):
        manager.restore(abstract(make(1)))


# Saves that fail, and what they leave


def test_a_folder_that_only_some_processes_see_is_refused(tmp_path, monkeypatch):
    """Its first save would wait for the others without an end."""
    monkeypatch.setattr(
        checkpoint,
        "that_see",
        lambda folder: processes.Group(0, jax.process_count() - 1, lambda f: f(), int),
    )
    with pytest.raises(
        ConfigError, match="not all processes see it; give a folder that all hosts share"
    ):
        Manager(tmp_path / "run")


def test_a_failed_save_is_one_line_and_the_next_one_works(tmp_path, monkeypatch):
    log = []
    with Manager(tmp_path, log=log.append) as manager:
        manager.save(1, make(1))
        manager.wait()

        def full(self, step, **_):
            (tmp_path / f"{step}.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.orbax.CheckpointManager, "save", full)
            manager.save(2, make(2))
            assert (
                len(log) == 1 and "\n" not in log[0] and "step 2 was not saved: OSError" in log[0]
            )
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(make(2)))
            assert f"it needs up to {size:,} bytes, " in log[0]
            with pytest.raises(CheckpointError, match="step 1 was not saved"):
                manager.save(1, make(9), wait=True)
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        assert_same(manager.restore(abstract(make(1)))[1], make(1))
        manager.save(2, make(2), wait=True)
    assert checkpoint.steps(tmp_path) == [1, 2]


@pytest.mark.thorough
def test_a_full_disk(small_disk, capfd):
    log = []
    with Manager(small_disk / "checkpoints", log=log.append) as manager:
        manager.save(1, make(1))
        for step in (2, 3):  # 6 MB
            manager.save(step, make(step, width=512))
            manager.wait()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(make(2, width=512)))
        assert len(log) == 2 and all(
            "No space left" in line and f"it needs up to {size:,} bytes" in line for line in log
        )
        with pytest.raises(CheckpointError, match="No space left"):
            manager.save(4, make(4, width=512), wait=True)
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["1"]
        assert_same(manager.restore(abstract(make(1)))[1], make(1))
        manager.save(5, make(5), wait=True)
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(512))
        with pytest.raises(CheckpointError, match="No space left"):
            manager.save(6, make(6), wait=True)  # not even room for a folder
        ballast.unlink()
        manager.save(6, make(6), wait=True)
        assert_same(manager.restore(abstract(make(1)))[1], make(6))
    assert capfd.readouterr().err == ""


@pytest.mark.fault
# orbax's other writes, see _check_room
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_up_during_a_save(small_disk, monkeypatch):
    room = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    with Manager(small_disk / "checkpoints") as manager:
        manager.save(1, make(1), wait=True)
        with pytest.raises(CheckpointError, match="No space left"):
            manager.save(2, make(2, width=512), wait=True)
        assert manager.steps() == [1]
        assert_same(manager.restore(abstract(make(1)))[1], make(1))
        time.sleep(1)  # until the last of those writes has failed, in this test and not in the next
        manager.save(3, make(3), wait=True)
        assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["1", "3"]


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        Manager(tmp_path / "file" / "checkpoints")


def test_a_folder_that_is_removed_comes_back(tmp_path):
    with Manager(tmp_path / "c") as manager:
        manager.save(1, make(1), wait=True)
        shutil.rmtree(tmp_path / "c")
        manager.save(2, make(2), wait=True)
        assert manager.restore(abstract(make(1)))[0] == 2


@pytest.mark.parametrize("successor", [False, True])
def test_a_run_whose_folder_was_removed_stops_at_its_next_save(tmp_path, successor):
    """Its lock went with the folder: a second trainer may have started, and the first one must not
    write beside it."""
    run = tmp_path / "run"
    with Manager(run / "checkpoints") as manager, contextlib.ExitStack() as stack:
        manager.save(1, make(1), wait=True)
        shutil.rmtree(run)
        if successor:
            stack.enter_context(Manager(run / "checkpoints")).save(1, make(5), wait=True)
        with pytest.raises(ConfigError, match=r"checkpoints\.lock was removed .* stops at step 2"):
            manager.save(2, make(2))
        if successor:
            assert_same(
                restore_params(run / "checkpoints", abstract(make(1).params))[1], make(5).params
            )


@pytest.mark.thorough
def test_two_managers(tmp_path):
    with Manager(tmp_path / "a") as first:
        first.save(1, make(1, width=256))
        with pytest.raises(ConfigError, match="another trainer holds this run"):
            Manager(tmp_path / "a")
        with Manager(tmp_path / "b") as other:  # another run in the same process
            other.save(1, make(5))
            first.save(2, make(2, width=256))
            other.save(2, make(6))
        assert_same(first.restore(abstract(make(1, width=256)))[1], make(2, width=256))
    with Manager(tmp_path / "a") as second:
        assert second.steps() == [1, 2]
        assert_same(restore_params(tmp_path / "b", abstract(make(1).params))[1], make(6).params)


@pytest.mark.thorough
def test_opening_tidies_up_after_a_kill(tmp_path):
    saved(tmp_path, [1, 2, 3])
    shutil.copytree(tmp_path / "1", tmp_path / "4.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "1", tmp_path / "4.orbax-checkpoint-tmp-123")
    shutil.copytree(tmp_path / "1", tmp_path / "deleted" / "0")
    others = ["notes", "x.orbax-checkpoint-tmp", "7.corrupt"]
    for name in others:
        (tmp_path / name).mkdir()
    with Manager(tmp_path) as manager:
        assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3", *others}
        for step in (1, 2, 3):
            assert_same(manager.restore(abstract(make(1)), step=step)[1], make(step))


CHILD = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from test_checkpoint import make, abstract, Manager
with Manager({folder!r}, keep_latest=2, keep_best=1) as manager:
    found = manager.restore(abstract(make(0)))
    step = 0 if found is None else found[0]
    print("ready", flush=True)
    while True:
        step += 1
        manager.save(step, make(step), {{"step": step}}, metric=(step * 7) % 5)
        print(step - 1, flush=True)
"""


@pytest.mark.fault
def test_kill_9_during_saves(tmp_path):
    rng = random.Random(0)
    code = CHILD.format(
        root=str(Path(jaxformer.__file__).parents[1]),
        here=str(Path(__file__).parent),
        folder=str(tmp_path),
    )
    done = 0
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while child.stdout.readline() not in ("ready\n", ""):
            pass
        time.sleep(rng.uniform(0.3, 1.5))  # the first save takes about 0.3 s
        child.send_signal(signal.SIGKILL)
        printed, errors = child.communicate()
        assert errors == ""
        # A step is printed once its save is whole and that of the next one has begun.
        done = max([done, *(int(line) for line in printed.split("\n")[:-1] if line.isdecimal())])
        log = []
        with Manager(tmp_path, log=log.append) as manager:
            steps = manager.steps()
            assert log == [] and not [p for p in tmp_path.iterdir() if not p.name.isdecimal()]
            assert (max(steps) if steps else 0) >= done and len(steps) <= 4
            for step in steps:
                _, state, metadata = manager.restore(abstract(make(0)), step=step)
                assert metadata == {"step": step}
                assert_same(state, make(step))
    assert done > 8


def test_nothing_else_imports_orbax():
    package = Path(jaxformer.__file__).parent
    files = [
        path
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from|import) orbax", path.read_text(), re.M)
    ]
    names = {path.relative_to(package).as_posix() for path in files}
    assert names == {"runs/checkpoint.py", "runs/checkpoint_reader.py", "runs/orbax_internals.py"}


def test_no_process_waits_for_a_folder_that_the_first_one_makes(tmp_path):
    """Process 0 may have failed, and its folder is gone: orbax would wait for ten minutes."""
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    Manager(tmp_path / "any", keep_latest=1).close()
    folder = epath.Path(tmp_path / "gone" / "array_metadatas")
    other_process = Store(primary_host=1)  # this process is number 0, so it is not the primary one
    for _ in range(2):
        asyncio.run(asyncio.wait_for(other_process._maybe_create_base_dir(folder), 60))
        assert folder.is_dir()
