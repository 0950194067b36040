"""The library's names that expressions of the command line may call, by the field that they set.

The list is closed. What an experiment file offers belongs to every field:
`{**NAMES, "": source.names}`.
"""

from collections import ChainMap
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxformer import masks, models, objectives
from jaxformer.config.offered import Offered
from jaxformer.data import (
    augment,
    chat,
    corpus,
    images,
    labelled,
    mixing,
    pairs,
    preferences,
    rollouts,
    sources,
    tasks,
)
from jaxformer.decoding.beam import Beams, gnmt
from jaxformer.decoding.sampling import Sampling
from jaxformer.evaluation import generation, perplexity, text_metrics
from jaxformer.models import adaptation, blocks, norm, vision
from jaxformer.objectives import advantages, policy
from jaxformer.ops import positions, quantised
from jaxformer.parallel.mesh import Mesh
from jaxformer.runs import initial
from jaxformer.training import optimizers, references, schedules
from jaxformer.training.experiment import Checkpoints, Sample, Spikes
from jaxformer.training.schedule_free import ScheduleFree
from jaxformer.training.soap import SOAP


def _of(module: ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


_OF_MODELS = {
    masks: "full causal window strided chunked columns prefix global_tokens random_blocks"
    " block_sparse by_head longformer bigbird sparse_transformer_strided sparse_transformer_fixed",
    models: "ModelConfig EncoderDecoder Embedding Patches Learned Sinusoidal Axial Alibi Relative"
    " LanguageModel Classification TokenClassification Mixture MuP",
    positions: "Rope NTK Llama3 YaRN LongRoPE",
    vision: "Reconstruction",
}
_TRUNK = models.PRESETS | {
    name: value
    for module, names in _OF_MODELS.items()
    for name, value in _of(module, names).items()
}
_MODEL: Any = ChainMap(_TRUNK, Offered("jaxformer.zoo"))  # type: ignore[arg-type]
MODEL: Mapping[str, Any] = _MODEL
HUGGING_FACE: Any = Offered("jaxformer.families", {"HuggingFace": "initial"})
ANSWERS = {"Sampling": Sampling, "Beams": Beams, "gnmt": gnmt}
NAMES: dict[str, Mapping[str, Any]] = {
    "model": MODEL,
    "mixer": Offered("jaxformer.zoo", {"Linear": "linear_attention"}),
    "block": _of(blocks, "pre_norm post_norm sandwich output_norm parallel parallel_norms"),
    "norm": _of(norm, "Unscaled no_norm one_plus_rms_norm"),
    "positions": {"Linear": positions.Linear},
    "scaling": {"Linear": positions.Linear},
    "data": _of(sources, "Text Stdlib")
    | _of(tasks, "Reverse Copy Sort Recall")
    | _of(pairs, "Pairs Packed Buckets")
    | _of(chat, "Chat")
    | _of(preferences, "Preferences")
    | _of(rollouts, "Rollouts is_right")
    | _of(corpus, "Corpus")
    | _of(mixing, "Mixed")
    | _of(images, "Digits Images")
    | _of(labelled, "Labelled"),
    "optimizer": _of(optimizers, "Adam AdamW Adafactor Lion Muon")
    | {"SOAP": SOAP, "ScheduleFree": ScheduleFree},
    "schedule": _of(schedules, "Noam Cosine Linear WSD Constant"),
    "objective": _of(
        objectives,
        "TokenCrossEntropy ClassCrossEntropy SpanCrossEntropy MaskedTokens NextSentence"
        " PrefixLanguageModel SpanCorruption Preference DPO IPO SimPO RewardModel"
        " PolicyGradient Clipped Distillation HiddenStates JensenShannon forward_kl reverse_kl"
        " MultiToken",
    )
    | _of(advantages, "group_relative group_centred leave_one_out")
    | _of(policy, "over_answers over_tokens OverLength")
    | _of(augment, "Flip Crop ResizedCrop Move"),
    "initial": ChainMap(_of(initial, "FromRun"), HUGGING_FACE),
    "references": ChainMap(
        _of(initial, "FromRun") | _of(references, "Reference Base"), _MODEL, HUGGING_FACE
    ),
    "adaptation": _of(adaptation, "Lora") | _of(quantised, "NF4 Int4 Int8"),
    "metrics": _of(generation, "Generated")
    | _of(text_metrics, "bleu chrf rouge exact_match token_f1")
    | _of(perplexity, "StridedPerplexity")
    | ANSWERS,
    "mesh": {"Mesh": Mesh},
    "checkpoints": {"Checkpoints": Checkpoints},
    "sample": {"Sample": Sample} | ANSWERS,
    "spikes": {"Spikes": Spikes},
}
