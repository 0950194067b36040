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

REFORMER = {field: COMMON[field] for field in ("vocab_size", "d_model", "num_heads", "init_std")} | {
    "head_width": Key("attention_head_size", 64), "d_ff": Key("feed_forward_size"), "norm_eps": Key("layer_norm_eps", 1e-12),
    "feedforward": Key("hidden_act", "relu", ACTIVATION), "dropout_rate": Key("hidden_dropout_prob", 0.05),
    "tie_embeddings": Key("tie_word_embeddings", False),
}  # fmt: skip
LSH = {
    "chunk": Key("lsh_attn_chunk_length", 64), "rounds": Key("num_hashes", 1), "seed": Key("hash_seed", 0),
    "chunks_before": Key("lsh_num_chunks_before", 1), "chunks_after": Key("lsh_num_chunks_after", 0),
}  # fmt: skip
LOCAL = {
    "chunk": Key("local_attn_chunk_length", 64), "before": Key("local_num_chunks_before", 1),
    "after": Key("local_num_chunks_after", 0),
}  # fmt: skip


def _read_reformer(c: Json, names: Collection[str]) -> ModelConfig:
    fields, lsh, local = (read_fields(c, table) for table in (REFORMER, LSH, LOCAL))
    layers = c["attn_layers"]
    kinds = layer_kinds("attn_layers", layers, get(c, "num_hidden_layers", len(layers) or 1), "local", "lsh")
    chunks = {"lsh": lsh["chunk"], "local": local["chunk"]}
    multiple = math.lcm(*(chunks[kind] for kind in set(kinds)))
    buckets = c.get("num_buckets")
    buckets = tuple(buckets) if isinstance(buckets, list) else buckets
    numbers = buckets if isinstance(buckets, tuple) else (2 if buckets is None else buckets,)
    if not numbers or any(type(number) is not int or number < 2 or number % 2 for number in numbers):
        raise ConfigError(f"config.json: num_buckets={buckets!r}: expected an even number, or a list of them")
    mask = causal() if get(c, "is_decoder", False) else full()
    parts = {}  # of the kinds that the model has: the sizes of another kind may fit nothing
    if "lsh" in kinds:
        lsh |= {"seed": lsh["seed"] or 0, "multiple": None if multiple == lsh["chunk"] else multiple}
        parts["lsh"] = (mask, Reformer(**lsh, buckets=buckets, duplicates=True))
    if "local" in kinds:
        parts["local"] = _reformer_local(local, multiple, mask)
    pattern = shortest_pattern(kinds)
    pattern = tuple(kinds) if len(kinds) % len(pattern) else pattern
    if get(c, "axial_pos_embds", True):
        shape, widths = c["axial_pos_shape"], c["axial_pos_embds_dim"]
        if [len(shape), len(widths)] != [2, 2] or any(type(n) is not int or n < 1 for n in (*shape, *widths)):
            raise ConfigError(f"config.json: axial_pos_shape={shape}, axial_pos_embds_dim={widths}: expected two sizes each")
        fields |= {"context_length": math.prod(shape), "positions": Axial(tuple(shape), tuple(widths))}
    else:
        fields |= {"context_length": get(c, "max_position_embeddings"), "positions": Learned()}
    return ModelConfig(
        **fields | {"tie_embeddings": False}, num_layers=len(kinds), stack=Reversible(streams=2), use_bias="up|down|norm",
        masks=tuple(parts[kind][0] for kind in pattern), mixer=tuple(parts[kind][1] for kind in pattern),
        heads=_read_reformer_heads(c),
    )  # fmt: skip


def _reformer_local(local: dict, multiple: int, mask: Mask) -> tuple[Mask, Any]:
    """Mask and mixer of a local layer. Its chunks form a circle, which a mask describes only where nothing goes round."""
    if mask == causal() and local["before"] <= 1 and not local["after"]:
        return causal() & chunked(local["chunk"], local["before"]), None
    return mask, LocalChunks(**local, multiple=multiple)


def _reformer_heads(c: Json) -> dict[str, tuple]:
    kinds = ("ModelWithLMHead", "ForMaskedLM", "Model", "ForSequenceClassification", "ForQuestionAnswering")
    return heads_by_class(kinds, Classification(count_labels(c), pool="position_0"))


def _read_reformer_heads(c: Json) -> tuple:
    heads = _reformer_heads(c)
    kind = class_kind(c, "Reformer", heads)
    if kind in ("ModelWithLMHead", "ForMaskedLM"):
        only({"is_decoder": False} | c, is_decoder=kind == "ModelWithLMHead")
    if kind == "ForSequenceClassification":
        only(c, is_decoder=False)  # in a causal model slot 0 sees no token if it is padding: their result is NaN
    return heads[kind]


def _write_reformer(config: ModelConfig) -> Json:
    layers, masks = repeated(config.mixer, config), repeated(config.masks, config)
    lsh: Any = next((layer for layer in layers if isinstance(layer, Reformer)), Reformer())
    local = next((layer for layer in layers if isinstance(layer, LocalChunks)), None)
    if local is None:  # the local layers have masks
        sizes = [part.args[:2] for mask in masks for part in mask.conjuncts() if len(part.args) == 3]
        local = next((LocalChunks(*n) for n in sizes if causal() & chunked(*n) in masks), LocalChunks())
    decoder = causal() in masks[0].conjuncts()
    heads = _reformer_heads({})
    del heads["ForMaskedLM" if decoder else "ModelWithLMHead"]
    axial = {"axial_pos_embds": False}
    if isinstance(positions := config.positions, Axial):
        axial = {"axial_pos_shape": positions.shape, "axial_pos_embds_dim": positions.widths}
    c = write_fields(config, REFORMER) | write_fields(lsh, LSH) | write_fields(local, LOCAL)
    return c | axial | write_heads(config.heads, "Reformer", heads) | {
        "is_decoder": decoder, "num_hidden_layers": config.num_layers,
        "attn_layers": ["lsh" if isinstance(layer, Reformer) else "local" for layer in layers],
        "max_position_embeddings": config.context_length, "attention_head_size": config.head_size,
        "num_buckets": lsh.buckets, "hash_seed": lsh.seed or None,
        "pad_token_id": 0,  # their model pads the last chunk with it
    }  # fmt: skip


def _reformer_rules(config: ModelConfig) -> list[Rule]:
    e, layer = "reformer.embeddings.", "reformer.encoder.layers.{}."
    attention, feedforward = layer + "attention.self_attention.", layer + "feed_forward."
    layers = repeated(config.mixer, config)
    local = [i for i, mixer in enumerate(layers) if not isinstance(mixer, Reformer)]
    hashing = tuple(i for i in range(config.num_layers) if i not in local)
    result = [
        *rules("embedding/", e, {"tokens": "word_embeddings.weight", "positions": "position_embeddings.embedding.weight"}),
        Rule("embedding/positions/lines", e + "position_embeddings.weights.0", "lines"),
        Rule("embedding/positions/columns", e + "position_embeddings.weights.1", "leaf1"),
        Rule("layers/attention/query", attention + "query", layers=tuple(local)),
        Rule("layers/attention/query", attention + "query_key", layers=hashing),
        Rule("layers/attention/key", attention + "key", layers=tuple(local)),
        Rule("layers/attention/value", attention + "value"),
        *rules("layers/attention", layer + "attention.", {"_norm": "layer_norm", "/out": "output.dense"}),
        *rules("layers/feedforward", feedforward, {"_norm": "layer_norm", "/up": "dense.dense", "/down": "output.dense"}),
        Rule("final_norm", "reformer.encoder.layer_norm"),
        *rules("heads/", "", {"language_model/kernel": "lm_head.decoder.weight", "span": "qa_outputs"}),
        *rules("heads/classification", "classifier.", {"/pooler": "dense", "": "out_proj"}),
    ]
    # transformers 5 does not add this bias. For models trained with it: `load(heads=(LanguageModel(bias=True),))`
    if LanguageModel(bias=True) in config.heads:
        result.append(Rule("heads/language_model/bias", "lm_head.bias"))
    elif LanguageModel() in config.heads:
        result.append(Rule("embedding/tokens", "lm_head.bias", "unread"))
    return result


FAMILIES = {
    "reformer": Family(
        _read_reformer, _write_reformer, _reformer_rules, "reformer.", r"mask_value_float(16|32)$",
        aliases={"lm_head.decoder.bias": "lm_head.bias"},
    ),
}  # fmt: skip
