"""One file a paper: its equation as a function, its mixer or stack, its state, its presets.

    from jaxformer.zoo import performer
    performer.attention(query, key, value, projection)          # the function alone, in your code
    ModelConfig(..., mixer=performer.Performer(features=128))   # as a part of a model

The library imports none of these files by itself, and they import nothing but the library: copy one
beside your experiment and edit it there. What several of them share is in `visible.py`, `frame.py`
and `hash_buckets.py`.
"""

import importlib
from typing import Any

# {name that an option may use: the file that has it}
OFFERED = {
    "Efficient": "efficient_attention",
    "Performer": "performer",
    "Linformer": "linformer",
    "Reformer": "reformer",
    "LocalChunks": "local_chunks",
    "Longformer": "longformer",
    "BigBird": "bigbird",
    "Reversible": "reversible",
    "qk_norm": "qk_norm",
    "qk_norm_full": "qk_norm",
    "qk_model_norm": "qk_norm",
    "gated": "gated",
    "qk_layer_norm": "qk_layer_norm",
    "qk_clip": "qk_clip",
    "QKClip": "qk_clip",
    "LatentAttention": "latent_attention",
    "GroupedExperts": "grouped_experts",
    "differential": "differential",
    "relative_attention": "transformer_xl",
    "sigmoid": "sigmoid",
    "value_residual": "value_residual",
    "sinks": "sinks",
    "ClampedMixture": "clamped_mixture",
    "LayerScale": "layer_scale",
    "ClassAndPatches": "dinov2",
    "DistilledClassification": "distilled",
    "embedding_norm": "clip",
    "ImageFeatures": "clip",
    "TextFeatures": "clip",
    "KeptPatches": "masked_autoencoder",
    "PixelDecoder": "masked_autoencoder",
    "MaskedPatches": "masked_patches",
    "CodeBook": "vector_quantised",
    "VectorQuantisation": "vector_quantised",
    "Prototypes": "dino",
    "SelfDistillation": "dino",
    "balanced": "sinkhorn",
    "AttentionPooling": "siglip",
    "LastPosition": "siglip",
    "Factorised": "albert",
    "Repeated": "albert",
    "Disentangled": "disentangled",
    "PostNormConvolution": "input_convolution",
    "Projection": "projection",
    "bare_attention": "modernbert",
    "ProjectedClasses": "projection",
    "temperature": "temperature",
    "inverse_depth_scale": "temperature",
    "MelFrames": "whisper",
    "SpecAugment": "spec_augment",
    "ResNet": "resnet",
    "FeatureMap": "detr",
    "grid_sines": "detr",
    "no_content": "detr",
    "post_norm_twice": "detr",
    "ObjectClasses": "detr",
    "Boxes": "detr",
    "SetPrediction": "set_prediction",
    "AdaLNZero": "dit",
    "Pixels": "dit",
    "FlowMatching": "flow_matching",
    "Alignment": "alignments",
    "AlignmentUpdate": "alignments",
    "PairUpdate": "alignments",
    "Distogram": "distogram",
    "PairCrossEntropy": "distogram",
    "Tubelets": "vivit",
    "spatial_attention": "vivit",
    "space_then_time": "vivit",
    "Hourglass": "hourglass",
    "SeriesPatches": "patchtst",
    "Quantiles": "patchtst",
    "quantile_regression": "patchtst",
    "GraphNodes": "graphormer",
    "GraphAttention": "graphormer",
    "ImagePrefix": "llava",
}
PRESETS_OF = {
    "decoders": (
        "gemma2_2b",
        "gemma2_9b",
        "gemma2_27b",
        "gemma3_1b",
        "gemma3_4b",
        "gemma3_12b",
        "gemma3_27b",
        "qwen3_06b",
        "qwen3_1b7",
        "qwen3_4b",
        "qwen3_8b",
        "qwen3_14b",
        "qwen3_32b",
        "qwen3_30b_a3b",
        "qwen3_235b_a22b",
        "olmo2_1b",
        "olmo2_7b",
        "olmo2_13b",
        "olmo2_32b",
        "gpt_oss_20b",
        "gpt_oss_120b",
        "deepseek_v3",
    ),
    "dinov2": ("dinov2_small", "dinov2_base", "dinov2_large", "dinov2_giant"),
    "clip": (
        "clip_base_32_vision",
        "clip_base_32_text",
        "clip_large_14_vision",
        "clip_large_14_text",
    ),
    "albert": ("albert_base", "albert_large", "albert_xlarge", "albert_xxlarge"),
    "modernbert": ("modernbert_base", "modernbert_large"),
    "disentangled": (
        "deberta_v3_xsmall",
        "deberta_v3_small",
        "deberta_v3_base",
        "deberta_v3_large",
    ),
    "input_convolution": ("deberta_v2_xlarge", "deberta_v2_xxlarge"),
    "longformer": ("longformer_base", "longformer_base_mlm", "longformer_large"),
    "bigbird": ("bigbird_base", "bigbird_base_pretraining", "bigbird_large"),
    "transformer_xl": ("chinchilla_70b", "gopher_280b"),
    "linformer": ("linformer_base",),
    "performer": ("performer_base",),
    "reformer": ("reformer_enwik8",),
    "whisper": (
        "whisper_tiny",
        "whisper_base",
        "whisper_small",
        "whisper_medium",
        "whisper_large",
        "whisper_large_v3",
    ),
    "detr": ("detr_r50", "detr_r101"),
}
OFFERED |= {name: file for file, names in PRESETS_OF.items() for name in names}
_CLASSES = {name: file for name, file in OFFERED.items() if name[0].isupper()}
_CLASSES |= {"Linear": "linear_attention"}
_FILES = {*OFFERED.values(), "linear_attention", "hash_buckets", "frame", "visible"}
_FILES |= {"triangles", "evoformer"}


def __getattr__(name: str) -> Any:
    """A file of this package or a class of one, imported when it is first used.

    `PRESETS` has all presets by name, also those of the trunk.
    """
    if name in _FILES:
        return importlib.import_module(f"jaxformer.zoo.{name}")
    if name in _CLASSES:
        return getattr(importlib.import_module(f"jaxformer.zoo.{_CLASSES[name]}"), name)
    if name == "PRESETS":
        return _presets()
    raise AttributeError(f"module 'jaxformer.zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES, *_CLASSES, "PRESETS"})


def _presets() -> dict[str, Any]:
    """Every preset by name."""
    from jaxformer.models.presets import PRESETS

    presets = dict(PRESETS)
    for file, names in PRESETS_OF.items():
        module = importlib.import_module(f"jaxformer.zoo.{file}")
        presets |= {name: getattr(module, name) for name in names}
    return presets
