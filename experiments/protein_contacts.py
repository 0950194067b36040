"""Which residues of a protein touch each other, read off 32 related sequences.

The Evoformer of AlphaFold 2 (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2) answers a contact
map. Families are generated: helices and strands of a chain of 28 residues lie side by side, and its
sequences are Gibbs samples of a Potts model of 6 types with random couplings of touching residues.
`precision` is the share of contacts among the 28 surest pairs, at least 4 residues apart, of 300
unseen families. `mutual_information` (Dunn et al. 2008) and `mean_field` (direct couplings, Morcos
et al. 2011) need no training; `best` is that of the truth: some families have fewer contacts.
`contacts.png` in the run's folder shows the surest pairs, green if right, above the truth in grey.
Expected: precision 0.703, 0.797, 0.711 (seeds 0, 1, 2), mean_field 0.511, mutual_information
0.515, best 0.910. 94,018 parameters. Time: 9 minutes of one CPU core.
Command: make train EXP=protein_contacts
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._protein_families import APART, DISTANT, TYPES, R, fold, sample
from jaxformer import models
from jaxformer.data.arrays import dataset_of_arrays
from jaxformer.data.batching import every_row
from jaxformer.data.sources import Dataset
from jaxformer.evaluation import contacts
from jaxformer.evaluation.metric import Evaluation
from jaxformer.masks import full
from jaxformer.models import ModelConfig, blocks
from jaxformer.tools.analysis import figures
from jaxformer.training import Cosine, Experiment, Muon
from jaxformer.zoo.alignments import Alignment, AlignmentUpdate, PairUpdate
from jaxformer.zoo.distogram import Distogram, PairCrossEntropy


@dataclass(frozen=True)
class Families:
    """Alignments of random families with their contacts."""

    examples: int = 8000  # families of the training split
    validation_examples: int = 300  # of the validation split
    seed: int = 0  # of the families

    def open(self, model: Any) -> Dataset:
        splits = []
        for split, count in enumerate((self.examples, self.validation_examples)):
            rng = np.random.default_rng((self.seed, split))
            maps = np.array([fold(rng) for _ in range(count)])
            parts = [sample(rng, maps[i : i + 500]) for i in range(0, count, 500)]
            rows = {"alignment": np.concatenate(parts), "weights": np.ones(count)}
            splits.append(rows | {"bins": np.where(DISTANT, maps, -1).astype(np.int32)})
        return dataset_of_arrays(*splits, description=f"{self.examples:,} protein families")


def precision(scored: Evaluation) -> dict[str, float]:
    """The scores that the head of this file explains, and a picture of the first families."""
    split = scored.dataset.validation
    rows = every_row(split)
    alignments, maps = rows["alignment"], rows["bins"]
    run = jax.jit(lambda params, types: models.apply(scored.model, params, types).logits)
    logits = np.asarray(run(scored.params, jnp.asarray(alignments)))
    answers = {"precision": logits[..., 1] - logits[..., 0], "best": maps}
    for method in (contacts.mean_field, contacts.mutual_information):
        answers[method.__name__] = np.array([method(each, TYPES) for each in alignments])
    if scored.folder is not None and jax.process_index() == 0:
        figures.save(lambda: picture(answers), scored.folder / "contacts.png")
    return {name: contacts.mean_top_precision(each, maps, APART) for name, each in answers.items()}


def picture(answers: dict[str, np.ndarray], count: int = 4) -> Any:
    """The surest pairs of two methods above the diagonal, and the true contacts below it."""
    axes = figures.panels(2 * count, count, 2.2, 2.4)
    for n, panel in enumerate(axes):
        name, title = (("precision", "Evoformer"), ("mean_field", "mean field"))[n // count]
        truth = answers["best"][n % count]
        a, b = contacts.surest_pairs(answers[name][n % count], APART)
        right = truth[a, b] > 0
        panel.scatter(b, a, s=9, c=np.where(right, "#2a9d5c", "#d1495b"), marker="s")
        panel.scatter(*np.nonzero(np.triu(truth > 0)), s=9, c="#888888", marker="s")
        panel.set(xlim=(-1, R), ylim=(R, -1), aspect="equal")
        panel.set_title(f"{title}: {right.sum()} of {R} right", fontsize=8)
    return axes[0].figure


experiment = Experiment(
    name="protein_contacts",
    model=ModelConfig(
        vocab_size=0,
        num_layers=2,
        d_model=32,
        num_heads=4,
        context_length=R,
        d_ff=64,
        positions=None,
        masks=(full(),),
        embedding=Alignment(TYPES, pair_width=32),
        mixer=AlignmentUpdate(dropout_rate=0.0),
        feedforward=PairUpdate(outer_width=8, d_ff=64, dropout_rate=0.0),
        block=blocks.bare,
        heads=(Distogram(2),),
        unroll=1,
    ),
    data=Families(),
    objective=PairCrossEntropy(),
    optimizer=Muon(learning_rate=1e-2, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=50),
    steps=1000,
    batch_size=8,
    eval_every=500,
    metrics=(precision,),
)
