"""Folders of weights: what we write others read and the other way round; what is damaged gets one
line of answer."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors as weights
from jaxformer.interop.safetensors import DTYPES, check_finite, open_checkpoint, save_checkpoint

CONFIG = {"model_type": "gpt2", "n_layer": 2, "id2label": {"0": "no"}}


def listed(arrays):
    return [
        (name, array.shape, array.dtype, lambda array=array: array)
        for name, array in arrays.items()
    ]


def random(rng, dtype, shape):
    """Every bit pattern of the dtype, NaN included; the two that a boolean has."""
    octets = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return (octets & 1 if dtype.kind == "b" else octets).view(dtype).reshape(shape)


def some_arrays(rng=None):
    rng = rng or np.random.default_rng(0)
    shapes = {"matrix": (3, 5), "scalar": (), "none": (0, 4), "deep": (1, 2, 1, 3, 1, 2)}
    return {
        f"{code}.{kind}": random(rng, DTYPES[code], shape)
        for code in DTYPES
        for kind, shape in shapes.items()
    }


def assert_same(checkpoint, arrays):
    assert set(checkpoint.names) == set(arrays)
    for name, array in arrays.items():
        assert checkpoint.names[name] == (array.shape, array.dtype.name)
        back = checkpoint.read(name)
        assert (
            back.dtype == array.dtype
            and back.shape == array.shape
            and back.tobytes() == array.tobytes()
        )


# Round trips


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    arrays = some_arrays()
    save_checkpoint(tmp_path / "new" / "model", CONFIG, listed(arrays))
    checkpoint = open_checkpoint(tmp_path / "new" / "model")
    assert_same(checkpoint, arrays)
    content = (checkpoint.folder / weights.SINGLE).read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":  # who maps the file needs tensors at a multiple of their width
            assert (begin + entry["data_offsets"][0]) % DTYPES[entry["dtype"]].itemsize == 0
    assert checkpoint.config == CONFIG and checkpoint.folder == tmp_path / "new" / "model"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json",
        "model",
        "model.safetensors",
        "new",
    ]
    assert (checkpoint.folder / "config.json").read_text() == json.dumps(
        CONFIG, indent=2, sort_keys=True
    ) + "\n"


named = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
    max_size=6,
)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(named, st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_any_names_shapes_and_shard_sizes_come_back(kinds, shard_bytes, seed):
    rng = np.random.default_rng(seed)
    arrays = {
        name: random(rng, DTYPES[code], tuple(shape)) for name, (code, shape) in kinds.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/model", CONFIG, listed(arrays), shard_bytes)
        assert_same(open_checkpoint(f"{folder}/model"), arrays)


def test_shards_hold_no_more_than_they_may_and_the_index_names_all(tmp_path):
    arrays = {f"layer.{i}": np.full((i + 1, 5), i, np.float32) for i in range(9)} | {
        "last": np.ones(1, np.int8)
    }
    save_checkpoint(tmp_path / "model", CONFIG, listed(arrays), shard_bytes=200)
    assert_same(open_checkpoint(tmp_path / "model"), arrays)
    index = json.loads((tmp_path / "model" / weights.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        there = [arrays[name].nbytes for name in arrays if index["weight_map"][name] == file]
        assert sum(there) <= 200 or len(there) == 1  # 180 + 21 bytes do not fit into one


def test_of_a_tensor_in_two_files_the_index_says_which_counts(tmp_path):
    arrays = {name: np.full(50, i, np.float32) for i, name in enumerate("abc")}
    save_checkpoint(tmp_path / "model", CONFIG, listed(arrays), shard_bytes=200)
    stale = {"a": np.full(50, 9, np.float32), "c": arrays["c"]}
    weights.save_file(
        stale, tmp_path / "model" / "model-00003-of-00003.safetensors", {"format": "pt"}
    )
    assert_same(open_checkpoint(tmp_path / "model"), arrays)


def test_two_tensors_of_one_name_are_not_written(tmp_path):
    arrays = {"a": np.zeros(2, np.float32)}
    with pytest.raises(ValueError, match="two tensors are called a"):
        save_checkpoint(tmp_path / "model", CONFIG, [*listed(arrays), *listed(arrays)])
    assert not list(tmp_path.iterdir())


def test_a_transposed_array_is_written_in_its_own_order(tmp_path):
    # several slabs
    arrays = {"kernel": np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000).T}
    save_checkpoint(tmp_path / "model", CONFIG, listed(arrays))
    assert_same(open_checkpoint(tmp_path / "model"), arrays)


def test_an_array_that_was_read_is_the_callers_own(tmp_path):
    save_checkpoint(tmp_path / "model", CONFIG, listed({"a": np.ones(3)}))
    checkpoint = open_checkpoint(tmp_path / "model")
    checkpoint.read("a")[:] = 2
    np.testing.assert_array_equal(checkpoint.read("a"), np.ones(3))


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    arrays = some_arrays()
    save_checkpoint(tmp_path / "model", CONFIG, listed(arrays))
    with safe_open(tmp_path / "model" / weights.SINGLE, "np", backend="pread") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            assert file.get_tensor(name).tobytes() == array.tobytes(), name
            assert (
                file.get_tensor(name).dtype == array.dtype
                and file.get_tensor(name).shape == array.shape
            )


def test_weights_may_be_read_by_whom_every_new_file_may(tmp_path):
    """The package alone writes a file that only its owner may read."""
    weights.write_file(tmp_path / "model.safetensors", {"a": lambda: np.ones(2)})
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_we_read_what_the_safetensors_package_writes(tmp_path):
    arrays = {name: np.ascontiguousarray(array) for name, array in some_arrays().items()}
    arrays = {
        name: array.reshape(()) if "scalar" in name else array for name, array in arrays.items()
    }
    save_file(arrays, tmp_path / weights.SINGLE, {"format": "pt", "any": "text"})
    (tmp_path / "config.json").write_text("{}")
    assert_same(open_checkpoint(tmp_path), arrays)


def test_the_layout_of_the_hubs_cache(tmp_path):
    """There each file of a snapshot is a link to ../../blobs."""
    save_checkpoint(tmp_path / "blobs", CONFIG, listed(some_arrays()))
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../..") / "blobs" / path.name)
    assert_same(open_checkpoint(snapshot), some_arrays())


# Damage


def tensor(dtype="F32", shape=(2,), begin=0, end=8, **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


EIGHT = b"12345678"
HEADERS = {  # file's bytes, what the answer says
    "zero size": (b"", "cut short"),
    "three bytes": (b"abc", "cut short"),
    "truncated header": (raw({"a": tensor()}, EIGHT)[:30], "cut short"),
    "truncated data": (raw({"a": tensor()}, EIGHT)[:-1], "cut short"),
    "header of 10 GB": (raw({}, length=10**10), "header too large"),
    "header of 2^64": (raw({}, length=2**64 - 1), "damaged"),
    "header of 31 MB": (raw({}, length=31_000_000), "cut short"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "damaged"),
    "header no json": (raw(b"import os  "), "JSON"),
    "header no utf-8": (raw(b'{"\xff": 1}'), "UTF-8"),
    "header a list": (raw([1]), "invalid type"),
    "header nested": (raw(b"[" * 100_000), "JSON"),
    "long integer": (raw(b'{"a":' + b"9" * 5000 + b"}"), "JSON"),
    "half a surrogate": (raw(b'{"\\ud800":{}}'), "JSON"),
    "beyond the file": (raw({"a": tensor(shape=[4], end=16)}, EIGHT), "cut short"),
    "overlap": (
        raw({"a": tensor(), "b": tensor(begin=4, end=12)}, EIGHT + b"1234"),
        "invalid offset for tensor `b`",
    ),
    "same bytes twice": (raw({"a": tensor(), "b": tensor()}, EIGHT), "invalid offset"),
    "hole": (
        raw({"a": tensor(), "b": tensor(begin=12, end=20)}, EIGHT * 3),
        "invalid offset for tensor `b`",
    ),
    "hole at the start": (raw({"a": tensor(begin=4, end=12)}, EIGHT + b"1234"), "invalid offset"),
    "too long": (raw({"a": tensor()}, EIGHT + b"#!/bin/sh"), "not fully covered"),
    "begin after end": (raw({"a": tensor(begin=8, end=0)}, EIGHT), "invalid offset for tensor `a`"),
    "negative begin": (raw({"a": tensor(begin=-8, end=0)}, EIGHT), "integer `-8`"),
    "size is not shape": (raw({"a": tensor(shape=[3])}, EIGHT), "invalid shape"),
    "size is not dtype": (raw({"a": tensor("F16")}, EIGHT), "invalid shape"),
    "unknown dtype": (raw({"a": tensor("F4", [16])}, EIGHT), "F4; we read .*BF16"),
    "no dtype": (raw({"a": tensor([])}, EIGHT), "invalid type"),
    "shape overflows": (raw({"a": tensor(shape=[2**32, 2**32], end=0)}), "overflow"),
    "shape wraps to its size": (
        raw({"a": tensor(shape=[2**62 + 1, 4, 1], end=16)}, EIGHT * 2),
        "overflow",
    ),
    "empty shape overflows": (raw({"a": tensor(shape=[2**62, 2**62, 0], end=0)}), "overflow"),
    "negative axis": (raw({"a": tensor(shape=[-2])}, EIGHT), "integer `-2`"),
    "axis 2.0": (raw({"a": tensor(shape=[2.0])}, EIGHT), "floating point `2.0`"),
    "axis true": (raw({"a": tensor(shape=[True, 2])}, EIGHT), "boolean `true`"),
    "shape a text": (raw({"a": tensor(shape="2")}, EIGHT), "expected a sequence"),
    "no shape": (raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT), "shape"),
    "three offsets": (raw({"a": tensor() | {"data_offsets": [0, 8, 8]}}, EIGHT), "invalid JSON"),
    "no offsets": (raw({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "data_offsets"),
    "tensor a number": (raw({"a": 5}, EIGHT), "integer `5`"),
    "metadata no text": (
        raw({"__metadata__": {"a": 1}, "a": tensor()}, EIGHT),
        "expected a string",
    ),
    "long name": (raw({"a" * 100_000: 5}), "integer `5`"),
    "name with lines": (raw({"a\n\x1b[2Jb": 5}), "integer `5`"),
}


def refused(folder, says, *arguments):
    with pytest.raises(ConfigError, match=says) as caught:
        open_checkpoint(folder, *arguments)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600 + 4 * len(str(folder)), message  # one line
    assert message.startswith(str(folder)), message
    return message


@pytest.fixture
def model(tmp_path):
    """A good sharded checkpoint to damage."""
    arrays = {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    save_checkpoint(tmp_path / "model", CONFIG, listed(arrays), shard_bytes=8)
    return tmp_path / "model"


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_file_is_refused(tmp_path, case):
    content, says = HEADERS[case]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / weights.SINGLE).write_bytes(content)
    assert weights.SINGLE in refused(tmp_path, says)


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_shard_is_refused(model, case):
    (model / SECOND).write_bytes(HEADERS[case][0])
    assert SECOND in refused(model, HEADERS[case][1])


def put(name, text):
    return lambda folder: (folder / name).write_text(text)


def mapped(change):
    def damage(folder):
        index = json.loads((folder / weights.INDEX).read_text())
        index["weight_map"] |= change
        (folder / weights.INDEX).write_text(json.dumps(index))

    return damage


def other_kind(name, make):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


FOLDERS = {  # what happens to a good folder, what the answer says
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "config.json: its JSON.*No such file",
    ),
    "config no json": (put("config.json", "model_type: gpt2"), "config.json: its JSON"),
    "config no utf-8": (
        lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xff"}'),
        "config.json: its JSON",
    ),
    "config a list": (put("config.json", "[]"), "config.json: expected a JSON object"),
    "config empty": (put("config.json", ""), "config.json: its JSON"),
    "config nested": (put("config.json", '{"a":' * 100_000), "config.json: its JSON"),
    "config a folder": (other_kind("config.json", Path.mkdir), "config.json: .*regular file"),
    "file a folder": (other_kind(weights.SINGLE, Path.mkdir), "model.safetensors: cannot be read"),
    "file a device": (
        other_kind(weights.SINGLE, lambda path: path.symlink_to("/dev/zero")),
        "cannot be read",
    ),
    "file a link to nothing": (
        other_kind(weights.SINGLE, lambda path: path.symlink_to("../gone")),
        "No such file",
    ),
    "file a link to itself": (
        other_kind(weights.SINGLE, lambda path: path.symlink_to(path)),
        "symbolic links",
    ),
    "index no json": (put(weights.INDEX, "{"), "index.json: its JSON"),
    "index a list": (put(weights.INDEX, "[]"), "index.json: expected a JSON object"),
    "index without a map": (put(weights.INDEX, "{}"), "no weight_map"),
    "index with a list": (put(weights.INDEX, '{"weight_map": ["a"]}'), "no weight_map"),
    "index of nothing": (put(weights.INDEX, '{"weight_map": {}}'), "no weight_map"),
    "index of a number": (mapped({"a": 1}), "missing: '1'"),
    "shard missing": (
        lambda folder: (folder / SECOND).unlink(),
        f"1 of 2 files are missing: '{SECOND}'",
    ),
    "shard above the folder": (mapped({"a": "../model/" + FIRST}), r"missing: '\.\./model"),
    "shard with a root": (mapped({"a": "/etc/x.safetensors"}), "missing: '/etc"),
    "shard below the folder": (mapped({"a": "x/y.safetensors"}), "missing: 'x/y"),
    "shard with a null byte": (mapped({"a": "x\0.safetensors"}), r"missing: 'x\\x00"),
    "shard a pickle": (mapped({"a": "pytorch_model.bin"}), "missing: 'pytorch_model.bin'"),
    "tensor in no shard": (mapped({"c": FIRST}), "lists 'c', which no file has"),
    "tensor in two shards": (
        lambda folder: shutil.copy(folder / FIRST, folder / SECOND),
        "lists 'b', which no file has",
    ),
    "a shard and no index": (
        lambda folder: (folder / weights.INDEX).unlink(),
        f"neither .*'{FIRST}'",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_damaged_folder_is_refused(model, case):
    damage, says = FOLDERS[case]
    damage(model)
    refused(model, says)


@pytest.mark.parametrize(
    "file",
    [
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "m.pt",
        "m.pth",
        "consolidated.00.pth",
    ],
)
def test_pickles_are_refused_unread(tmp_path, file):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / file)  # would hang whoever opens it
    message = refused(tmp_path, "runs whatever code")
    assert (
        file in message
        and "safe_serialization=True" in message
        and "safetensors/convert" in message
    )
    save_checkpoint(tmp_path / "good", {}, listed({"a": np.ones(2)}))
    shutil.copy(tmp_path / "good" / weights.SINGLE, tmp_path)
    assert set(open_checkpoint(tmp_path).names) == {"a"}  # beside safetensors they do not matter


def test_what_is_no_folder(tmp_path, monkeypatch):
    refused(tmp_path / "gone", "not a folder of weights.*No such file")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "Not a directory")
    refused(tmp_path / "file" / "below", "Not a directory")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("./gone", "../gone", "~/gone", str(tmp_path / "gone")):
        with pytest.raises(ConfigError, match="not a folder of weights"):
            open_checkpoint(path)
    save_checkpoint("model", CONFIG, listed({"a": np.ones(2)}))
    assert set(open_checkpoint("model").names) == set(open_checkpoint("~/model").names) == {"a"}
    refused(tmp_path / "model", "no revision 'main'", "main")


@pytest.mark.parametrize("what", ["", "config.json", weights.INDEX, SECOND])
def test_what_may_not_be_read(what):
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    user = os.geteuid()
    try:
        folder.chmod(0o755)
        save_checkpoint(
            folder / "model", CONFIG, listed({"a": np.ones(2), "b": np.ones(2)}), shard_bytes=16
        )
        (folder / "model" / what).chmod(0)
        os.seteuid(user or 65534)  # root may read everything
        refused(folder / "model", "Permission denied")
    finally:
        os.seteuid(user)
        (folder / "model").chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_and_missing_bytes(tmp_path, seed):
    """300 damaged files: refused, or exactly what the safetensors package sees. (A changed letter
    of a name is valid.)"""
    rng = np.random.default_rng(seed)
    arrays = {
        name: array
        for name, array in some_arrays(rng).items()
        if "matrix" in name or "scalar" in name
    }
    save_checkpoint(tmp_path, CONFIG, listed(arrays))
    path = tmp_path / weights.SINGLE
    good = path.read_bytes()
    accepted = 0
    for _ in range(100):
        bad = bytearray(good)
        for place in rng.integers(0, len(good), rng.integers(1, 4)):
            bad[place] = (
                rng.integers(256) if rng.random() < 0.5 else bad[place] ^ (1 << rng.integers(8))
            )
        path.write_bytes(bad[: rng.integers(len(bad))] if rng.random() < 0.2 else bad)
        try:
            names = open_checkpoint(tmp_path).names
        except ConfigError as error:
            assert str(error).isprintable()
            continue
        accepted += 1
        with safe_open(path, "np", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            assert names == {
                name: (tuple(part.get_shape()), DTYPES[part.get_dtype()].name)
                for name, part in slices.items()
            }
    assert 5 < accepted < 95  # both ends are met


def test_a_file_that_changes_once_it_is_open(tmp_path):
    save_checkpoint(tmp_path / "model", CONFIG, listed({"a": np.ones(2), "b": np.ones(2)}))
    checkpoint = open_checkpoint(tmp_path / "model")
    os.truncate(
        tmp_path / "model" / weights.SINGLE,
        os.path.getsize(tmp_path / "model" / weights.SINGLE) - 1,
    )
    assert checkpoint.read("a").sum() == 2
    with pytest.raises((OSError, SafetensorError, ValueError)):
        checkpoint.read("b")
    (tmp_path / "model" / weights.SINGLE).unlink()
    assert checkpoint.read("a").sum() == 2  # the file is held open


def test_values_that_are_not_finite():
    for dtype in DTYPES.values():
        good = np.zeros((300, 200), dtype)
        check_finite("w", good)
        check_finite("w", good[:0])
        check_finite("w", good[0, 0, ...])
        if dtype.kind not in "biu":
            good[7, 5] = good[299, 199] = np.nan
            for array in (good, good.T, good[::-1]):
                with pytest.raises(ConfigError, match=r"^tensor 'w': 2 of 60,000 values are NaN"):
                    check_finite("w", array)
    for bad in (np.inf, -np.inf):
        with pytest.raises(ConfigError, match="1 of 1 values"):
            check_finite("w", np.array(bad, np.float16))
    check_finite("w", np.full(9, np.finfo(np.float32).max, np.float32))


# Writing


def test_what_is_in_the_way_stays(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file", "full/thesis.tex/model"):
        with pytest.raises(ConfigError, match=f"^{tmp_path / name}: "):
            save_checkpoint(tmp_path / name, CONFIG, listed({"a": np.ones(2)}))
    with pytest.raises(ConfigError, match=r"^/: exists and is not an empty folder"):
        save_checkpoint("/", CONFIG, [])
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "empty",
        "file",
        "full",
        "thesis.tex",
    ]
    save_checkpoint(tmp_path / "empty", CONFIG, listed({"a": np.ones(2)}))
    assert open_checkpoint(tmp_path / "empty").config == CONFIG
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "full").stat().st_mode
    )


def test_a_save_that_fails_leaves_nothing(tmp_path):
    ones = np.ones(2, np.float32)

    def fails(config=CONFIG, tensors=(), error: type[Exception] = ValueError, match="."):
        with pytest.raises(error, match=match):
            save_checkpoint(
                tmp_path / "model", config, [("a", (2,), "float32", lambda: ones), *tensors]
            )
        assert not list(tmp_path.iterdir())

    complexes = ("b", (2,), "complex128", lambda: ones.astype(complex))
    fails(tensors=[complexes], error=ConfigError, match=r"model: not saved .*complex128")
    fails(tensors=[("b", (2,), "float32", lambda: ones / {}["x"])], error=KeyError)
    fails(config={"a": object()}, error=TypeError)


CHILD = """
import sys, numpy as np, os, signal
from jaxformer.interop.safetensors import *


def peak():
    return (
        next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
        << 10
    )


folder, before = sys.argv[1], peak()
"""


def child(code, *arguments):
    command = [sys.executable, "-c", CHILD + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_save_that_finds_no_room_leaves_nothing(tmp_path):
    """A limit on the size of files: a write fails, as on a full disk."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try: save_checkpoint(folder, {}, [("a", (99,), "float32", lambda: np.ones(99, np.float32))])
except ConfigError as error: print(error)
"""
    message = child(code, tmp_path / "model").stdout
    assert message.startswith(f"{tmp_path / 'model'}: not saved (") and "make room" in message
    assert not list(tmp_path.iterdir())


def test_a_killed_save_leaves_no_folder_and_the_next_one_tidies_up(tmp_path):
    code = """
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(
    folder,
    {},
    [("a", (2,), "float32", lambda: np.ones(2, np.float32)), ("b", (2,), "float32", die)],
    8,
)
"""
    assert child(code, tmp_path / "model").returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["model.unfinished"]
    refused(tmp_path / "model", "not a folder of weights")
    save_checkpoint(tmp_path / "model", CONFIG, listed({"a": np.ones(2)}))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert set(open_checkpoint(tmp_path / "model").names) == {"a"}


# Memory


def grown(code, *arguments):
    """By how many bytes the peak of a fresh process grew."""
    done = child(code + "\nprint(peak() - before)", *arguments)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_one_file_is_in_memory_at_a_time(tmp_path):
    """200 MB in tensors of 34 and 64 MB (glibc gives pieces above 32 MB back at once), written as
    transposes."""
    write = """
tensor = lambda i, n: (f"{i}", (n, 500), "float32", lambda: np.full((500, n), i, np.float32).T)
save_checkpoint(
    folder,
    {},
    [tensor(i, n) for i, n in enumerate([17_000, 32_000, 17_000, 17_000, 17_000])],
    70_000_000,
)
"""
    read = """
checkpoint = open_checkpoint(folder)
assert len(checkpoint.names) == 5
for name in checkpoint.names:
    array = checkpoint.read(name)
    assert array.sum(dtype=np.float64) == int(name) * array.size
    check_finite(name, array)
    del array
"""
    # beside the tensors of a file: a transpose, one byte for each number that is finite, and what
    # the allocator keeps
    assert grown(write, tmp_path / "model") < 2 * 68e6 + 12e6
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) == 4 and 199e6 < sum(file.stat().st_size for file in files) < 201e6
    assert (
        grown(read.replace("    check_finite(name, array)\n", ""), tmp_path / "model") < 1.2 * 64e6
    )
    assert grown(read, tmp_path / "model") < 1.25 * 64e6 + 12e6


@pytest.mark.parametrize("case", ["header of 10 GB", "header of 2^64", "header of 31 MB", "shape"])
def test_a_lie_about_a_size_costs_no_memory(tmp_path, case):
    (tmp_path / "config.json").write_text("{}")
    lie = raw({"a": tensor(shape=[10**10], end=4 * 10**10)}) if case == "shape" else raw({})
    (tmp_path / weights.SINGLE).write_bytes(HEADERS[case][0] if case in HEADERS else lie)
    if case != "shape":
        os.truncate(tmp_path / weights.SINGLE, 20_000_000)  # so that something is there to be read
    code = """
try: open_checkpoint(folder)
except ConfigError: pass
else: raise AssertionError
"""
    assert grown(code, tmp_path) < 35e6


# The hub


@pytest.fixture
def hub(monkeypatch):
    """What `snapshot_download` answers: set `hub.answer` to a folder or an exception."""
    errors = pytest.importorskip("huggingface_hub.errors")

    class Hub:
        asked = answer = errors = None

    def snapshot_download(name, **options):
        Hub.asked = name, options
        if isinstance(Hub.answer, Exception):
            raise Hub.answer
        return str(Hub.answer)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    Hub.errors = errors
    return Hub


def test_a_name_is_asked_of_the_hub(hub, model):
    hub.answer = model
    checkpoint = open_checkpoint("org/name", revision="v1.0")
    assert checkpoint.folder == model and set(checkpoint.names) == {"a", "b"}
    name, options = hub.asked
    assert name == "org/name" and options["revision"] == "v1.0"
    assert options["allow_patterns"] == ["*.json", "*.safetensors"]


@pytest.mark.parametrize(
    "kind",
    [
        "GatedRepoError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "HFValidationError",
        "LocalEntryNotFoundError",
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, kind):
    error = getattr(hub.errors, kind)
    hub.answer = error.__new__(error)  # some want a response of the server
    Exception.__init__(hub.answer, "it said no\nand more\n" * 50)
    message = refused("org/name", "hf auth login", "main")
    assert kind in message and "it said no" in message and "and more" not in message


def test_without_the_hubs_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("org/name", r"pip install 'jaxformer\[interop\]'")


def test_importing_needs_no_hub_and_no_framework():
    done = child("print({'huggingface_hub', 'jax', 'torch'} & set(sys.modules))", "")
    assert done.stdout.strip() == "set()", done.stderr
