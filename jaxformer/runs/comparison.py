"""Whether the scores of several runs can be compared: same text, same tokenizer, same unit.

`incomparable` says why not, for `compare`, `report` and sweeps. `runs` shows for each run which
split its scores are of.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.runs.metrics import read_records
from jaxformer.runs.run_folder import RunFolder

LARGEST = 1 << 26  # bytes of a validation split that its digest reads; of more, evenly spaced ones
PIECE = 1 << 20  # tokens that are read at a time
MOST_ROWS = 1024  # examples that a digest reads: to make one may be slow
BITS_PER_BYTE = (
    "do not compare their losses; bits_per_byte can be compared, which "
    '`evaluate RUN --metrics "(StridedPerplexity(stride=64),)"` prints'
)


def digests_of(dataset: Any, folder: RunFolder) -> dict[str, str]:
    """The digests of a data set, for the environment.json of a run.

    That of all data decides whether a run may go on. Those of the validation split and of the
    tokenizer decide whether the scores of two runs can be compared. A later start of the run with
    the same data reads no example again.
    """
    known = _environment(folder)
    is_same = dataset.digest and known.get("data_digest") == dataset.digest
    validation = known.get("validation_digest") if is_same else None
    return {
        "data_digest": dataset.digest,
        "validation_digest": validation or split_digest(dataset.validation),
        "tokenizer_digest": getattr(dataset.tokenizer, "digest", ""),
    }


def split_digest(split: Any) -> str:
    """A digest of a split's contents. Empty where an example cannot be read.

    The text of a split with `tokens` has the same digest in windows of any length.
    """
    tokens = getattr(split, "tokens", None)
    found = hashlib.sha256(str(len(split if tokens is None else tokens)).encode())
    try:
        if tokens is None:
            _add_rows(found, split)
        else:
            _add_tokens(found, tokens)
    except Exception:  # the first evaluation says which example it is, and why
        return ""
    return found.hexdigest()


def _add_tokens(digest: Any, tokens: Any) -> None:
    """Adds the tokens to a digest, in pieces; of very many, evenly spaced pieces."""
    starts = range(0, len(tokens), PIECE)
    most = LARGEST // (4 * PIECE)
    for start in starts[:: -(-len(starts) // most)]:
        piece = np.asarray(tokens[start : start + PIECE])
        digest.update(piece.astype("<i4").tobytes())  # the file's type depends on the vocabulary


def _add_rows(digest: Any, split: Any) -> None:
    """Adds examples to a digest: all of a small split, else evenly spaced ones."""
    first = batching.take_rows(split, np.arange(1))
    row_bytes = sum(np.asarray(value).nbytes for value in first.values())
    most = min(MOST_ROWS, max(16, LARGEST // max(row_bytes, 1)), len(split))
    for index in np.unique(np.linspace(0, len(split) - 1, most).astype(int)):
        row = batching.take_rows(split, np.array([index]))
        for name in sorted(row):
            digest.update(name.encode() + np.ascontiguousarray(row[name]).tobytes())


def incomparable(folders: Sequence[RunFolder]) -> str:
    """Why the last scores of these runs cannot be compared; empty where they can.

    What a run does not say, because it is older, is taken to be the same.
    """
    scored = [folder for folder in folders if folder.last_scores()]
    if told := _differing(scored, unit):
        return f"These losses are in different units, do not compare them ({told})."
    if told := _differing(scored, lambda folder: digest(folder, "tokenizer_digest")):
        return f"These runs have different tokenizers ({told}): {BITS_PER_BYTE}."
    scores = [folder.last_scores() for folder in scored]
    if any(not _same_count(scores[0], other) for other in scores[1:]):
        told = "; ".join(f"{folder.path.name}: {part_scored(folder)}" for folder in scored)
        return f"These scores are of different text, do not compare them ({told})."
    if told := _differing(scored, lambda folder: digest(folder, "validation_digest")):
        return f"These scores are of different validation splits, do not compare them ({told})."
    if all(digest(folder, "validation_digest") for folder in scored):
        return ""  # other training data alone make no score incomparable
    if told := _differing(scored, lambda folder: digest(folder, "data_digest")):
        return f"These scores are of different data, so perhaps of different text ({told})."
    return ""


def incomparable_curves(folders: Sequence[RunFolder]) -> str:
    """Why the validation curves of these runs cannot be compared, where their last scores can."""
    told = _differing(folders, _part_of_curve)
    if not told:
        return ""
    return f"Their curves are of different parts of the split, do not compare them ({told})."


def _part_of_curve(folder: RunFolder) -> str:
    """The part of the split that the evaluations during the training score."""
    records = [record for record in read_records(folder.metrics) if "validation_loss" in record]
    if not records:
        return ""
    examples = records[-1].get("validation_examples")
    return "all examples" if examples is None else f"the first {examples:,.0f} examples"


def _differing(folders: Sequence[RunFolder], of: Callable[[RunFolder], str]) -> str:
    """`NAME: value` of each run, where the values differ; empty where they are the same.

    A run without a value does not count.
    """
    values = {folder.path.name: value for folder in folders if (value := of(folder))}
    if len(set(values.values())) < 2:
        return ""
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def unit(folder: RunFolder) -> str:
    """The unit of which a run's loss is a mean; empty where the run does not say it."""
    return str(folder.last_scores().get("unit", ""))


def digest(folder: RunFolder, name: str) -> str:
    """The first digits of a digest of environment.json; empty where there is none."""
    return str(_environment(folder).get(name, ""))[:12]


def _environment(folder: RunFolder) -> dict[str, Any]:
    """What environment.json says; nothing where there is none."""
    try:
        return folder.read_json(folder.environment)
    except ConfigError:
        return {}


def _same_count(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs were scored on as many tokens, or, where these are unknown, examples."""
    if "tokens" in one and "tokens" in other:
        return one["tokens"] == other["tokens"]
    # The record of a run that goes on has the number of examples only where it is not all.
    examples = [
        None if str(scores.get("scored", "")).startswith("all") else scores.get("examples")
        for scores in (one, other)
    ]
    return examples[0] == examples[1]


def part_scored(folder: RunFolder) -> str:
    """The part of a validation split that a run's last scores are of, in words."""
    scores = folder.last_scores()
    examples = scores.get("examples")
    tokens = scores.get("tokens")
    words = scores.get("scored") or (
        f"the first {examples:,.0f} examples" if examples else "all examples"
    )
    if tokens:
        words += f", {tokens:,.0f} tokens"
    split = digest(folder, "validation_digest")[:8]
    return f"{words} of split {split}" if split else words
