"""Does a molecule go into fat or into water? Its logP, read off its graph of atoms and bonds.

Graphormer: Ying et al. 2021, arXiv:2106.05234. A Transformer reads the atoms (element, charge,
hydrogens, degree). Its attention has biases by the length of the shortest path between two atoms,
and by the bonds along it; a virtual node gives the answer. Molecules are 14,000 compounds that
rdkit ships, of up to 31 atoms besides hydrogens. Their logP is Crippen's: a sum over atoms, whose
kinds depend on their neighbours. No Bemis-Murcko scaffold is both in training and in validation.
`mae` is the mean absolute error on 1,200 unseen molecules. Baselines are ridge regressions on the
same training molecules: `mae_atoms` reads counts of elements, `mae_fingerprints` those of atoms
with their neighbours (Morgan, radius 1). logP is nearly linear in the latter: they are nearly the
kinds of Crippen's sum. The model has to find them. `logp.png` shows its answers.
Expected: mae 0.175, 0.124, 0.198 (seeds 0, 1, 2), mae_atoms 0.524, mae_fingerprints 0.122: below
half of that of atoms, not below that of fingerprints. 136,265 parameters. Time: 7 minutes of one
CPU core. Needs pip install 'jaxformer[molecules]'. Command: make train EXP=molecules
Then: make generate EXP=molecules ARGS="--prompt 'CCO'"
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.data import molecules
from jaxformer.data.arrays import dataset_of_arrays
from jaxformer.data.batching import every_row
from jaxformer.data.sources import Dataset
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.molecules import atom_counts, linear_answers, morgan_counts
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.tools.analysis import figures, structures
from jaxformer.training import Cosine, Experiment, Muon
from jaxformer.zoo.graphormer import GraphAttention, GraphNodes, shortest_paths

LARGEST, PATH = 31, 5  # atoms of a molecule; edges of a path that have weights
MEAN, DEVIATION = 2.7, 1.6  # of the logP of training molecules, rounded: the model's units


def graphs(chosen: list[Any]) -> dict[str, np.ndarray]:
    """What the model reads of molecules, padded to `LARGEST` atoms or to the largest molecule."""
    A = max(LARGEST, *(each.GetNumAtoms() for each in chosen))
    rows = []
    for atoms, edges in map(molecules.graph, chosen):
        nodes = np.pad(atoms, ((0, A - len(atoms)), (0, 0)))
        rows.append((nodes, *shortest_paths(edges, PATH, A)))
    names = "nodes", "distances", "paths"
    return {k: np.array(x, np.int16) for k, x in zip(names, zip(*rows, strict=True), strict=True)}


@dataclass(frozen=True)
class Molecules:
    """Molecules that rdkit ships, and their logP. No scaffold is in both splits."""

    examples: int = 13_000  # of the training split, at most
    validation_examples: int = 1200  # of the validation split, at most
    seed: int = 0  # of the order of molecules, and of the scaffolds that are held out

    def open(self, model: Any) -> Dataset:
        sizes = self.examples, self.validation_examples
        splits = []
        for split in molecules.scaffold_split(sizes, LARGEST, self.seed):
            chosen = list(split.values())
            arrays = graphs(chosen) | {"number": np.array(list(split), np.int32)}
            arrays["logp"] = np.array([molecules.logp(each) for each in chosen], np.float32)
            splits.append(arrays | {"weights": np.ones(len(chosen), np.float32)})
        return dataset_of_arrays(*splits, description="molecules of rdkit")

    def generate(self, run: Any, key: Any, folder: Any, prompt: str | None = None) -> list[str]:
        """The logP of a molecule by the model, and by Crippen's rules."""
        molecule = molecules.read(prompt or "CCO")
        (found,) = predicted(run.model, run.params, graphs([molecule]))
        truth = molecules.logp(molecule)
        return [f"{prompt or 'CCO'}: logP {found:.2f}, by Crippen's rules {truth:.2f}"]


def answers(model: Any, params: Any, batch: dict, **options: Any) -> Any:
    """The model's output: its logits [B, 1] are (logP - MEAN) / DEVIATION."""
    inputs = {"distances": batch["distances"], "paths": batch["paths"]}
    return models.apply(model, params, batch["nodes"], inputs=inputs, **options)


def absolute_error(model: Any, params: Any, batch: dict, context: Any) -> LossSums:
    """|answer - logP| in units of DEVIATION."""
    output = answers(model, params, batch, dropout_key=context.key, dtype=context.dtype)
    errors = abs(output.logits[:, 0] - (batch["logp"] - MEAN) / DEVIATION)
    sums = weighted_sum(errors, batch["weights"]), batch["weights"].sum()
    return with_own(LossSums(*sums, unit="molecules"), output)


def predicted(model: Any, params: Any, batch: dict) -> np.ndarray:
    """The logP of each molecule by the model."""
    batch = jax.tree.map(jnp.asarray, batch)
    output = jax.jit(answers, static_argnums=0)(model, params, batch)
    return MEAN + DEVIATION * np.asarray(output.logits[:, 0])


@dataclass(frozen=True)
class Scores:
    """The scores that the head of this file explains; `logp.png` draws them."""

    only_final = True

    def __call__(self, scored: Evaluation) -> dict[str, float]:
        splits = scored.dataset.train, scored.dataset.validation
        train, unseen = map(every_row, splits)
        every = molecules.shipped()
        known, new = ([molecules.read(every[n]) for n in x["number"]] for x in (train, unseen))
        found = {"mae": predicted(scored.model, scored.params, unseen)}
        neighbours = partial(morgan_counts, radius=1)
        for name, features in (("mae_atoms", atom_counts), ("mae_fingerprints", neighbours)):
            found[name] = linear_answers(features, known, train["logp"], new)
        if scored.folder is not None and jax.process_index() == 0:
            drawn = {"Graphormer": found["mae"], "atom counts": found["mae_atoms"]}
            draw = partial(structures.answers, "logP", unseen["logp"], drawn, new[:6])
            figures.save(draw, scored.folder / "logp.png")
        return {name: float(abs(x - unseen["logp"]).mean()) for name, x in found.items()}


experiment = Experiment(
    name="molecules",
    model=ModelConfig(
        vocab_size=0,
        num_layers=4,
        d_model=64,
        num_heads=8,
        context_length=LARGEST + 1,
        d_ff=128,
        feedforward="gelu",
        embedding=GraphNodes(molecules.VALUES, largest_degree=4),
        positions=None,
        mixer=GraphAttention(len(molecules.BONDS), farthest=10, path=PATH),
        heads=(Classification(1, pooler=None, name="logp"),),
        masks=(full(),),
        init_std=0.1,
    ),
    data=Molecules(),
    objective=absolute_error,
    optimizer=Muon(learning_rate=1e-2, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100, final=0.01),
    steps=2000,
    batch_size=64,
    eval_every=1000,
    metrics=(Scores(),),
)
