"""The known families, by the model_type of config.json, and which of them can express a config."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from jaxformer import models
from jaxformer.errors import ConfigError, did_you_mean
from jaxformer.families import (
    albert,
    bart,
    bert,
    bigbird,
    bloom,
    clip,
    cohere,
    deberta_v2,
    deepseek_v3,
    deit,
    detr,
    dinov2,
    distilbert,
    electra,
    falcon,
    gemma,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    llama,
    longformer,
    marian,
    modernbert,
    olmo,
    opt,
    phi,
    qwen_moe,
    reformer,
    siglip,
    smollm3,
    stablelm,
    starcoder2,
    t5,
    vit,
    vit_mae,
    whisper,
)
from jaxformer.families.causality import IS_CAUSAL, causal_twin, read_causality
from jaxformer.families.comparison import fields_with_effect
from jaxformer.families.family import Family
from jaxformer.families.tensors import plan
from jaxformer.families.tied_head import Config, with_stack
from jaxformer.interop.safetensors import list_names
from jaxformer.params import paths

# the known families, in the order in which `save` tries them
KNOWN = (
    gpt2, llama, olmo, qwen_moe, gemma, gpt_oss, phi, granite, smollm3, starcoder2, stablelm,
    glm4, cohere, gpt_neox, gptj, falcon, bloom, opt, deepseek_v3, reformer, bert, distilbert,
    electra, albert, modernbert, deberta_v2, longformer, bigbird, vit, deit, dinov2, clip, siglip,
    vit_mae, t5, bart, marian, whisper, detr,
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    kind: family for module in KNOWN for kind, family in module.FAMILIES.items()
}


def is_unknown(kind: Any, families: Iterable[str] = FAMILIES) -> str:
    """'is unknown', with the nearest name and the command that lists all of them."""
    hint = did_you_mean(str(kind), families)
    return f"is unknown{hint}; `python -m jaxformer.families.table` lists the known ones"


def write_settings(config: Config, model_type: str | None, families: Mapping[str, Family]) -> dict:
    """config.json of the first family that can express the config.

    A family can express a config if it reads the same config from the file that it writes.
    """
    if model_type is not None and model_type not in families:
        raise ConfigError(f"model_type={model_type!r} {is_unknown(model_type, families)}")
    reason = ""
    nearest: tuple[str, list[str]] | None = None  # the family that lacks the fewest fields
    kinds = families if model_type is None else [model_type]
    wordings = [(config, {})]
    if (twin := causal_twin(config)) is not None:
        wordings.append((twin, {IS_CAUSAL: False}))
    for (wording, more), kind in itertools.product(wordings, kinds):
        family = families[kind]
        try:
            settings = family.write(wording) | {"model_type": kind} | more
            copy = read_causality(settings, family.read(settings, plan(family, wording)))
        except (ConfigError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            reason = reason or f"cannot express this config ({error})"
            continue
        if family.tied_without_head:  # `load` reads from the weights whether it is tied
            copy = with_stack(copy, tie_embeddings=models.last_stack(config).tie_embeddings)
        copy = _without_free_heads(copy, config)
        fields, read = fields_with_effect(config), fields_with_effect(copy)
        differences = [
            name for name in fields | read if fields.get(name, ...) != read.get(name, ...)
        ]
        if not differences:
            return settings
        reason = reason or f"cannot express {list_names(differences, str)}"
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = kind, differences
    if model_type is None:
        problem = f"none of the {len(families)} families can express this config"
        if nearest is None:
            raise ConfigError(f"{problem}; give model_type to see why")
        kind, lacking = nearest
        raise ConfigError(
            f"{problem}; the nearest is {kind!r}, which cannot express {list_names(lacking, str)}; "
            "give model_type to see why another one cannot"
        )
    raise ConfigError(f"model_type={model_type!r}: {reason}")


def _without_free_heads(copy: Config, config: Config) -> Config:
    """The copy, bare like `config` if no tensor belongs to its heads.

    Such are the class token of DINOv2 and the end of a text of CLIP: a file cannot leave them out.
    """
    bare = with_stack(copy, heads=())
    of_heads = paths(models.spec(copy)).keys() - paths(models.spec(bare)).keys()
    return copy if of_heads or models.last_stack(config).heads else bare
