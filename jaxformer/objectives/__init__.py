"""Training objectives, one file for each kind. `objective.py` says what an objective is."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.objectives.classes import ClassCrossEntropy
from jaxformer.objectives.corruption import SpanCorruption
from jaxformer.objectives.distillation import Distillation, HiddenStates
from jaxformer.objectives.divergences import JensenShannon, forward_kl, reverse_kl
from jaxformer.objectives.masked import MaskedTokens, NextSentence
from jaxformer.objectives.multi_token import MultiToken
from jaxformer.objectives.objective import StepContext, with_reports
from jaxformer.objectives.policy import Clipped, PolicyGradient
from jaxformer.objectives.preference import DPO, IPO, Preference, SimPO
from jaxformer.objectives.reward import RewardModel
from jaxformer.objectives.spans import SpanCrossEntropy
from jaxformer.objectives.tokens import PrefixLanguageModel, TokenCrossEntropy
from jaxformer.ops.losses import LossSums
