"""GPT-2, GPT-Neo, LLaMA and its relatives (Mistral, Qwen, Mixtral), Reformer."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any, Literal, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface import tables
from jaxformer.interop.huggingface.rope import read_rope, write_rope
from jaxformer.interop.huggingface.tables import REQUIRED, Family, Json, Rule, modules, only
from jaxformer.masks import Mask, causal, chunked, full, window
from jaxformer.models import mixers
from jaxformer.models.config import Axial, Classification, LanguageModel, Learned, ModelConfig, TokenClassification
from jaxformer.models.mixers import variants
from jaxformer.models.mixture import Mixture
from jaxformer.models.stacks.reversible import Reversible
from jaxformer.ops.positions import Rope


def _heads(language_model: str, classes: int) -> dict[str, tuple]:
    """Heads by the end of the class name. The last token that is not padding classifies a sequence."""
    return {
        language_model: (LanguageModel(),),
        "Model": (),
        "ForSequenceClassification": (Classification(classes, pool="last", pooler=None, bias=False),),
        "ForTokenClassification": (TokenClassification(classes),),
        "ForQuestionAnswering": (TokenClassification(2, name="span"),),
    }


def _read_heads(c: Json, name: str, language_model: str = "ForCausalLM") -> tuple:
    return tables.read_heads(c, name, _heads(language_model, tables.count_labels(c)))


def _write_heads(config: ModelConfig, name: str, language_model: str = "ForCausalLM") -> Json:
    classes = getattr(config.heads[0], "classes", None) if config.heads else None
    return tables.write_heads(config.heads, name, _heads(language_model, classes or 0))


GPT2 = {
    "vocab_size": ("vocab_size", REQUIRED), "n_positions": ("context_length", REQUIRED), "n_embd": ("d_model", REQUIRED),
    "n_layer": ("num_layers", REQUIRED), "n_head": ("num_heads", REQUIRED), "n_inner": ("d_ff", None),
    "activation_function": ("feedforward", "gelu_new"), "layer_norm_epsilon": ("norm_eps", 1e-5),
    "resid_pdrop": ("dropout_rate", 0.1), "attn_pdrop": ("attention_dropout_rate", 0.1),
    "initializer_range": ("init_std", 0.02), "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip


def _read_gpt2(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, add_cross_attention=False)
    scale = None if c.get("scale_attn_weights", True) else 1.0
    mixer = variants.inverse_depth_scale if c.get("scale_attn_by_inverse_layer_idx") else None
    heads = _read_heads(c, "GPT2", "LMHeadModel")
    return ModelConfig(**tables.read_fields(c, GPT2), attention_scale=scale, mixer=mixer, heads=heads)


def _write_gpt2(config: ModelConfig) -> Json:
    return tables.write_fields(config, GPT2) | _write_heads(config, "GPT2", "LMHeadModel") | {
        "model_type": "gpt2", "embd_pdrop": config.dropout_rate, "scale_attn_weights": config.attention_scale is None,
        "scale_attn_by_inverse_layer_idx": config.mixer is variants.inverse_depth_scale,
    }  # fmt: skip


def _gpt2_rules(config: ModelConfig) -> list[Rule]:
    h = "transformer.h.{}."
    return [
        *modules("embedding/", "transformer.", {"tokens": "wte.weight", "positions": "wpe.weight"}, "leaf"),
        *modules("layers/", h, {"attention_norm": "ln_1", "feedforward_norm": "ln_2"}, "norm"),
        Rule(tuple(f"layers/attention/{n}" for n in ("query", "key", "value")), h + "attn.c_attn", "conv1d"),
        Rule("layers/attention/out", h + "attn.c_proj", "conv1d"),
        *modules("layers/feedforward/", h + "mlp.", {"up": "c_fc", "down": "c_proj"}, "conv1d"),
        Rule("final_norm", "transformer.ln_f", "norm"),
        Rule("heads/language_model/kernel", "lm_head.weight", "leaf"),
        *modules("heads/", "", {"classification": "score", "token_classification": "classifier", "span": "qa_outputs"}),
    ]


GPT_NEO = {
    "vocab_size": ("vocab_size", REQUIRED), "max_position_embeddings": ("context_length", REQUIRED),
    "hidden_size": ("d_model", REQUIRED), "num_layers": ("num_layers", REQUIRED), "num_heads": ("num_heads", REQUIRED),
    "intermediate_size": ("d_ff", None), "activation_function": ("feedforward", "gelu_new"),
    "layer_norm_epsilon": ("norm_eps", 1e-5), "resid_dropout": ("dropout_rate", 0.0),
    "attention_dropout": ("attention_dropout_rate", 0.0), "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip


def _read_gpt_neo(c: Json, names: Collection[str]) -> ModelConfig:
    L = c["num_layers"]
    types = c.get("attention_types") or [[["global", "local"], 12]]
    kinds = c.get("attention_layers") or [kind for group, times in types for kind in group * min(times, L)]
    tables.layer_kinds("attention_layers", kinds, L, "global", "local")
    local = causal() & window(c.get("window_size", 256) - 1)
    masks = tables.shortest_pattern([causal() if kind == "global" else local for kind in kinds])
    bias, heads = "out|up|down|norm", _read_heads(c, "GPTNeo")
    return ModelConfig(**tables.read_fields(c, GPT_NEO), masks=masks, attention_scale=1.0, use_bias=bias, heads=heads)


def _write_gpt_neo(config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in tables.repeated(config.masks, config)]
    kinds = ["local" if width else "global" for width in windows]
    return tables.write_fields(config, GPT_NEO) | _write_heads(config, "GPTNeo") | {
        "model_type": "gpt_neo", "attention_types": [[[kind], 1] for kind in kinds], "attention_layers": kinds,
        "window_size": next(filter(None, windows), 256), "embed_dropout": config.dropout_rate,
    }  # fmt: skip


def _gpt_neo_rules(config: ModelConfig) -> list[Rule]:
    h = "transformer.h.{}."
    return [
        *(rule for rule in _gpt2_rules(config) if rule.kind != "conv1d"),
        *modules("layers/attention/", h + "attn.attention.", tables.PROJECTIONS),
        *modules("layers/feedforward/", h + "mlp.", {"up": "c_fc", "down": "c_proj"}),
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
    biases: Literal["attention_bias", "query, key, value", "none"] = "none"
    mlp_bias: bool = False
    norm_eps: float = 1e-6
    theta: float = 1e4
    head_width: int | None = None
    mixer: Any = None
    span_base: str = "transformer."  # prefix of the base model in files of ForQuestionAnswering


LLAMAS = {
    "llama": Llama("Llama", biases="attention_bias", mlp_bias=True),
    "mistral": Llama("Mistral", kv_heads=8, window=4096, windows="every layer", span_base="model."),
    "qwen2": Llama("Qwen2", kv_heads=32, window=4096, windows="layer types", biases="query, key, value"),
    "qwen3": Llama(
        "Qwen3", kv_heads=32, window=4096, windows="layer types", biases="attention_bias", head_width=128,
        mixer=variants.qk_norm,
    ),
    "mixtral": Llama("Mixtral", kv_heads=8, windows="every layer", norm_eps=1e-5, theta=1e6, span_base="model."),
}  # fmt: skip
LLAMA = tables.SIZES_AND_WIDTHS | {
    "head_dim": ("head_width", None), "hidden_act": ("feedforward", "silu"),
    "attention_dropout": ("attention_dropout_rate", 0.0), "tie_word_embeddings": ("tie_embeddings", False),
}  # fmt: skip


def _llama_fields(family: Llama) -> Json:
    return LLAMA | {
        "num_key_value_heads": ("num_kv_heads", family.kv_heads),
        "rms_norm_eps": ("norm_eps", family.norm_eps),
    }


def _read_llama(family: Llama, c: Json, names: Collection[str]) -> ModelConfig:
    fields = tables.read_fields(c, _llama_fields(family), gated=True)
    D, N = fields["d_model"], fields["num_heads"]
    if D % N and family.name == "Llama":  # LlamaForCausalLM refuses it with any head_dim
        raise ConfigError(f"config.json: num_attention_heads={N} does not divide hidden_size={D}")
    if family.name == "Mixtral":
        experts, top_k = c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2)
        balance_loss = c.get("router_aux_loss_coef", 0.001)
        fields["feedforward"] = Mixture(experts, top_k, fields["feedforward"], balance_loss=balance_loss)
    fields["head_width"] = fields["head_width"] or family.head_width or (D // N if D % N else None)
    biases = []
    if family.biases == "query, key, value" or (family.biases == "attention_bias" and c.get("attention_bias")):
        biases += ["query", "key", "value"] + ["out"] * (family.biases == "attention_bias")
    if family.mlp_bias and c.get("mlp_bias"):
        biases += ["gate", "up", "down"]
    return ModelConfig(
        **fields, norm="rms_norm", positions=read_rope(c, fields["head_width"] or D // N, family.theta),
        masks=_llama_masks(family, c), use_bias="|".join(biases) or False, heads=_read_heads(c, family.name),
        mixer=family.mixer,
    )  # fmt: skip


def _llama_masks(family: Llama, c: Json) -> tuple[Mask, ...]:
    L, width = c["num_hidden_layers"], c.get("sliding_window", family.window)
    if family.windows == "no layer" or (family.windows == "layer types" and not c.get("use_sliding_window")):
        width = None
    local = causal() if width is None else causal() & window(width - 1)
    if family.windows != "layer types":
        return (local,)
    first = L if width is None else c.get("max_window_layers", 28)
    kinds = c.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    tables.layer_kinds("layer_types", kinds, L, "full_attention", "sliding_attention")
    if width is None and "sliding_attention" in kinds:
        raise ConfigError("config.json: layer_types has sliding_attention; set sliding_window and use_sliding_window")
    return tables.shortest_pattern([local if kind == "sliding_attention" else causal() for kind in kinds])


def _write_llama(family: Llama, model_type: str, config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in tables.repeated(config.masks, config)]
    width, positions = next(filter(None, windows), None), config.positions
    c = tables.write_fields(config, _llama_fields(family)) | _write_heads(config, family.name) | {
        "model_type": model_type, "num_key_value_heads": config.kv_heads,
        "rope_parameters": write_rope(positions) if isinstance(positions, Rope) else {},
        "head_dim": config.head_size if family.head_width else config.head_width,
    }  # fmt: skip
    if c["head_dim"] is None:
        del c["head_dim"]
    if family.biases == "attention_bias":
        c["attention_bias"] = config.has_bias("out")
    if family.mlp_bias:
        c["mlp_bias"] = config.has_bias("up")
    if family.windows != "no layer":
        c["sliding_window"] = width
    if family.windows == "layer types":
        c |= {"use_sliding_window": width is not None, "max_window_layers": config.num_layers}
        c["layer_types"] = ["sliding_attention" if width else "full_attention" for width in windows]
    if isinstance(mixture := config.feedforward, Mixture):
        c |= {"num_local_experts": mixture.experts, "num_experts_per_tok": mixture.top_k}
        c |= {"router_aux_loss_coef": mixture.balance_loss, "hidden_act": tables.activation_name(mixture.activation)}
    return c


def _llama_rules(family: Llama, config: ModelConfig) -> list[Rule]:
    spans = any(getattr(head, "name", None) == "span" for head in config.heads)
    base = family.span_base if spans else "model."
    layer = base + "layers.{}."
    feedforward, names = layer + "mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if isinstance(config.feedforward, Mixture):
        feedforward, names = layer + "block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}
    return [
        Rule("embedding/tokens", base + "embed_tokens.weight", "leaf"),
        Rule("layers/attention_norm", layer + "input_layernorm", "norm"),
        *modules("layers/attention/", layer + "self_attn.", tables.PROJECTIONS | {"out": "o_proj"}),
        *modules("layers/attention/", layer + "self_attn.", {"query_norm": "q_norm", "key_norm": "k_norm"}, "norm"),
        Rule("layers/feedforward_norm", layer + "post_attention_layernorm", "norm"),
        Rule("layers/feedforward/router", layer + "block_sparse_moe.gate", "linear"),
        *modules("layers/feedforward/", feedforward, names),
        Rule("final_norm", base + "norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.weight", "leaf"),
        *modules("heads/", "", {"classification": "score", "token_classification": "score", "span": "qa_outputs"}),
    ]


REFORMER = {
    "vocab_size": ("vocab_size", REQUIRED), "hidden_size": ("d_model", REQUIRED), "attention_head_size": ("head_width", 64),
    "num_attention_heads": ("num_heads", REQUIRED), "feed_forward_size": ("d_ff", REQUIRED),
    "hidden_act": ("feedforward", "relu"), "layer_norm_eps": ("norm_eps", 1e-12), "initializer_range": ("init_std", 0.02),
    "hidden_dropout_prob": ("dropout_rate", 0.05), "tie_word_embeddings": ("tie_embeddings", False),
}  # fmt: skip
LSH = {  # theirs: ours, default
    "lsh_attn_chunk_length": ("chunk", 64), "num_hashes": ("rounds", 1), "num_buckets": ("buckets", None),
    "lsh_num_chunks_before": ("chunks_before", 1), "lsh_num_chunks_after": ("chunks_after", 0), "hash_seed": ("seed", 0),
}  # fmt: skip


def _read_reformer(c: Json, names: Collection[str]) -> ModelConfig:
    fields, lsh_fields = tables.read_fields(c, REFORMER) | {"tie_embeddings": False}, tables.read_fields(c, LSH)
    layers = c["attn_layers"]
    kinds = tables.layer_kinds("attn_layers", layers, c.get("num_hidden_layers", len(layers)), "local", "lsh")
    chunks = {"lsh": lsh_fields["chunk"], "local": c.get("local_attn_chunk_length", 64)}
    multiple = math.lcm(*(chunks[kind] for kind in set(kinds)))
    if (buckets := lsh_fields["buckets"]) is not None:
        numbers = buckets if isinstance(buckets, list) else [buckets]
        if not numbers or any(type(number) is not int or number < 2 or number % 2 for number in numbers):
            raise ConfigError(f"config.json: num_buckets={buckets!r}: expected an even number, or a list of them")
    buckets = tuple(buckets) if isinstance(buckets, list) else buckets
    lsh_fields |= {"buckets": buckets, "seed": lsh_fields["seed"] or 0}
    lsh = mixers.Reformer(**lsh_fields, multiple=None if multiple == lsh_fields["chunk"] else multiple, duplicates=True)
    decoder = c.get("is_decoder", False)
    mask = causal() if decoder else full()
    before, after = c.get("local_num_chunks_before", 1), c.get("local_num_chunks_after", 0)
    local, local_mask = None, causal() & chunked(chunks["local"], before)
    if not decoder or before > 1 or after:  # their chunks form a circle, which no mask describes
        local, local_mask = mixers.LocalChunks(chunks["local"], before, after, multiple), mask
    pattern = tables.shortest_pattern(kinds)
    pattern = tuple(kinds) if len(kinds) % len(pattern) else pattern
    return ModelConfig(
        **fields, num_layers=len(kinds), **_read_reformer_positions(c), stack=Reversible(streams=2), use_bias="up|down|norm",
        masks=tuple(local_mask if kind == "local" else mask for kind in pattern),
        mixer=tuple(local if kind == "local" else lsh for kind in pattern), heads=_read_reformer_heads(c),
    )  # fmt: skip


def _read_reformer_positions(c: Json) -> Json:
    if not c.get("axial_pos_embds", True):
        return {"context_length": c["max_position_embeddings"], "positions": Learned()}
    shape, widths = c["axial_pos_shape"], c["axial_pos_embds_dim"]
    if [len(shape), len(widths)] != [2, 2] or any(type(n) is not int or n < 1 for n in (*shape, *widths)):
        raise ConfigError(
            f"config.json: axial_pos_shape={shape}, axial_pos_embds_dim={widths}: expected two sizes each"
        )
    return {"context_length": math.prod(shape), "positions": Axial(tuple(shape), tuple(widths))}


def _reformer_heads(classes: int) -> dict[str, tuple]:
    """Heads by the end of the class name."""
    return {
        "ModelWithLMHead": (LanguageModel(),),
        "ForMaskedLM": (LanguageModel(),),
        "Model": (),
        "ForSequenceClassification": (Classification(classes, pool="position_0"),),
        "ForQuestionAnswering": (TokenClassification(2, name="span"),),
    }


def _read_reformer_heads(c: Json) -> tuple:
    heads = _reformer_heads(tables.count_labels(c))
    kind = tables.class_kind(c, "Reformer", heads)
    if kind in ("ModelWithLMHead", "ForMaskedLM"):
        only({"is_decoder": False} | c, is_decoder=kind == "ModelWithLMHead")
    if kind == "ForSequenceClassification":
        only(c, is_decoder=False)  # in a causal model slot 0 sees no token if it is padding: their result is NaN
    return heads[kind]


def _write_reformer(config: ModelConfig) -> Json:
    layers, masks = tables.repeated(config.mixer, config), tables.repeated(config.masks, config)
    positions = config.positions
    lsh: Any = next((layer for layer in layers if isinstance(layer, mixers.Reformer)), mixers.Reformer())
    local = next((layer for layer in layers if isinstance(layer, mixers.LocalChunks)), None)
    if local is None:  # the local layers have masks
        sizes = [part.args[:2] for mask in masks for part in mask.conjuncts() if len(part.args) == 3]
        local = next((mixers.LocalChunks(*n) for n in sizes if causal() & chunked(*n) in masks), mixers.LocalChunks())
    decoder = causal() in masks[0].conjuncts()
    heads = _reformer_heads(getattr(config.heads[0], "classes", 0) if config.heads else 0)
    del heads["ForMaskedLM" if decoder else "ModelWithLMHead"]
    axial = {"axial_pos_embds": False}
    if isinstance(positions, Axial):
        axial = {"axial_pos_shape": list(positions.shape), "axial_pos_embds_dim": list(positions.widths)}
    c = tables.write_fields(config, REFORMER) | tables.write_fields(lsh, LSH)
    return c | axial | tables.write_heads(config.heads, "Reformer", heads) | {
        "model_type": "reformer", "is_decoder": decoder,
        "num_hidden_layers": config.num_layers, "attention_head_size": config.head_size,
        "attn_layers": ["lsh" if isinstance(layer, mixers.Reformer) else "local" for layer in layers],
        "max_position_embeddings": config.context_length,
        "num_buckets": list(lsh.buckets) if isinstance(lsh.buckets, tuple) else lsh.buckets,
        "local_attn_chunk_length": local.chunk, "local_num_chunks_before": local.before,
        "local_num_chunks_after": local.after, "hash_seed": lsh.seed or None,
        "pad_token_id": 0,  # their model pads the last chunk with it
    }  # fmt: skip


def _reformer_rules(config: ModelConfig) -> list[Rule]:
    e, layer = "reformer.embeddings.", "reformer.encoder.layers.{}."
    attention, feedforward = layer + "attention.self_attention.", layer + "feed_forward."
    layers = tables.repeated(config.mixer, config)
    local = [i for i, mixer in enumerate(layers) if not isinstance(mixer, mixers.Reformer)]
    hashing = tuple((i, i) for i in range(config.num_layers) if i not in local)
    # transformers 5 does not add this bias. For models trained with it: `load(heads=(LanguageModel(bias=True),))`
    heads = [head for head in config.heads if isinstance(head, LanguageModel)]
    bias = Rule("embedding/tokens", "lm_head.bias", "unread")
    if heads and heads[0].bias:
        bias = Rule("heads/language_model/bias", "lm_head.bias", "leaf")
    return [
        Rule("embedding/tokens", e + "word_embeddings.weight", "leaf"),
        Rule("embedding/positions", e + "position_embeddings.embedding.weight", "leaf"),
        Rule("embedding/positions/lines", e + "position_embeddings.weights.0", "lines"),
        Rule("embedding/positions/columns", e + "position_embeddings.weights.1", "columns"),
        Rule("layers/attention_norm", layer + "attention.layer_norm", "norm"),
        Rule("layers/attention/query", attention + "query", "linear", tuple((i, i) for i in local)),
        Rule("layers/attention/query", attention + "query_key", "linear", hashing),
        Rule("layers/attention/key", attention + "key", "linear", tuple(enumerate(local))),
        Rule("layers/attention/value", attention + "value", "linear"),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/feedforward_norm", feedforward + "layer_norm", "norm"),
        *modules("layers/feedforward/", feedforward, {"up": "dense.dense", "down": "output.dense"}),
        Rule("final_norm", "reformer.encoder.layer_norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.decoder.weight", "leaf"),
        *([bias] if heads else []),
        *modules("heads/", "", {"classification/pooler": "classifier.dense", "classification": "classifier.out_proj"}),
        Rule("heads/span", "qa_outputs", "linear"),
    ]


GPT_ALIASES = {"lm_head.weight": "transformer.wte.weight"}
GPT_MASKS, NEO_MASKS = r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$"
LLAMA_ALIASES = {"lm_head.weight": "model.embed_tokens.weight"}
REFORMER_ALIASES = {"lm_head.decoder.bias": "lm_head.bias"}
FAMILIES = {
    "gpt2": Family(_read_gpt2, _write_gpt2, _gpt2_rules, "transformer.", GPT_MASKS, GPT_ALIASES),
    "gpt_neo": Family(_read_gpt_neo, _write_gpt_neo, _gpt_neo_rules, "transformer.", NEO_MASKS, GPT_ALIASES),
} | {
    kind: Family(
        partial(_read_llama, llama), partial(_write_llama, llama, kind), partial(_llama_rules, llama), "model.",
        aliases=LLAMA_ALIASES,
    )
    for kind, llama in LLAMAS.items()
} | {
    "reformer": Family(
        _read_reformer, _write_reformer, _reformer_rules, "reformer.", r"mask_value_float(16|32)$", REFORMER_ALIASES
    ),
}  # fmt: skip
