"""Reformer, with layers of hashing and local ones."""

import math
from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import class_kind, count_labels, heads_by_class, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    Json,
    Key,
    get,
    get_list,
    layer_kinds,
    only,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
)
from jaxformer.masks import Mask, causal, chunked, full
from jaxformer.models.config import Axial, Classification, LanguageModel, Learned, ModelConfig
from jaxformer.zoo.local_chunks import LocalChunks
from jaxformer.zoo.reformer import Reformer
from jaxformer.zoo.reversible import Reversible

LM = LanguageModel()
BIAS = "lm_head.decoder.bias"
REFORMER = {
    field: COMMON[field] for field in ("vocab_size", "d_model", "num_heads", "init_std")
} | {
    "head_width": Key("attention_head_size", 64),
    "d_ff": Key("feed_forward_size"),
    "norm_eps": Key("layer_norm_eps", 1e-12),
    "feedforward": Key("hidden_act", "relu", ACTIVATION),
    "dropout_rate": Key("hidden_dropout_prob", 0.05),
    "tie_embeddings": Key("tie_word_embeddings", False),
}
LSH = {
    "chunk": Key("lsh_attn_chunk_length", 64),
    "rounds": Key("num_hashes", 1),
    "seed": Key("hash_seed", 0),
    "chunks_before": Key("lsh_num_chunks_before", 1),
    "chunks_after": Key("lsh_num_chunks_after", 0),
}
LOCAL = {
    "chunk": Key("local_attn_chunk_length", 64),
    "before": Key("local_num_chunks_before", 1),
    "after": Key("local_num_chunks_after", 0),
}


def _read_reformer(c: Json, names: Collection[str]) -> ModelConfig:
    fields, lsh, local = (read_fields(c, table) for table in (REFORMER, LSH, LOCAL))
    layers = get_list(c, "attn_layers")
    L = get(c, "num_hidden_layers", len(layers) or 1)
    kinds = layer_kinds("attn_layers", layers, L, "local", "lsh")
    chunks = {"lsh": lsh["chunk"], "local": local["chunk"]}
    multiple = math.lcm(*(chunks[kind] for kind in set(kinds)))
    buckets = _read_buckets(c)
    mask = causal() if get(c, "is_decoder", False) else full()
    # (mask, mixer) of the kinds that the model has: the sizes of other kinds may be invalid
    mixers = {}
    if "lsh" in kinds:
        lsh["seed"] = lsh["seed"] or 0
        lsh["multiple"] = None if multiple == lsh["chunk"] else multiple
        mixers["lsh"] = (mask, Reformer(**lsh, buckets=buckets, duplicates=True))
    if "local" in kinds:
        mixers["local"] = _reformer_local(local, multiple, mask)
    pattern = shortest_pattern(kinds)
    if len(kinds) % len(pattern):
        pattern = tuple(kinds)
    return ModelConfig(
        **fields | {"tie_embeddings": False} | _read_positions(c),
        num_layers=len(kinds),
        stack=Reversible(streams=2),
        use_bias="up|down|norm",
        masks=tuple(mixers[kind][0] for kind in pattern),
        mixer=tuple(mixers[kind][1] for kind in pattern),
        heads=_read_reformer_heads(c, names),
    )


def _read_buckets(c: Json) -> int | tuple[int, ...] | None:
    """The number of buckets of a round, or its factors. Raises ConfigError for odd numbers."""
    buckets = c.get("num_buckets")
    if buckets is None:
        return None
    buckets = tuple(buckets) if isinstance(buckets, list) else buckets
    numbers = buckets if isinstance(buckets, tuple) else (buckets,)
    if not numbers or any(type(n) is not int or n < 2 or n % 2 for n in numbers):
        raise ConfigError(
            f"config.json: num_buckets={buckets!r}: expected an even number, or a list of them"
        )
    return buckets


def _read_positions(c: Json) -> dict[str, Any]:
    """The fields of positions, with the context length."""
    if not get(c, "axial_pos_embds", True):
        return {"context_length": get(c, "max_position_embeddings"), "positions": Learned()}
    shape, widths = get_list(c, "axial_pos_shape"), get_list(c, "axial_pos_embds_dim")
    are_pairs = [len(shape), len(widths)] == [2, 2]
    if not are_pairs or any(type(n) is not int or n < 1 for n in (*shape, *widths)):
        raise ConfigError(
            f"config.json: axial_pos_shape={shape}, axial_pos_embds_dim={widths}: "
            "expected two sizes each"
        )
    positions = Axial(tuple(shape), tuple(widths))
    return {"context_length": math.prod(shape), "positions": positions}


def _reformer_local(local: dict, multiple: int, mask: Mask) -> tuple[Mask, Any]:
    """Mask and mixer of a local layer.

    Its chunks form a circle. A mask describes them only if no query sees past the ends of the
    sequence.
    """
    if mask == causal() and local["before"] <= 1 and not local["after"]:
        return causal() & chunked(local["chunk"], local["before"]), None
    return mask, LocalChunks(**local, multiple=multiple)


def _reformer_heads(c: Json) -> dict[str, tuple]:
    kinds = (
        "ModelWithLMHead",
        "ForMaskedLM",
        "Model",
        "ForSequenceClassification",
        "ForQuestionAnswering",
    )
    return heads_by_class(kinds, Classification(count_labels(c), pool="position_0"))


def _read_reformer_heads(c: Json, names: Collection[str]) -> tuple:
    heads = _reformer_heads(c)
    kind = class_kind(c, "Reformer", heads)
    if kind in ("ModelWithLMHead", "ForMaskedLM"):
        is_decoder = get(c, "is_decoder", False)
        only({"is_decoder": is_decoder}, is_decoder=kind == "ModelWithLMHead")
    if kind == "ForSequenceClassification":
        # in a causal model, position 0 sees no token if it is padding: transformers gives NaN
        only(c, is_decoder=False)
    if any(name.endswith(BIAS) for name in names):
        return tuple(LanguageModel(bias=True) if each == LM else each for each in heads[kind])
    return heads[kind]


def _write_reformer(config: ModelConfig) -> Json:
    layers = repeated(config.mixer, config)
    masks = repeated(config.masks, config)
    lsh: Any = next((layer for layer in layers if isinstance(layer, Reformer)), Reformer())
    local = next((layer for layer in layers if isinstance(layer, LocalChunks)), None)
    if local is None:
        local = _local_of_masks(masks)
    decoder = causal() in masks[0].conjuncts()
    heads = _reformer_heads({})
    del heads["ForMaskedLM" if decoder else "ModelWithLMHead"]
    axial = {"axial_pos_embds": False}
    if isinstance(positions := config.positions, Axial):
        axial = {"axial_pos_shape": positions.shape, "axial_pos_embds_dim": positions.widths}
    c = write_fields(config, REFORMER) | write_fields(lsh, LSH) | write_fields(local, LOCAL)
    c |= axial | write_heads(config.heads, "Reformer", heads)
    return c | {
        "is_decoder": decoder,
        "num_hidden_layers": config.num_layers,
        "attn_layers": ["lsh" if isinstance(layer, Reformer) else "local" for layer in layers],
        "max_position_embeddings": config.context_length,
        "attention_head_size": config.head_size,
        "num_buckets": lsh.buckets,
        "hash_seed": lsh.seed or None,
        "pad_token_id": 0,  # their model pads the last chunk with it
    }


def _local_of_masks(masks: list[Mask]) -> LocalChunks:
    """The local layers that a mask `causal() & chunked(chunk, before)` describes."""
    for mask in masks:
        for conjunct in mask.conjuncts():
            sizes = conjunct.args[:2]
            if len(conjunct.args) == 3 and causal() & chunked(*sizes) in masks:
                return LocalChunks(*sizes)
    return LocalChunks()


def _reformer_rules(config: ModelConfig) -> list[Rule]:
    embedding = "reformer.embeddings."
    positions = embedding + "position_embeddings."
    layer = "reformer.encoder.layers.{}."
    attention = layer + "attention.self_attention."
    around_attention = {"_norm": "layer_norm", "/out": "output.dense"}
    feedforward = {"_norm": "layer_norm", "/up": "dense.dense", "/down": "output.dense"}
    mixers = repeated(config.mixer, config)
    hashing = tuple(i for i, mixer in enumerate(mixers) if isinstance(mixer, Reformer))
    local = tuple(i for i, mixer in enumerate(mixers) if not isinstance(mixer, Reformer))
    result = [
        Rule("embedding/tokens", embedding + "word_embeddings.weight"),
        Rule("embedding/positions", positions + "embedding.weight"),
        Rule("embedding/positions/lines", positions + "weights.0", "lines"),
        Rule("embedding/positions/columns", positions + "weights.1", "leaf1"),
        Rule("layers/attention/query", attention + "query", layers=local),
        Rule("layers/attention/query", attention + "query_key", layers=hashing),
        Rule("layers/attention/key", attention + "key", layers=local),
        Rule("layers/attention/value", attention + "value"),
        *rules("layers/attention", layer + "attention.", around_attention),
        *rules("layers/feedforward", layer + "feed_forward.", feedforward),
        Rule("final_norm", "reformer.encoder.layer_norm"),
        Rule("heads/language_model/kernel", "lm_head.decoder.weight"),
        Rule("heads/span", "qa_outputs"),
        *rules("heads/classification", "classifier.", {"/pooler": "dense", "": "out_proj"}),
    ]
    # transformers 4 and 5.24 add a bias, which 5.24 reads from `BIAS`. The versions between do not
    # add `lm_head.bias`: a model trained with it needs `load(heads=(LanguageModel(bias=True),))`.
    if LanguageModel(bias=True) in config.heads:
        result.append(Rule("heads/language_model/bias", BIAS))
    elif LM in config.heads:
        result.append(Rule("embedding/tokens", "lm_head.bias", "unread"))
    return result


FAMILIES = {
    "reformer": Family(
        _read_reformer,
        _write_reformer,
        _reformer_rules,
        "reformer.",
        r"mask_value_float(16|32)$|lm_head\.bias$",
        aliases={"lm_head.bias": BIAS},
    ),
}
