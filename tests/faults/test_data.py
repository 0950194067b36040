"""Row 9: a source that raises, is slow or is killed; files that are none.

The error names the record, and nothing hangs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.harness import LONG, ROOT, Process, Training, assert_same, resumed_after
from tests.tiny import EXPERIMENT

OPTIONS = ("--steps=30", "--log-every=1", "--eval-every=30", "--checkpoints.every=10")
# A user's own source. What is wrong with it is written in a file, so that the experiment is always
# the same.
OWN = """
import dataclasses, pathlib, time
import numpy as np
from jaxformer.data.sources import Dataset
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.training import Checkpoints, Experiment, Sample


class Examples:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        example = {"tokens": np.arange(index, index + 9, dtype=np.int32)}
        if index == 13 and pathlib.Path("fault").exists():
            exec(pathlib.Path("fault").read_text(), globals(), example)
        tokens = example["tokens"]
        return {"tokens": tokens[:-1], "labels": tokens[1:], "weights": np.ones(8, np.float32)}


@dataclasses.dataclass(frozen=True)
class Own:
    def open(self, model):
        return Dataset(Examples(), [Examples()[i] for i in range(4)], digest="own", vocab_size=64)


experiment = Experiment(
    name="tiny",
    model=ModelConfig(vocab_size=64, num_layers=1, d_model=16, num_heads=2, context_length=8),
    data=Own(),
    steps=30,
    batch_size=4,
    checkpoints=Checkpoints(every=10),
    sample=Sample(prompt=None),
)
"""
FAULTS = {  # what the source does, the exit code, what the last line says
    "an exception": ('raise KeyError("text")', 1, "example 13: KeyError: 'text'"),
    "a mistake of the user": (
        'raise ConfigError("shard-7.bin: damaged")',
        2,
        "example 13: shard-7.bin: damaged",
    ),
    "the end of the program": ("raise SystemExit(0)", 1, "SystemExit: 0"),
    "an example of another shape": (
        "tokens = tokens[:5]",
        1,
        "all input arrays must have the same shape",
    ),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed"), *OPTIONS, experiment=OWN)
    training.finish()
    return training.ending()


@pytest.mark.fault
def test_a_source_that_raises_names_the_step_and_the_example(tmp_path, undisturbed, report):
    """One run meets one fault after the other, and is at last as one that met none."""
    training = Training(tmp_path, *OPTIONS, experiment=OWN)
    for fault, (code, exit_code, words) in FAULTS.items():
        (tmp_path / "fault").write_text(code)
        said = training.finish(code=exit_code)
        last = said.strip().splitlines()[-1]
        assert "the batch of step" in last and words in last, (fault, last)
        assert (
            "Traceback" not in said
            if exit_code == 2
            else "in __getitem__" in said or "same shape" in said
        )
    (tmp_path / "fault").write_text("time.sleep(0.5)")  # slow: no fault at all
    training.finish()
    assert_same(training.ending(), undisturbed)
    report(
        9,
        "a source that raises",
        trials=len(FAULTS),
        detected=len(FAULTS),
        recovered=len(FAULTS),
        note="names the example",
    )
    report(9, "a slow source", trials=1, detected=1, recovered=1, note="no difference")


DOCUMENTS = [f"document {i}\n" + "words and more words\n" * (i % 5) for i in range(60)]
ENCODE = """
import sys
from types import SimpleNamespace
from jaxformer.data import corpus, text_files
from jaxformer.errors import ConfigError

text_files.PART = 1 << 21
try:
    print(
        corpus.Corpus(sys.argv[1], cache=sys.argv[2], jobs=2)
        .open(SimpleNamespace(context_length=8))
        .digest
    )
except ConfigError as error:
    print("refused:", error)
    raise SystemExit(2)
"""


def children(pid: int) -> list[int]:
    """Of the processes that a process has started, those that still run."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def encoding(tmp_path: Path, name: str, cache: Path) -> Process:
    return Process(
        [sys.executable, "-c", ENCODE, str(tmp_path / "a.jsonl"), str(cache)],
        tmp_path,
        tmp_path / name,
    )


@pytest.mark.fault
def test_encoding_survives_the_death_of_its_workers_and_its_own(tmp_path, report):
    """And two commands that encode the same corpus at once come to the same tokens, as those of one
    that nobody disturbed."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "a.jsonl").write_text(rows * 6000)
    with encoding(tmp_path, "whole", tmp_path / "cache-1") as process:
        assert process.end() == 0
        whole = process.said().split()[-1]
    cache, kills = tmp_path / "cache-2", 0
    for victim in ("worker", "command", "worker", "command"):
        with encoding(tmp_path, f"killed-{kills}", cache) as process:
            end, finished = time.monotonic() + LONG, len(list(cache.glob("*/0*.json")))
            # it has begun
            while len(list(cache.glob("*/0*.json"))) == finished and time.monotonic() < end:
                time.sleep(0.005)
            while not (workers := children(process.process.pid)) and process.running:
                time.sleep(0.001)
            if not process.running:
                break
            os.kill(workers[0] if victim == "worker" else process.process.pid, signal.SIGKILL)
            code = process.end()
            if victim == "worker" and code == 2:
                assert (
                    "was killed by SIGKILL; finished parts are kept, the same command goes on"
                    in process.said()
                )
            kills += 1
    assert kills >= 2
    with encoding(tmp_path, "one", cache) as one, encoding(tmp_path, "two", cache) as two:
        assert (one.end(), two.end()) == (0, 0)
        assert one.said().split()[-1] == two.said().split()[-1] == whole
    assert not list(cache.glob("*/*.unfinished"))
    report(
        9,
        "an encoding process or its command killed",
        trials=kills,
        detected=kills,
        recovered=kills,
        note="tokens equal",
    )


READERS = """
import os, resource, sys
from types import SimpleNamespace
from jaxformer.data.corpus import Corpus
from jaxformer.data.images import Images
from jaxformer.data.labelled import Labelled
from jaxformer.data.pairs import Pairs
from jaxformer.data.sources import Text
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # to read /dev/zero fails soon
text = ModelConfig(vocab_size=256, num_layers=1, d_model=16, num_heads=2, context_length=8)
image = SimpleNamespace(heads=(Classification(3),))
labels = SimpleNamespace(context_length=8, heads=(Classification(3),))
folder = sys.argv[1]
cases = {}
for name in sorted(os.listdir(folder)):
    path, cache = f"{folder}/{name}", f"{folder}/../cache"
    if name.endswith((".txt", ".gz")):
        cases[f"Text {name}"] = Text(path), text
        cases[f"Corpus {name}"] = Corpus(path, cache=cache), text
    if name.endswith((".jsonl", ".parquet", ".json")):
        cases[f"Corpus {name}"] = Corpus(path, cache=cache), text
        cases[f"Pairs {name}"] = Pairs(path, path, tokenizer="bytes", vocab_size=None), text
        cases[f"Labelled {name}"] = Labelled(path, path), labels
    if name.endswith(".de"):
        cases[f"Pairs {name}"] = Pairs(path[:-3], path[:-3], "de", "en", "bytes", None), text
    if name.endswith(".npz"):
        cases[f"Images {name}"] = Images(path, path), image
    if os.path.isdir(f"{path}/class"):
        cases[f"Images {name}"] = Images(path, path), image
for name, (data, model) in cases.items():
    try:
        data.open(model)
        print(name, "| opened", flush=True)
    except ConfigError as error:
        print(name, "|", error, flush=True)
"""


@pytest.mark.thorough
def test_no_reader_waits_for_a_fifo_or_reads_a_device_without_an_end(tmp_path, report):
    folder = tmp_path / "data"
    folder.mkdir()
    made = 0
    for ending in ("txt", "txt.gz", "jsonl", "jsonl.gz", "parquet", "npz", "de"):
        for kind in ("fifo", "zero", "folder"):
            path = folder / f"{kind}.{ending}"
            {
                "fifo": os.mkfifo,
                "zero": lambda path: path.symlink_to("/dev/zero"),
                "folder": os.mkdir,
            }[kind](path)
            made += 1
    for kind in ("fifo", "zero"):  # as a picture of a class
        path = folder / f"pictures-{kind}" / "class" / "a.png"
        path.parent.mkdir(parents=True)
        os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    command = [sys.executable, "-c", READERS, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    bad = [line for line in lines if "no regular file" not in line and "no file in" not in line]
    # a folder may be a corpus; without files it is none
    assert not [line for line in bad if "folder." not in line], bad
    assert not [line for line in bad if "opened" in line], bad
    assert len(lines) >= made, lines
    report(
        9,
        "FIFO, device or folder as data",
        trials=len(lines),
        detected=len(lines),
        recovered=len(lines),
        note="every reader",
    )


CONTENTS = {
    "nothing": b"",
    "one end of line": b"\n",
    "not UTF-8": b"good\n\xff\xfe\n",
    "UTF-16": "good\n".encode("utf-16"),
    "zeros": bytes(4096),
    "deep": b"[" * 100_000,
    "a long number": b'{"text": ' + b"9" * 10_000 + b"}\n",
    "a lone surrogate": (
        b'{"text": "\\ud800 and more text", "label": 0, "source": "\\ud800", "target": "\\udfff"}\n'
    )
    * 5,
    "no object": b'[1]\n2\nnull\n"text"\n',
    "other types": b'{"text": {"a": 1}, "label": [], "source": 1, "target": {}}\n' * 9,
    "half a gzip": b"\x1f\x8b\x08\x00\x00",
    "half a zip": b"PK\x03\x04" + bytes(20),
    "half a Parquet": b"PAR1" + bytes(8),
    "a bare carriage return": b"a\rb\rc\r" * 20,
}


@pytest.mark.thorough
def test_every_reader_opens_or_refuses_any_content_in_one_line(tmp_path, report):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in CONTENTS.items():
        for ending in ("txt", "txt.gz", "jsonl", "json", "jsonl.gz", "parquet", "npz", "de", "en"):
            (folder / f"{name}.{ending}").write_bytes(content)
        (folder / name / "class").mkdir(parents=True)
        (folder / name / "class" / "a.png").write_bytes(content)
    command = [sys.executable, "-c", READERS, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
    # all else than a ConfigError would have ended it
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert len(lines) >= 13 * len(CONTENTS) and all(" | " in line for line in lines), lines
    report(
        9,
        "damaged or odd content",
        trials=len(lines),
        detected=len(lines),
        recovered=len(lines),
        note="every reader",
    )


SHORTENED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from jaxformer.data.sources import Text
dataset = Text("text.txt", "bpe", 300, cache="cache").open(SimpleNamespace(context_length=8))
whole = np.array(dataset.train.tokens[:])
dataset = Text("text.txt", "bpe", 300, cache="cache").open(SimpleNamespace(context_length=8))
for file in Path("cache").rglob("*"):
    if file.is_file():
        os.truncate(file, 0)
assert (dataset.train.tokens[:] == whole).all()
print("read")
"""


@pytest.mark.thorough
def test_a_cache_file_that_is_shortened_under_a_reader_kills_nobody(tmp_path, report):
    """A mapped file would: SIGBUS ends a process without a word."""
    (tmp_path / "text.txt").write_text("".join(DOCUMENTS) * 40)
    with Process([sys.executable, "-c", SHORTENED], tmp_path, tmp_path / "output") as process:
        assert process.end() == 0 and "read" in process.said(), process.said()
    report(
        9,
        "a token file shortened under a live run",
        trials=1,
        detected=1,
        recovered=1,
        note="no SIGBUS: nothing is mapped",
    )


@pytest.mark.fault
def test_skipped_rows_are_counted_in_what_a_run_prints(tmp_path, report):
    rows = [json.dumps({"text": text}) for text in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text(
        "\n".join([*rows[:20], "{", *rows[20:40], '{"text": 3}', *rows[40:]])
    )
    corpus = 'Corpus(path="../a.jsonl", cache="cache", validation_fraction=0.2)'
    experiment = EXPERIMENT.replace("sources import Text", "corpus import Corpus").replace(
        'Text(path="text.txt")', corpus
    )
    training = Training(tmp_path / "run", "--steps=4", experiment=experiment)
    refused = training.finish(code=2)
    assert (
        refused.strip().splitlines()[-1].startswith("jaxformer: ../a.jsonl:21: not JSON")
        and "Traceback" not in refused
    )
    said = training.finish("--data.bad-rows=skip")
    assert (
        "2 rows skipped: 1 not JSON (first ../a.jsonl:21" in said
        and "1 'text' is no text (first ../a.jsonl:42" in said
    )
    assert resumed_after(said) == 0
    report(
        9,
        "bad rows",
        trials=2,
        detected=2,
        recovered=2,
        note="named with file and line, or counted",
    )
