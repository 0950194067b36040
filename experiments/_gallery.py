"""The gallery: what each application reached, with its picture, from the runs that were made.

Each run of an application is a line, so several seeds stand below each other. Lines that the page
has already stay; a new run takes the place of the line of its seed. Where the scores have other
names, earlier lines go. The pictures are those of the newest run. Writes docs/gallery.md and
docs/pictures/.
Expected: a section for each application that ever had a run; it names those that have none now.
Time: seconds; `make gallery` trains all of them first.
Command: make gallery, or python -m experiments._gallery [RUNS] after it
"""

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from experiments.chat._table import minutes
from jaxformer.runs.run_folder import RunFolder, runs_of

ROOT = Path(__file__).parent
BOOK = ROOT.parent / "docs"


class Application(NamedTuple):
    """What the gallery shows of an experiment."""

    picture: str  # the file in its runs
    shows: str  # what a reader sees who cannot see the picture
    scores: tuple[str, ...]  # of result.json; the names of baselines say what they are


APPLICATIONS = {
    "diffuse_shapes": Application(
        "samples.png",
        "images of shapes beside their requests",
        ("right", "right_unseen", "distance", "distance_unseen"),
    ),
    "video_motion": Application(
        "videos.png",
        "a digit that moves",
        ("digit", "one_frame_digit", "direction", "one_frame_direction"),
    ),
    "answer_about_images": Application(
        "answers.png",
        "questions about coloured shapes, and where each answer looks",
        ("relational", "relational_words_alone", "not_relational", "not_relational_words_alone"),
    ),
    "vision_language": Application(
        "answers.png",
        "questions about pictures, answered in words",
        ("exact_match", "exact_match_words_alone"),
    ),
    "forecast": Application(
        "forecasts.png", "series with bands", ("mase", "mase_ar", "mase_naive", "inside")
    ),
    "molecules": Application(
        "logp.png", "molecules and their logP", ("mae", "mae_atoms", "mae_fingerprints")
    ),
    "speech_numbers": Application(
        "heard.png", "spectrograms with the words that were heard", ("wer", "wer_nearest")
    ),
    "protein_contacts": Application(
        "contacts.png",
        "contact maps beside the truth",
        ("precision", "mean_field", "mutual_information", "best"),
    ),
    "quantise_digits": Application(
        "codes.png",
        "digits, and the same digits made again from their codes and by k-means",
        ("error", "error_k_means", "read", "read_original"),
    ),
    "paint_digits": Application(
        "samples.png",
        "digits painted from their names",
        ("right", "right_unseen", "distance", "distance_unseen"),
    ),
    "detect_digits": Application("boxes.png", "boxes around digits", ("AP50", "mAP")),
    "dino_digits": Application(
        "neighbours.png",
        "digits beside their neighbours",
        ("neighbours", "neighbours_of_pixels", "linear_probe", "linear_probe_of_pixels"),
    ),
    "mae_digits": Application(
        "reconstructions.png",
        "digits restored from a quarter of their patches",
        ("linear_probe", "linear_probe_untrained", "linear_probe_of_pixels"),
    ),
}


def description(name: str) -> str:
    """What an experiment's docstring says before the results that it expects."""
    text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return re.split(r"^(?:Expected:|Needs |Time:)", text, maxsplit=1, flags=re.MULTILINE)[0].strip()


def line(folder: RunFolder, scores: tuple[str, ...]) -> str:
    """One line of a table: seed, scores, parameters and time of a run that has ended."""
    result = json.loads(folder.result.read_text())
    seed = json.loads(folder.config.read_text())["seed"]
    numbers = [f"{result['validation'][name]:.4g}" for name in scores]
    cells = [str(seed), *numbers, f"{result['parameters']:,}", f"{minutes(folder):.1f}"]
    return f"| {' | '.join(cells)} |"


def by_seed(lines: list[str]) -> dict[int, str]:
    """{seed: its line}; a later line takes the place of an earlier one."""
    return {int(one.split("|")[1]): one for one in lines}


def section(name: str, lines: list[str], earlier: str) -> str:
    """The section of an application: its picture, a table, its command.

    `earlier` is the section as it was. Its lines stay where its table has the same columns.
    """
    columns = ["seed", *(score.replace("_", " ") for score in APPLICATIONS[name].scores)]
    columns += ["parameters", "minutes"]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    _, found, below = earlier.partition("\n".join(head) + "\n")
    rows = by_seed([*(below.split("\n\n")[0].splitlines() if found else []), *lines])
    return "\n".join(
        [
            f"## {name}",
            "",
            description(name),
            "",
            f"`make train EXP={name}`",
            "",
            f"![{APPLICATIONS[name].shows}](pictures/{name}.png)",
            "",
            *head,
            *(rows[seed] for seed in sorted(rows)),
            "",
        ]
    )


def sections_of(page: Path) -> dict[str, str]:
    """{application: its section of the page}; nothing where there is no page."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    return {one.split("\n", 1)[0]: one for one in text.split("\n## ")[1:]}


def write(runs: str) -> list[str]:
    """Writes the page and its pictures. Returns the names of applications without a run."""
    page = BOOK / "gallery.md"
    (BOOK / "pictures").mkdir(exist_ok=True)
    earlier = sections_of(page)
    sections, missing = [], []
    for name, application in APPLICATIONS.items():
        folders = [each for each in runs_of(name, runs) if each.result.exists()]
        if folders:
            picture = Path(folders[-1].path) / application.picture
            shutil.copyfile(picture, BOOK / "pictures" / f"{name}.png")
        else:
            missing.append(name)
        if folders or name in earlier:
            lines = [line(folder, application.scores) for folder in folders]
            sections.append(section(name, lines, earlier.get(name, "")))
    head = (
        "# Gallery\n\nApplications of the Transformer, each one file in `experiments/`, trained on "
        "two CPU cores. `make gallery` trains all of them, and makes this page from their runs: a "
        "line is a run. Every score is that of data which training never drew. The minutes are "
        "those of a machine that did other work, too.\n\n"
    )
    page.write_text(head + "\n".join(sections), encoding="utf-8")
    return missing


if __name__ == "__main__" and sys.argv[1:] == ["--names"]:
    print(*APPLICATIONS)
elif __name__ == "__main__":
    left = write(sys.argv[1] if len(sys.argv) > 1 else "runs")
    print(f"docs/gallery.md{': no run of ' + ', '.join(left) if left else ''}")
