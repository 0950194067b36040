"""Which checkpoints of a run are kept: the rule that orbax asks before it deletes a step."""

import math
from collections.abc import Sequence
from typing import Any

from etils import epath

from jaxformer.runs.checkpoint_reader import read_manifest
from jaxformer.runs.manifest import Damaged

HERE = "metrics of this manager"  # the name of a score without a name; never written to disk


class LatestAndBest:
    """Orbax's preservation policy: which steps are kept.

    It keeps the newest step, the last `latest` multiples of `every`, and the `best` of lowest
    metric. A step between two multiples is deleted when a newer one exists, so the kept steps do
    not depend on when a run was stopped. NaN ranks last. Metrics of different scores are not
    compared: the best of each score are kept. Orbax's own BestN has no rule for NaN, and cannot
    open a folder in which one step's metric is damaged.
    """

    def __init__(self, folder: epath.Path, every: int, latest: int, best: int, score: str = HERE):
        self.folder = folder
        self.every = every
        self.latest = latest
        self.best = best
        self.score = score
        # step -> (score, metric)
        self.metrics: dict[int, tuple[str | None, float | None]] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether each of the checkpoints is kept."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        regular = [step for step in sorted(steps) if step % self.every == 0]
        ranks, damaged = self.ranks(steps if self.best else [])
        # Damaged steps are kept, because `restore` judges them.
        keep = {*regular[-self.latest :], max(steps, default=0), *damaged}
        for ranked in ranks.values():
            keep.update(step for _, step in ranked[: self.best])
        return [step in keep for step in steps]

    def ranks(
        self, steps: Sequence[int]
    ) -> tuple[dict[str | None, list[tuple[float, int]]], list[int]]:
        """({score: its (metric, step), the best first}, the steps without a readable manifest)."""
        ranks: dict[str | None, list[tuple[float, int]]] = {}
        damaged = []
        for step in steps:
            try:
                if step not in self.metrics:
                    contents = read_manifest(self.folder / str(step))
                    self.metrics[step] = contents["score"], contents["metric"]
            except (Damaged, OSError):  # a step that cannot be read now is not deleted either
                damaged.append(step)
                continue
            score, metric = self.metrics[step]
            if metric is not None:
                ranks.setdefault(score, []).append(
                    (math.inf if math.isnan(metric) else metric, step)
                )
        return {score: sorted(ranked) for score, ranked in ranks.items()}, damaged

    def is_among_best(self, metric: float, steps: Sequence[int]) -> bool:
        """Whether a step with this metric would be one of the `best` among `steps`; never NaN."""
        if not self.best or math.isnan(metric):
            return False
        ranked = self.ranks(steps)[0].get(self.score, [])
        return len(ranked) < self.best or metric < ranked[self.best - 1][0]
