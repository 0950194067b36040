"""Trials of errors that pass, many in one process: `python -m tests.faults.passing WHOLE TRIALS`,
under failing_calls.c.

WHOLE is a folder with a finished run of `tests.tiny`, in which nobody disturbed anything. A trial
takes a copy of it, lets one command meet the errors, and then trains with the same options and
without errors. A JSON line says what became of it.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from etils import epath

LAST, OLDER = 6, 4  # steps of which the finished run keeps checkpoints


@dataclass(frozen=True)
class Trial:
    """What one command meets: `calls` on paths with `path` fail with the error `number`."""

    command: str  # train, evaluate, report, runs
    calls: str  # as in FAIL_CALLS
    number: int
    path: str = "/runs/"
    state: str = "half"  # "new": no run yet, "half": stopped after step 4, "finished"
    first: int = 1  # the first call that fails
    count: int = 0  # so many fail; 0: all, as long as the command lasts

    def environment(self) -> dict[str, str]:
        """For failing_calls.c."""
        return {
            "FAIL_ERRNO": str(self.number),
            "FAIL_PATH": self.path,
            "FAIL_FROM": str(self.first),
            "FAIL_COUNT": str(self.count),
            "FAIL_CALLS": self.calls,
        }


def run_of(folder: Path) -> Path:
    """The only run below a folder."""
    (found,) = (
        path
        for path in (folder / "runs").iterdir()
        if path.name.startswith("tiny-") and path.is_dir()
    )
    return found


def ending(run: Path) -> tuple[int, dict[str, str], list[dict]]:
    """What a run left: its last step, the fingerprints of its state, its record."""
    from jaxformer.runs import checkpoint, checkpoint_reader

    step = checkpoint.steps(run / "checkpoints")[-1]
    leaves = checkpoint_reader.read_manifest(epath.Path(run / "checkpoints" / str(step)))["leaves"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return (
        step,
        {name: leaf["fingerprint"] for name, leaf in leaves.items()},
        [json.loads(line) for line in lines],
    )


def prepare(whole: Path, folder: Path, state: str) -> None:
    """A copy of the finished run, set back to the state in which a trial begins."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if state == "new":
        shutil.rmtree(folder / "runs")
        (folder / "runs").mkdir()
    elif state == "half":
        run = run_of(folder)
        shutil.rmtree(run / "checkpoints" / str(LAST))
        (run / "result.json").unlink()


def command(arguments: list[str], environment: dict[str, str]) -> tuple[int | str, str]:
    """(exit code, what it said). An exception that would be a traceback is its name."""
    from jaxformer import cli

    logging.getLogger().handlers.clear()  # they hold the output of the command before
    said = io.StringIO()
    calls = environment.pop("FAIL_CALLS", None)
    os.environ.update(environment)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if calls is not None:
            os.environ["FAIL_CALLS"] = calls
        try:
            code: int | str = cli.main(arguments)
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
        finally:
            os.environ.pop("FAIL_CALLS", None)
    return code, said.getvalue()


def attempt(trial: Trial, whole: Path, folder: Path) -> dict:
    """What became of one trial."""
    prepare(whole, folder, trial.state)
    os.chdir(folder)
    log = folder / "calls"
    arguments = {
        "train": ["train", "tiny", "--runs", "runs"],
        "runs": ["runs", "--runs", "runs"],
    }.get(trial.command) or [trial.command, f"runs/{run_of(folder).name}"]
    began = time.monotonic()
    code, said = command(arguments, trial.environment() | {"FAIL_LOG": str(log)})
    seconds = time.monotonic() - began
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if "corrupt" in path.name]
    hits = len(log.read_text().splitlines()) if log.exists() else 0
    healthy, then = command(["train", "tiny", "--runs", "runs"], {})
    is_same = healthy == 0 and ending(run_of(folder)) == ending(run_of(whole))
    left = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.endswith((".unfinished", "-tmp"))
    ]
    return asdict(trial) | {
        "code": code,
        "said": said[-1500:],
        "hits": hits,
        "renamed": names,
        "healthy": healthy,
        "then": then[-1500:],
        "same": is_same,
        "left": left,
        "seconds": round(seconds, 1),
    }


def main(whole: str, trials: str) -> None:
    """Trains the run in WHOLE if it is not there, and makes the trials; QUICK=1 in the environment
    shortens the waits."""
    from jaxformer.config import storage

    if os.environ.get("QUICK"):
        storage.WAITS = 0.01, 0.01, 0.01
        storage.retry.__defaults__ = (storage.WAITS,)
    folder = Path(whole).parent / "trial"
    if not Path(whole, "runs").exists():
        os.chdir(whole)
        code, said = command(["train", "tiny", "--runs", "runs"], {})
        assert code == 0, said
    for line in json.loads(Path(trials).read_text()):
        print(json.dumps(attempt(Trial(**line), Path(whole), folder)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
