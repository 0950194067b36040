"""Experiments, and the run that they describe. What an experiment file needs is here."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.training.corruption import MaskedTokens, NextSentence, PrefixLanguageModel, SpanCorruption
from jaxformer.training.experiment import Checkpoints, Experiment, Sample, Spikes
from jaxformer.training.initial import FromRun, HuggingFace
from jaxformer.training.objectives import ClassCrossEntropy, SpanCrossEntropy, TokenCrossEntropy
from jaxformer.training.optimizers import Adafactor, Adam, AdamW, Lion, Muon
from jaxformer.training.schedules import WSD, Constant, Cosine, Linear, Noam
