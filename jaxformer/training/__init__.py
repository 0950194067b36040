"""Experiments, and the run that they describe. What an experiment file needs is here."""

from jaxformer.training.experiment import Checkpoints, Experiment, Sample
from jaxformer.training.initial import FromRun, HuggingFace
from jaxformer.training.objectives import ClassCrossEntropy, TokenCrossEntropy
from jaxformer.training.optimizers import Adafactor, Adam, AdamW, Lion, Muon
from jaxformer.training.schedules import WSD, Constant, Cosine, Linear, Noam

__all__ = [
    "WSD", "Adafactor", "Adam", "AdamW", "Checkpoints", "ClassCrossEntropy", "Constant", "Cosine", "Experiment", "FromRun",
    "HuggingFace", "Linear", "Lion", "Muon", "Noam", "Sample", "TokenCrossEntropy",
]  # fmt: skip
