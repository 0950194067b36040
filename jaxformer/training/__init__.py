"""The parts of an experiment and its training step: the names that an experiment file imports."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.objectives import (
    ClassCrossEntropy,
    MaskedTokens,
    NextSentence,
    PrefixLanguageModel,
    SpanCorruption,
    SpanCrossEntropy,
    TokenCrossEntropy,
)
from jaxformer.training.experiment import Checkpoints, Experiment, Sample, Spikes
from jaxformer.training.optimizers import Adafactor, Adam, AdamW, Lion, Muon
from jaxformer.training.references import Base, Reference
from jaxformer.training.schedule_free import ScheduleFree
from jaxformer.training.schedules import WSD, Constant, Cosine, Linear, Noam
from jaxformer.training.soap import SOAP
