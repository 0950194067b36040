"""The table of the model types: which models load, our presets of them, and what is refused.

`python -m jaxformer.families.table` prints it, and docs/families.md has it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.families.known import FAMILIES, write_settings
from jaxformer.zoo import PRESETS


class Row(NamedTuple):
    """Model types that stand together in the table."""

    model_types: str
    models: str
    refused: str = ""


ROWS = (
    Row("gpt2", "GPT-2, DistilGPT-2", "attention to an encoder (`add_cross_attention`)"),
    Row("llama mistral ministral", "LLaMA 1 to 3.1, Vicuna, Mistral"),
    Row("qwen2 qwen3", "Qwen 2, 2.5 and 3"),
    Row(
        "mixtral qwen2_moe qwen3_moe",
        "Mixtral, Qwen1.5-MoE, Qwen3 with experts",
        "windows of `qwen2_moe` without `use_sliding_window`",
    ),
    Row(
        "gemma gemma2 gemma3_text",
        "Gemma 1 to 3, without images",
        "bidirectional attention; `truncate=false` of YaRN",
    ),
    Row("olmo2 olmo3", "OLMo 2 and 3", "`truncate=false` of YaRN"),
    Row("gpt_oss", "gpt-oss", "weights in MXFP4: save them with transformers in 16 bits first"),
    Row(
        "deepseek_v3",
        "DeepSeek-V3, R1, V3.1",
        "the modules for multi-token prediction are left out, as in transformers; weights in FP8",
    ),
    Row("phi phi3", "Phi 1 to 4, Phi-4-mini", "a `rope_type` other than LongRoPE"),
    Row("granite smollm3 starcoder2 stablelm", "Granite 3, SmolLM3, StarCoder2, StableLM 2"),
    Row("glm4 cohere", "GLM-4, Command R"),
    Row(
        "gpt_neox gptj falcon",
        "Pythia, GPT-NeoX, GPT-J, Falcon",
        "an odd number of rotated features",
    ),
    Row(
        "opt bloom",
        "OPT, BLOOM, BLOOMZ",
        "OPT 350M (`word_embed_proj_dim`); `slow_but_exact` with `pretraining_tp` above 1",
    ),
    Row("bert roberta xlm-roberta camembert", "BERT, RoBERTa and both in other languages"),
    Row("distilbert electra albert", "DistilBERT, ELECTRA, ALBERT 1 and 2"),
    Row("modernbert", "ModernBERT", "`rope_scaling`, which would scale both rotations"),
    Row(
        "deberta-v2",
        "DeBERTa-v2 and v3",
        "`embedding_size` other than `hidden_size`; no `pos_att_type`",
    ),
    Row("longformer big_bird reformer", "Longformer, BigBird, Reformer"),
    Row("t5 mt5 umt5", "T5, FLAN-T5, mT5, UMT5", "classification of sequences"),
    Row(
        "marian bart mbart pegasus",
        "Marian, BART, mBART, Pegasus",
        "the decoder alone; classification of sequences",
    ),
    Row("vit", "ViT"),
    Row("deit", "DeiT, with its distillation token"),
    Row(
        "dinov2",
        "DINOv2, without registers",
        "images that are not square: `vision.resize`",
    ),
    Row(
        "clip_vision_model clip_text_model",
        "the towers of CLIP",
        "`eos_token_id` that is null or a list",
    ),
    Row("siglip_vision_model siglip_text_model", "the towers of SigLIP"),
    Row(
        "vit_mae",
        "ViT-MAE, with and without its decoder",
        "with the decoder, images that are not square",
    ),
    Row(
        "whisper",
        "Whisper: the source is log-mel frames `[B, frames, mel bins]`, theirs transposed",
        "classification; the decoder alone",
    ),
    Row(
        "detr",
        "DETR with a ResNet of transformers or timm: the source is images, the target "
        "`zoo.detr.object_numbers`",
        "segmentation; another backbone; a dilated last stage (DC5); `auxiliary_loss`; learned "
        "positions",
    ),
)


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield "| model_type | models | presets | what is refused |"
    yield "|---|---|---|---|"
    left = dict(PRESETS)
    for row in ROWS:
        kinds = row.model_types.split()
        found = [
            name for name, config in left.items() if any(holds(kind, config) for kind in kinds)
        ]
        presets = [f"`{name}` {count(left.pop(name))}" for name in found]
        types = ", ".join(f"`{kind}`" for kind in kinds)
        cells = types, row.models, ", ".join(presets), row.refused
        yield "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def holds(model_type: str, config: models.ModelConfig | models.EncoderDecoder) -> bool:
    """Whether a folder of this type can hold a model of this config."""
    try:
        write_settings(config, model_type, FAMILIES)
    except ConfigError:
        return False
    return True


def count(config: models.ModelConfig | models.EncoderDecoder) -> str:
    """The number of parameters, to three digits: 124M, 8.03B."""
    number = params.count(models.spec(config))
    unit, name = (1e9, "B") if number >= 999.5e6 else (1e6, "M")
    value = number / unit
    digits = max(0, 2 - len(str(int(value))) + 1)
    return f"{value:.{digits}f}{name}"


if __name__ == "__main__":
    print("\n".join(table()))
