"""A run whose folder is a URL: every file goes through epath to the bucket (here: in memory), none
to a folder `gs:`."""

import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem
from jax.experimental.compilation_cache import compilation_cache

import jaxformer
from jaxformer import cli
from jaxformer.errors import ConfigError
from jaxformer.runs import checkpoint, checkpoint_reader
from jaxformer.runs.checkpoint import CheckpointError, Manager
from jaxformer.runs.checkpoint_reader import restore_params
from jaxformer.runs.metrics import Record
from jaxformer.tools.analysis import report
from jaxformer.tools.analysis.report import run_report
from tests.tiny import furnish


class Files(MemoryFileSystem):
    """Names as those of gcsfs: without a protocol, and without a root."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://"))

    def makedirs(self, path, **_):
        """A bucket has no folders, only names of objects."""

    mkdir = makedirs

    def glob(self, path, **options):
        return [name.lstrip("/") for name in super().glob(path, **options)]


class Bucket:
    """Stands for orbax's manager, whose array writer needs the real bucket: only what makes a step
    complete is a file."""

    saved: ClassVar[dict] = {}

    def __init__(self, directory, options, item_handlers):
        self.directory, self.options = directory, options

    def all_steps(self):
        return checkpoint.steps(self.directory)

    def save(self, step, *, args, custom_metadata, force):
        folder = self.directory / str(step)
        folder.mkdir(parents=True)
        (folder / "commit_success.txt").write_text("done")
        (folder / "_CHECKPOINT_METADATA").write_text(
            json.dumps({"custom_metadata": custom_metadata})
        )
        # the step's state is donated to the next step
        self.saved[str(folder)] = jax.tree.map(jnp.copy, args.state.item)

    reload = wait_until_finished = close = lambda self: None


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    files = Files()
    monkeypatch.setattr(
        "orbax.checkpoint._src.path.gcs_utils.is_hierarchical_namespace_enabled", lambda path: False
    )
    monkeypatch.setattr(
        type(epath.backend.fsspec_backend), "_get_filesystem", lambda self, name: files
    )
    monkeypatch.setattr(checkpoint.orbax, "CheckpointManager", Bucket)
    monkeypatch.setattr(Bucket, "saved", {})
    monkeypatch.chdir(tmp_path)
    cache = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", cache)  # not this bucket's, for other tests
    compilation_cache.reset_cache()
    files.rm("/", recursive=True)


@pytest.fixture
def arrays(monkeypatch):
    """What orbax would read from the bucket."""
    monkeypatch.setattr(
        checkpoint_reader.ocp,
        "load",
        lambda path, names: {n: Bucket.saved[str(path)][n] for n in names},
    )


@pytest.mark.thorough
def test_a_run_lives_in_a_bucket(bucket, arrays, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "run_report", run_report)
    furnish(tmp_path)
    runs = "gs://bucket/runs"
    assert cli.main(["train", "tiny", "--runs", runs]) == 0
    (folder,) = epath.Path(runs).glob("tiny-*")
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "experiment.py",
        "metrics.jsonl",
        "samples",
        "figures",
        "result.json",
        "checkpoints",
    } <= names
    assert "<h2>Attention</h2>" in (folder / "report.html").read_text()
    assert (folder / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = (folder / "metrics.jsonl").read_text()
    assert [line["step"] for line in map(json.loads, record.splitlines()) if "loss" in line] == [
        0,
        2,
        4,
        5,
    ]
    capsys.readouterr()

    # killed after step 4: what step 6 wrote is gone, and the run goes on as if it had not been
    for step in ("5", "6"):
        (folder / "checkpoints" / step).rmtree()
    (folder / "metrics.jsonl").write_text(record[: record.rindex('{"step": 4')])
    assert cli.main(["train", "tiny", f"--runs={runs}"]) == 0
    assert (
        "resuming after step 4" in capsys.readouterr().out
        and (folder / "metrics.jsonl").read_text() == record
    )

    assert cli.main(["evaluate", "tiny", f"--runs={runs}"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
    assert cli.main(["generate", str(folder), "--prompt=the ", "--tokens=4"]) == 0
    assert cli.main(["runs", f"--runs={runs}"]) == 0
    assert f"{folder}  6/6 steps, validation_loss" in capsys.readouterr().out
    assert len(jaxformer.open_run(str(folder)).metrics) == len(record.splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experiments", "text.txt"]


def test_checkpoints_of_a_bucket(bucket, tmp_path):
    state = lambda step: {"a": jnp.arange(4.0) + step}
    abstract = jax.eval_shape(lambda: state(0))
    folder = "gs://bucket/runs/a/checkpoints"
    log = []
    with Manager(folder, log=log.append) as manager:
        assert not log and str(manager.folder) == folder and manager.restore(abstract) is None
        for step in (1, 2, 3):
            manager.save(step, state(step), wait=True)
        (epath.Path(folder) / "9" / "array").write_text("")  # begun and not complete
        assert manager.steps() == checkpoint.steps(folder) == [1, 2, 3]
        with pytest.raises(
            CheckpointError, match="gs://bucket/runs/a/checkpoints: every checkpoint is damaged"
        ):
            manager.restore(abstract)  # there are no arrays in this bucket
    with pytest.raises(CheckpointError, match="gs://bucket/runs/b: no checkpoint there"):
        restore_params("gs://bucket/runs/b", abstract)
    assert list(tmp_path.iterdir()) == []


def test_a_record_in_a_bucket_is_whole_before_each_checkpoint(bucket):
    path = "gs://bucket/runs/a/metrics.jsonl"
    Record(path).close()  # of a start that failed
    assert not epath.Path(path).exists()
    record = Record(path)
    for step in range(3):
        record.write(step, {"loss": 1.0})
    record.save()
    record.write(3, {"loss": 1.0})
    assert [line["step"] for line in Record(path).lines] == [0, 1, 2]
    record.close()
    assert [line["step"] for line in Record(path).lines] == [0, 1, 2, 3]


def test_a_url_whose_packages_are_missing_gets_one_line(monkeypatch):
    def missing(*_):
        raise ImportError("No module named 'gcsfs'")

    monkeypatch.setattr(type(epath.backend.fsspec_backend), "_get_filesystem", missing)
    for read in (
        Manager,
        lambda folder: restore_params(folder, {"a": jax.ShapeDtypeStruct((), "float32")}),
    ):
        with pytest.raises(
            ConfigError,
            match=r"gs://bucket/a: No module named 'gcsfs'; gs:// needs `.*pip install 'jaxf",
        ):
            read("gs://bucket/a")


@pytest.mark.parametrize("url", ["s3://bucket/runs", "az://bucket/runs"])
def test_a_bucket_that_takes_no_checkpoints_is_refused_before_training(
    url, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    assert cli.main(["train", "tiny", "--runs", url]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith(
            f"{url}: checkpoints go to folders and to gs://; mount the bucket of "
            f"{url[:2]}:// and give its folder"
        )
    )
    with pytest.raises(ConfigError, match="mount the bucket"):
        Manager(url)
