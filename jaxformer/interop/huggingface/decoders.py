"""GPT-2, LLaMA and its relatives (Mistral, Qwen, Mixtral), Reformer."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any, Literal, NamedTuple

from jaxformer import zoo
from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface import tables
from jaxformer.interop.huggingface.tables import ACTIVATION, COMMON, GATED, Family, Json, Key, Rule, get, only, rules
from jaxformer.masks import Mask, causal, chunked, full, window
from jaxformer.models.config import Axial, Classification, LanguageModel, Learned, ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.zoo.reversible import Reversible

KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
GPT2 = COMMON | {
    "context_length": Key("n_positions"), "d_model": Key("n_embd"), "num_layers": Key("n_layer"), "num_heads": Key("n_head"),
    "d_ff": Key("n_inner", None), "dropout_rate": Key("resid_pdrop", 0.1), "attention_dropout_rate": Key("attn_pdrop", 0.1),
    "feedforward": Key("activation_function", "gelu_new", ACTIVATION), "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "attention_scale": Key("scale_attn_weights", True, {True: None, False: 1.0}),
    "mixer": Key("scale_attn_by_inverse_layer_idx", False, {False: None, True: zoo.temperature.inverse_depth_scale}),
}  # fmt: skip
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


def _heads(c: Json, language_model: str = "ForCausalLM") -> dict[str, tuple]:
    """The last token that is not padding classifies a sequence."""
    sequence = Classification(tables.count_labels(c), pool="last", pooler=None, bias=False)
    return tables.heads_by_class((language_model, *KINDS), sequence)


def _read_gpt2(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, add_cross_attention=False)
    return ModelConfig(**tables.read_fields(c, GPT2), heads=tables.read_heads(c, "GPT2", _heads(c, "LMHeadModel")))


def _write_gpt2(config: ModelConfig) -> Json:
    heads = tables.write_heads(config.heads, "GPT2", _heads({}, "LMHeadModel"))
    return tables.write_fields(config, GPT2) | heads | {"embd_pdrop": config.dropout_rate}


TASKS = {"classification": "score", "token_classification": "classifier", "span": "qa_outputs"}
GPT2_LAYER = "transformer.h.{}."
GPT2_LINEAR = {"attention/out": "attn.c_proj", "feedforward/up": "mlp.c_fc", "feedforward/down": "mlp.c_proj"}
GPT2_RULES = [
    Rule(tuple(f"layers/attention/{name}" for name in ("query", "key", "value")), GPT2_LAYER + "attn.c_attn", "conv1d"),
    *rules("layers/", GPT2_LAYER, GPT2_LINEAR, "conv1d"),
    *rules("", "transformer.", {"embedding/tokens": "wte.weight", "embedding/positions": "wpe.weight", "final_norm": "ln_f"}),
    *rules("layers/", GPT2_LAYER, {"attention_norm": "ln_1", "feedforward_norm": "ln_2"}),
    *rules("heads/", "", TASKS | {"language_model/kernel": "lm_head.weight"}),
]


def left_window(mask: Mask) -> int | None:
    """w of `causal() & window(w - 1)`, the number of keys that a query sees; None for other masks."""
    sides = [part.args[0] for part in mask.conjuncts() if part.args]
    return next((left + 1 for left in sides if mask == causal() & window(left)), None)


class Llama(NamedTuple):
    """LLaMA or a relative: the defaults of config.json, and its differences from LLaMA."""

    name: str  # prefix of its class names
    kv_heads: int | None = None
    window: int | None = None  # the default of sliding_window
    windows: Literal["no layer", "every layer", "layer types"] = "no layer"  # layers with sliding_window
    bias: str = ""  # layers that have one
    biases: dict[str, str] = {}  # noqa: RUF012 (never written to): {flag: layers that have one if it is set}
    norm_eps: float = 1e-6
    theta: float = 1e4
    head_width: int | None = None
    mixer: Any = None
    span_base: str = "transformer."  # prefix of the base model in files of ForQuestionAnswering

    @property
    def fields(self) -> dict[str, Key]:
        return COMMON | {
            "head_width": Key("head_dim", None), "num_kv_heads": Key("num_key_value_heads", self.kv_heads),
            "feedforward": Key("hidden_act", "silu", GATED), "norm_eps": Key("rms_norm_eps", self.norm_eps),
            "attention_dropout_rate": Key("attention_dropout", 0.0), "tie_embeddings": Key("tie_word_embeddings", False),
        }  # fmt: skip


ALL_BIASES = "query|key|value|out"
LLAMAS = {
    "llama": Llama("Llama", biases={"attention_bias": ALL_BIASES, "mlp_bias": "gate|up|down"}),
    "mistral": Llama("Mistral", kv_heads=8, window=4096, windows="every layer", span_base="model."),
    "qwen2": Llama("Qwen2", kv_heads=32, window=4096, windows="layer types", bias="query|key|value"),
    "qwen3": Llama(
        "Qwen3", kv_heads=32, window=4096, windows="layer types", biases={"attention_bias": ALL_BIASES}, head_width=128,
        mixer=zoo.qk_norm.qk_norm,
    ),
    "mixtral": Llama("Mixtral", kv_heads=8, windows="every layer", norm_eps=1e-5, theta=1e6, span_base="model."),
}  # fmt: skip
MIXTURE = {
    "experts": Key("num_local_experts", 8), "top_k": Key("num_experts_per_tok", 2),
    "activation": Key("hidden_act", "silu", GATED), "balance_loss": Key("router_aux_loss_coef", 0.001),
}  # fmt: skip


def _read_llama(family: Llama, c: Json, names: Collection[str]) -> ModelConfig:
    fields = tables.read_fields(c, family.fields)
    D, N = fields["d_model"], fields["num_heads"]
    if D % N and family.name == "Llama":  # LlamaForCausalLM refuses it with any head_dim
        raise ConfigError(f"config.json: num_attention_heads={N} does not divide hidden_size={D}")
    if family.name == "Mixtral":
        fields["feedforward"] = Mixture(**tables.read_fields(c, MIXTURE))
    fields["head_width"] = fields["head_width"] or family.head_width or (D // N if D % N else None)
    biases = [family.bias, *(layers for flag, layers in family.biases.items() if get(c, flag, False))]
    return ModelConfig(
        **fields, norm="rms_norm", positions=tables.read_rope(c, fields["head_width"] or D // N, family.theta),
        masks=_llama_masks(family, c), use_bias="|".join(filter(None, biases)) or False, mixer=family.mixer,
        heads=tables.read_heads(c, family.name, _heads(c)),
    )  # fmt: skip


def _llama_masks(family: Llama, c: Json) -> tuple[Mask, ...]:
    L, width = get(c, "num_hidden_layers"), get(c, "sliding_window", family.window)
    if family.windows == "no layer" or (family.windows == "layer types" and not get(c, "use_sliding_window", False)):
        width = None
    local = causal() if width is None else causal() & window(width - 1)
    if family.windows != "layer types":
        return (local,)
    first = L if width is None else get(c, "max_window_layers", 28)
    kinds = c.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    tables.layer_kinds("layer_types", kinds, L, "full_attention", "sliding_attention")
    if width is None and "sliding_attention" in kinds:
        raise ConfigError("config.json: layer_types has sliding_attention; set sliding_window and use_sliding_window")
    return tables.shortest_pattern([local if kind == "sliding_attention" else causal() for kind in kinds])


def _write_llama(family: Llama, config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in tables.repeated(config.masks, config)]
    width = next(filter(None, windows), None)
    c = tables.write_fields(config, family.fields) | tables.write_heads(config.heads, family.name, _heads({})) | {
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_size if family.head_width else config.head_width,
    }  # fmt: skip
    c |= tables.write_rope(config.positions)
    if c["head_dim"] is None:
        del c["head_dim"]
    c |= {flag: config.has_bias(layers.split("|")[-1]) for flag, layers in family.biases.items()}
    if family.windows != "no layer":
        c["sliding_window"] = width
    if family.windows == "layer types":
        c |= {"use_sliding_window": width is not None, "max_window_layers": config.num_layers}
        c["layer_types"] = ["sliding_attention" if width else "full_attention" for width in windows]
    return c | tables.write_fields(config.feedforward, MIXTURE) if family.name == "Mixtral" else c


def _llama_rules(family: Llama, config: ModelConfig) -> list[Rule]:
    base = family.span_base if tables.SPAN in config.heads else "model."
    layer = base + "layers.{}."
    feedforward, names = layer + "mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if isinstance(config.feedforward, Mixture):
        feedforward, names = layer + "block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}
    attention = tables.PROJECTIONS | {"out": "o_proj", "query_norm": "q_norm", "key_norm": "k_norm"}
    return [
        *rules("", base, {"embedding/tokens": "embed_tokens.weight", "final_norm": "norm"}),
        *rules("layers/", layer, {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}),
        *rules("layers/attention/", layer + "self_attn.", attention),
        Rule("layers/feedforward/router", layer + "block_sparse_moe.gate"),
        *rules("layers/feedforward/", feedforward, names),
        *rules("heads/", "", TASKS | {"language_model/kernel": "lm_head.weight", "token_classification": "score"}),
    ]


def _llama_family(llama: Llama) -> Family:
    read, write, rules = partial(_read_llama, llama), partial(_write_llama, llama), partial(_llama_rules, llama)
    return Family(read, write, rules, "model.", aliases={"lm_head.weight": "model.embed_tokens.weight"})


def _read_reformer(c: Json, names: Collection[str]) -> ModelConfig:
    fields, lsh, local = (tables.read_fields(c, table) for table in (REFORMER, LSH, LOCAL))
    layers = c["attn_layers"]
    kinds = tables.layer_kinds("attn_layers", layers, get(c, "num_hidden_layers", len(layers) or 1), "local", "lsh")
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
        parts["lsh"] = (mask, zoo.Reformer(**lsh, buckets=buckets, duplicates=True))
    if "local" in kinds:
        parts["local"] = _reformer_local(local, multiple, mask)
    pattern = tables.shortest_pattern(kinds)
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
    return mask, zoo.LocalChunks(**local, multiple=multiple)


def _reformer_heads(c: Json) -> dict[str, tuple]:
    kinds = ("ModelWithLMHead", "ForMaskedLM", "Model", "ForSequenceClassification", "ForQuestionAnswering")
    return tables.heads_by_class(kinds, Classification(tables.count_labels(c), pool="position_0"))


def _read_reformer_heads(c: Json) -> tuple:
    heads = _reformer_heads(c)
    kind = tables.class_kind(c, "Reformer", heads)
    if kind in ("ModelWithLMHead", "ForMaskedLM"):
        only({"is_decoder": False} | c, is_decoder=kind == "ModelWithLMHead")
    if kind == "ForSequenceClassification":
        only(c, is_decoder=False)  # in a causal model slot 0 sees no token if it is padding: their result is NaN
    return heads[kind]


def _write_reformer(config: ModelConfig) -> Json:
    layers, masks = tables.repeated(config.mixer, config), tables.repeated(config.masks, config)
    lsh: Any = next((layer for layer in layers if isinstance(layer, zoo.Reformer)), zoo.Reformer())
    local = next((layer for layer in layers if isinstance(layer, zoo.LocalChunks)), None)
    if local is None:  # the local layers have masks
        sizes = [part.args[:2] for mask in masks for part in mask.conjuncts() if len(part.args) == 3]
        local = next((zoo.LocalChunks(*n) for n in sizes if causal() & chunked(*n) in masks), zoo.LocalChunks())
    decoder = causal() in masks[0].conjuncts()
    heads = _reformer_heads({})
    del heads["ForMaskedLM" if decoder else "ModelWithLMHead"]
    axial = {"axial_pos_embds": False}
    if isinstance(positions := config.positions, Axial):
        axial = {"axial_pos_shape": positions.shape, "axial_pos_embds_dim": positions.widths}
    c = tables.write_fields(config, REFORMER) | tables.write_fields(lsh, LSH) | tables.write_fields(local, LOCAL)
    return c | axial | tables.write_heads(config.heads, "Reformer", heads) | {
        "is_decoder": decoder, "num_hidden_layers": config.num_layers,
        "attn_layers": ["lsh" if isinstance(layer, zoo.Reformer) else "local" for layer in layers],
        "max_position_embeddings": config.context_length, "attention_head_size": config.head_size,
        "num_buckets": lsh.buckets, "hash_seed": lsh.seed or None,
        "pad_token_id": 0,  # their model pads the last chunk with it
    }  # fmt: skip


def _reformer_rules(config: ModelConfig) -> list[Rule]:
    e, layer = "reformer.embeddings.", "reformer.encoder.layers.{}."
    attention, feedforward = layer + "attention.self_attention.", layer + "feed_forward."
    layers = tables.repeated(config.mixer, config)
    local = [i for i, mixer in enumerate(layers) if not isinstance(mixer, zoo.Reformer)]
    hashing = tuple((i, i) for i in range(config.num_layers) if i not in local)
    result = [
        *rules("embedding/", e, {"tokens": "word_embeddings.weight", "positions": "position_embeddings.embedding.weight"}),
        Rule("embedding/positions/lines", e + "position_embeddings.weights.0", "lines"),
        Rule("embedding/positions/columns", e + "position_embeddings.weights.1", "leaf1"),
        Rule("layers/attention/query", attention + "query", layers=tuple((i, i) for i in local)),
        Rule("layers/attention/query", attention + "query_key", layers=hashing),
        Rule("layers/attention/key", attention + "key", layers=tuple(enumerate(local))),
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


GPT2_ALIASES, GPT2_MASKS = {"lm_head.weight": "transformer.wte.weight"}, r"\.attn\.(masked_)?bias$"
REFORMER_ALIASES = {"lm_head.decoder.bias": "lm_head.bias"}
FAMILIES = {
    "gpt2": Family(_read_gpt2, _write_gpt2, lambda config: GPT2_RULES, "transformer.", GPT2_MASKS, aliases=GPT2_ALIASES),
    **{kind: _llama_family(llama) for kind, llama in LLAMAS.items()},
    "reformer": Family(
        _read_reformer, _write_reformer, _reformer_rules, "reformer.", r"mask_value_float(16|32)$", aliases=REFORMER_ALIASES
    ),
}
