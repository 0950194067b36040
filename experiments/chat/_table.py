"""What each stage of chat added, of the newest run of each stage.

Expected: a line a stage; the numbers are those of the four experiments.
Time: a second.
Command: make chat-all, or python -m experiments.chat._table [RUNS] after it
"""

import json
import sys

from experiments.chat._facts import ALL
from jaxformer.runs.metrics import read_records
from jaxformer.runs.run_folder import RunFolder, runs_of

STAGES = ("base", "sft", "dpo", "grpo")


def last_scores(folder: RunFolder) -> dict[str, float]:
    """The last value of each score of the record."""
    scores: dict[str, float] = {}
    for record in read_records(folder.metrics):
        scores |= {name: value for name, value in record.items() if name.startswith("validation_")}
    return scores


def minutes(folder: RunFolder) -> float:
    """The time of all starts of a run."""
    starts = json.loads(folder.goodput.read_text())["starts"]
    return sum(seconds for start in starts for seconds in start.values()) / 60


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def table(runs: str) -> str:
    lines: list[str] = [" | ".join(("stage", "minutes", "exact", *ALL, "preferred", "run"))]
    for stage in STAGES:
        found = runs_of(f"chat_{stage}", runs)
        if not found:
            lines.append(f"{stage} | no run of it in {runs}")
            continue
        folder = found[-1]
        scores = last_scores(folder)
        names = ("exact", *(f"exact_{kind}" for kind in ALL), "preferred")
        cells = [percent(scores.get(f"validation_{name}")) for name in names]
        lines.append(" | ".join((stage, f"{minutes(folder):.1f}", *cells, folder.path.name)))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1] if len(sys.argv) > 1 else "runs"))
