"""GPT-2, GPT-Neo, LLaMA and what became of it (Mistral, Qwen, Mixtral), Reformer."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface.tables import NAME as ACTIVATION_NAME
from jaxformer.interop.huggingface.tables import (
    REQUIRED,
    Family,
    Json,
    Rule,
    architecture,
    check_kinds,
    labels,
    layer_kinds,
    modules,
    only,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
    written_labels,
)
from jaxformer.masks import Mask, causal, chunked, full, window
from jaxformer.models import mixers
from jaxformer.models.config import Axial, Classification, LanguageModel, Learned, ModelConfig, TokenClassification
from jaxformer.models.mixers import variants
from jaxformer.models.mixture import Mixture
from jaxformer.models.stacks.reversible import Reversible
from jaxformer.ops.feedforward import GATES
from jaxformer.ops.positions import NTK, Linear, Llama3, LongRoPE, Rope, YaRN, rope_frequencies


def _kinds(language_model: str, classes: int) -> dict[str, tuple]:
    """What a class's name ends in -> its heads. A sequence is classified by its last token that is not padding."""
    return {
        language_model: (LanguageModel(),),
        "Model": (),
        "ForSequenceClassification": (Classification(classes, pool="last", pooler=None, bias=False),),
        "ForTokenClassification": (TokenClassification(classes),),
        "ForQuestionAnswering": (TokenClassification(2, name="span"),),
    }


def _read_heads(c: Json, name: str, language_model: str = "ForCausalLM") -> tuple:
    kinds = _kinds(language_model, labels(c))
    return kinds[architecture(c, *(name + kind for kind in kinds)).removeprefix(name)]


def _write_heads(config: ModelConfig, name: str, language_model: str = "ForCausalLM") -> Json:
    head = config.heads[0] if config.heads else None
    kinds = _kinds(language_model, getattr(head, "classes", None) or 0)
    return {"architectures": [_class_with_heads(config, name, kinds)]} | written_labels(head)


def _class_with_heads(config: ModelConfig, name: str, kinds: dict[str, tuple]) -> str:
    for kind, heads in kinds.items():
        if heads == config.heads:
            return name + kind
    raise ConfigError(f"model.heads={config.heads}: expected those of a class {name}... of transformers: {kinds}")


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
    return ModelConfig(**read_fields(c, GPT2), attention_scale=scale, mixer=mixer, heads=heads)


def _write_gpt2(config: ModelConfig) -> Json:
    return write_fields(config, GPT2) | _write_heads(config, "GPT2", "LMHeadModel") | {
        "model_type": "gpt2", "embd_pdrop": config.dropout_rate, "scale_attn_weights": config.attention_scale is None,
        "scale_attn_by_inverse_layer_idx": config.mixer is variants.inverse_depth_scale,
    }  # fmt: skip


def _gpt2_rules(config: ModelConfig) -> list[Rule]:
    h = "transformer.h.{}."
    return [
        Rule("embedding/tokens", "transformer.wte.weight", "leaf"),
        Rule("embedding/positions", "transformer.wpe.weight", "leaf"),
        Rule("layers/attention_norm", h + "ln_1", "norm"),
        Rule(tuple(f"layers/attention/{n}" for n in ("query", "key", "value")), h + "attn.c_attn", "conv1d"),
        Rule("layers/attention/out", h + "attn.c_proj", "conv1d"),
        Rule("layers/feedforward_norm", h + "ln_2", "norm"),
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
    layer_kinds("attention_layers", kinds, L, "global", "local")
    local = causal() & window(c.get("window_size", 256) - 1)
    masks = shortest_pattern([causal() if kind == "global" else local for kind in kinds])
    bias, heads = "out|up|down|norm", _read_heads(c, "GPTNeo")
    return ModelConfig(**read_fields(c, GPT_NEO), masks=masks, attention_scale=1.0, use_bias=bias, heads=heads)


def _write_gpt_neo(config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in repeated(config.masks, config)]
    kinds = ["local" if width else "global" for width in windows]
    return write_fields(config, GPT_NEO) | _write_heads(config, "GPTNeo") | {
        "model_type": "gpt_neo", "attention_types": [[[kind], 1] for kind in kinds], "attention_layers": kinds,
        "window_size": next(filter(None, windows), 256), "embed_dropout": config.dropout_rate,
    }  # fmt: skip


def _gpt_neo_rules(config: ModelConfig) -> list[Rule]:
    h, attention = "transformer.h.{}.", {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    return [
        *(rule for rule in _gpt2_rules(config) if rule.kind != "conv1d"),
        *modules("layers/attention/", h + "attn.attention.", attention),
        *modules("layers/feedforward/", h + "mlp.", {"up": "c_fc", "down": "c_proj"}),
    ]


def left_window(mask: Mask) -> int | None:
    """w of `causal() & window(w - 1)`: the keys that a query sees, itself counted; None for other masks."""
    sides = [part.args[0] for part in mask.conjuncts() if part.args]
    return next((left + 1 for left in sides if mask == causal() & window(left)), None)


def read_rope(c: Json, head_width: int) -> Rope:
    """Both dialects: `rope_parameters`, or `rope_theta` with `rope_scaling`, whose kind is `type` or `rope_type`.

    The classes here turn the whole head: a partial rotary factor is ignored where nothing is scaled and fails elsewhere.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(c.get(key), dict | None):
            raise ConfigError(f"config.json: {key}={c[key]!r}: expected an object")
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    rope = {key: value for key, value in rope.items() if value is not None}
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(f"config.json: rope_parameters.{nested[0]}: one rotation for all layers is supported")
    check_kinds(rope, 0)
    theta = rope.get("rope_theta", c.get("rope_theta", 1e6 if c["model_type"] == "mixtral" else 1e4))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        only({"partial_rotary_factor": c.get("partial_rotary_factor") or 1.0} | rope, partial_rotary_factor=1.0)
    turning = Rope(float(theta), 1.0, "half", _read_scaling(c, rope, kind))
    try:
        rope_frequencies(head_width, turning)
    except ValueError as error:
        raise ConfigError(f"config.json: head_dim={head_width}, rope_type={kind!r}: {error}") from None
    return turning


def _read_scaling(c: Json, rope: Json, kind: str):
    length: Any = c.get("max_position_embeddings")
    original = c.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or length
    stretch = float(rope.get("factor", length / original))
    sharpen = rope.get("attention_factor")
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(float(rope["factor"]))
        case "dynamic":
            return NTK(float(rope["factor"]), length)
        case "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return Llama3(float(rope["factor"]), original, low, high)
        case "yarn":
            if sharpen is None and rope.get("mscale") and rope.get("mscale_all_dim") and stretch > 1:
                one, two = (0.1 * rope[key] * math.log(stretch) + 1.0 for key in ("mscale", "mscale_all_dim"))
                sharpen = one / two
            fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
            return YaRN(stretch, original, fast, slow, rope.get("truncate", True), sharpen)
        case "longrope":
            if sharpen is None:
                sharpen = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
            short, long = (tuple(map(float, rope[key])) for key in ("short_factor", "long_factor"))
            return LongRoPE(short, long, original, float(sharpen))
    raise ConfigError(f"config.json: rope_type={kind!r}: expected default, linear, dynamic, llama3, yarn or longrope")


def write_rope(rope: Rope) -> Json:
    out: Json = {"rope_theta": rope.theta, "rope_type": "default"}
    match rope.scaling:
        case Linear(factor):
            out |= {"rope_type": "linear", "factor": factor}
        case NTK(factor):
            out |= {"rope_type": "dynamic", "factor": factor}
        case Llama3(factor, original, low, high):
            out |= {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original}
            out |= {"low_freq_factor": low, "high_freq_factor": high}
        case YaRN(factor, original, fast, slow, truncate, sharpen):
            out |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            out |= {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            out |= {} if sharpen is None else {"attention_factor": sharpen}
        case LongRoPE(short, long, original, sharpen):
            out |= {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
            out |= {"original_max_position_embeddings": original, "attention_factor": sharpen}
    return out


LLAMAS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}
LLAMA = {
    "vocab_size": ("vocab_size", REQUIRED), "max_position_embeddings": ("context_length", REQUIRED),
    "hidden_size": ("d_model", REQUIRED), "num_hidden_layers": ("num_layers", REQUIRED),
    "num_attention_heads": ("num_heads", REQUIRED), "num_key_value_heads": ("num_kv_heads", None),
    "head_dim": ("head_width", None), "intermediate_size": ("d_ff", REQUIRED), "hidden_act": ("feedforward", "silu"),
    "rms_norm_eps": ("norm_eps", 1e-6), "attention_dropout": ("attention_dropout_rate", 0.0),
    "initializer_range": ("init_std", 0.02), "tie_word_embeddings": ("tie_embeddings", False),
}  # fmt: skip


def _read_llama(c: Json, names: Collection[str]) -> ModelConfig:
    kind = c["model_type"]
    keys = {"num_key_value_heads": ("num_kv_heads", {"llama": None, "mistral": 8, "mixtral": 8}.get(kind, 32))}
    keys |= {"rms_norm_eps": ("norm_eps", 1e-5)} if kind == "mixtral" else {}
    fields = read_fields(c, LLAMA | keys, gated=True)
    D, N = fields["d_model"], fields["num_heads"]
    if D % N and kind == "llama":  # its class refuses that whatever head_dim is
        raise ConfigError(f"config.json: num_attention_heads={N} does not divide hidden_size={D}")
    if kind == "mixtral":
        experts, chosen = c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2)
        fields["feedforward"] = Mixture(
            experts, chosen, fields["feedforward"], balance_loss=c.get("router_aux_loss_coef", 0.001)
        )
    if kind == "qwen3":
        fields |= {"mixer": variants.qk_norm, "head_width": fields["head_width"] or 128}
    fields["head_width"] = fields["head_width"] or (D // N if D % N else None)
    bias = kind in ("llama", "qwen3") and c.get("attention_bias")
    biases = ["query", "key", "value"] if kind == "qwen2" or bias else []
    biases += ["out"] * bool(bias) + ["gate", "up", "down"] * bool(kind == "llama" and c.get("mlp_bias"))
    return ModelConfig(
        **fields, norm="rms_norm", positions=read_rope(c, fields["head_width"] or D // N), masks=_llama_masks(c),
        use_bias="|".join(biases) or False, heads=_read_heads(c, LLAMAS[kind]),
    )  # fmt: skip


def _llama_masks(c: Json) -> tuple[Mask, ...]:
    kind, L = c["model_type"], c["num_hidden_layers"]
    width = c.get("sliding_window", None if kind in ("llama", "mixtral") else 4096)
    if kind == "llama" or (kind in ("qwen2", "qwen3") and not c.get("use_sliding_window")):
        width = None
    local = causal() if width is None else causal() & window(width - 1)
    if kind not in ("qwen2", "qwen3"):
        return (local,)
    first = L if width is None else c.get("max_window_layers", 28)
    kinds = c.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    layer_kinds("layer_types", kinds, L, "full_attention", "sliding_attention")
    if width is None and "sliding_attention" in kinds:
        raise ConfigError("config.json: layer_types has sliding_attention; set sliding_window and use_sliding_window")
    return shortest_pattern([local if one == "sliding_attention" else causal() for one in kinds])


def _write_llama(kind: str):
    def write(config: ModelConfig) -> Json:
        windows = [left_window(mask) for mask in repeated(config.masks, config)]
        width, positions = next(filter(None, windows), None), config.positions
        c = write_fields(config, LLAMA) | _write_heads(config, LLAMAS[kind]) | {
            "model_type": kind, "num_key_value_heads": config.kv_heads,
            "rope_parameters": write_rope(positions) if isinstance(positions, Rope) else {},
        }  # fmt: skip
        if kind in ("llama", "qwen3"):
            c["attention_bias"] = config.has_bias("out")
        if kind == "llama":
            c["mlp_bias"] = config.has_bias("up")
        if kind in ("mistral", "mixtral"):
            c["sliding_window"] = width
        if kind in ("qwen2", "qwen3"):
            c |= {
                "use_sliding_window": width is not None,
                "sliding_window": width,
                "max_window_layers": config.num_layers,
            }
            c["layer_types"] = ["sliding_attention" if one else "full_attention" for one in windows]
        if config.head_width is None:
            del c["head_dim"]
        if kind == "qwen3":
            c["head_dim"] = config.head_size
        if isinstance(moe := config.feedforward, Mixture):
            c |= {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k}
            c |= {
                "router_aux_loss_coef": moe.balance_loss,
                "hidden_act": ACTIVATION_NAME.get(GATES.get(moe.activation, "")),
            }
        return c

    return write


def _llama_rules(kind: str, config: ModelConfig) -> list[Rule]:
    spans = any(getattr(head, "name", None) == "span" for head in config.heads)
    base = "transformer." if spans and kind in ("llama", "qwen2", "qwen3") else "model."  # an old name of theirs
    layer = base + "layers.{}."
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    feed, names = layer + "mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if isinstance(config.feedforward, Mixture):
        feed, names = layer + "block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}
    return [
        Rule("embedding/tokens", base + "embed_tokens.weight", "leaf"),
        Rule("layers/attention_norm", layer + "input_layernorm", "norm"),
        *modules("layers/attention/", layer + "self_attn.", attention),
        *modules("layers/attention/", layer + "self_attn.", {"query_norm": "q_norm", "key_norm": "k_norm"}, "norm"),
        Rule("layers/feedforward_norm", layer + "post_attention_layernorm", "norm"),
        Rule("layers/feedforward/router", layer + "block_sparse_moe.gate", "linear"),
        *modules("layers/feedforward/", feed, names),
        Rule("final_norm", base + "norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.weight", "leaf"),
        *modules("heads/", "", {"classification": "score", "token_classification": "score", "span": "qa_outputs"}),
    ]


REFORMER = {
    "vocab_size": ("vocab_size", REQUIRED), "hidden_size": ("d_model", REQUIRED), "attention_head_size": ("head_width", 64),
    "num_attention_heads": ("num_heads", REQUIRED), "feed_forward_size": ("d_ff", REQUIRED),
    "hidden_act": ("feedforward", "relu"), "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout_rate", 0.05), "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}  # fmt: skip
LSH = {  # theirs: ours, default
    "lsh_attn_chunk_length": ("chunk", 64), "num_hashes": ("rounds", 1), "num_buckets": ("buckets", None),
    "lsh_num_chunks_before": ("chunks_before", 1), "lsh_num_chunks_after": ("chunks_after", 0), "hash_seed": ("seed", 0),
}  # fmt: skip


def _read_reformer(c: Json, names: Collection[str]) -> ModelConfig:
    fields, how = read_fields(c, REFORMER) | {"tie_embeddings": False}, read_fields(c, LSH)
    layers = c["attn_layers"]
    kinds = layer_kinds("attn_layers", layers, c.get("num_hidden_layers", len(layers)), "local", "lsh")
    chunks = {"lsh": how["chunk"], "local": c.get("local_attn_chunk_length", 64)}
    multiple = math.lcm(*(chunks[kind] for kind in set(kinds)))
    if (b := how["buckets"]) is not None:
        numbers = b if isinstance(b, list) else [b]
        if not numbers or any(type(number) is not int or number < 2 or number % 2 for number in numbers):
            raise ConfigError(f"config.json: num_buckets={b!r}: expected an even number, or a list of them")
    how |= {"buckets": tuple(b) if isinstance(b, list) else b, "seed": how["seed"] or 0}
    lsh = mixers.Reformer(**how, multiple=None if multiple == how["chunk"] else multiple, duplicates=True)
    decoder = c.get("is_decoder", False)
    before, after = c.get("local_num_chunks_before", 1), c.get("local_num_chunks_after", 0)
    seen, local, local_mask = causal() if decoder else full(), None, causal() & chunked(chunks["local"], before)
    if not decoder or before > 1 or after:  # a circle of chunks then shows others, or one chunk twice
        local, local_mask = mixers.LocalChunks(chunks["local"], before, after, multiple), seen
    pattern = shortest_pattern(kinds)
    pattern = tuple(kinds) if len(kinds) % len(pattern) else pattern
    return ModelConfig(
        **fields, num_layers=len(kinds), **_read_reformer_positions(c), stack=Reversible(streams=2), use_bias="up|down|norm",
        masks=tuple(local_mask if kind == "local" else seen for kind in pattern),
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


REFORMER_HEADS = {  # what the class's name ends in -> heads, given the number of labels
    "ModelWithLMHead": lambda n: (LanguageModel(),),
    "ForMaskedLM": lambda n: (LanguageModel(),),
    "Model": lambda n: (),
    "ForSequenceClassification": lambda n: (Classification(n, pool="position_0"),),
    "ForQuestionAnswering": lambda n: (TokenClassification(2, name="span"),),
}


def _read_reformer_heads(c: Json) -> tuple:
    kind = architecture(c, *("Reformer" + kind for kind in REFORMER_HEADS)).removeprefix("Reformer")
    if kind in ("ModelWithLMHead", "ForMaskedLM"):
        only({"is_decoder": False} | c, is_decoder=kind == "ModelWithLMHead")
    if kind == "ForSequenceClassification":
        only(c, is_decoder=False)  # causal, a padded slot 0 sees nothing; what theirs gives is no number
    return REFORMER_HEADS[kind](labels(c))


def _write_reformer(config: ModelConfig) -> Json:
    layers, masks, positions = repeated(config.mixer, config), repeated(config.masks, config), config.positions
    hashed = [isinstance(layer, mixers.Reformer) for layer in layers]
    lsh: Any = next((layer for layer in layers if isinstance(layer, mixers.Reformer)), mixers.Reformer())
    local = next((layer for layer in layers if isinstance(layer, mixers.LocalChunks)), None)
    if local is None:  # a mask says the same
        sizes = [part.args[:2] for mask in masks for part in mask.conjuncts() if len(part.args) == 3]
        local = next((mixers.LocalChunks(*n) for n in sizes if causal() & chunked(*n) in masks), mixers.LocalChunks())
    decoder = causal() in masks[0].conjuncts()
    head: Any = config.heads[0] if config.heads else None
    kinds = {kind: make(getattr(head, "classes", 0)) for kind, make in REFORMER_HEADS.items()}
    del kinds["ForMaskedLM" if decoder else "ModelWithLMHead"]
    axial = {"axial_pos_embds": False}
    if isinstance(positions, Axial):
        axial = {"axial_pos_shape": list(positions.shape), "axial_pos_embds_dim": list(positions.widths)}
    return write_fields(config, REFORMER) | write_fields(lsh, LSH) | axial | written_labels(head) | {
        "architectures": [_class_with_heads(config, "Reformer", kinds)], "model_type": "reformer", "is_decoder": decoder,
        "num_hidden_layers": config.num_layers, "attention_head_size": config.head_size,
        "attn_layers": ["lsh" if one else "local" for one in hashed], "max_position_embeddings": config.context_length,
        "num_buckets": list(lsh.buckets) if isinstance(lsh.buckets, tuple) else lsh.buckets,
        "local_attn_chunk_length": local.chunk, "local_num_chunks_before": local.before,
        "local_num_chunks_after": local.after, "hash_seed": lsh.seed or None,
        "pad_token_id": 0,  # with which their model fills the last chunk, and hides it
    }  # fmt: skip


def _reformer_rules(config: ModelConfig) -> list[Rule]:
    e, layer = "reformer.embeddings.", "reformer.encoder.layers.{}."
    own, feed = layer + "attention.self_attention.", layer + "feed_forward."
    layers = repeated(config.mixer, config)
    local = [i for i, mixer in enumerate(layers) if not isinstance(mixer, mixers.Reformer)]
    hashed = tuple((i, i) for i in range(config.num_layers) if i not in local)
    # transformers 5 never adds its output bias. `load(heads=(LanguageModel(bias=True),))` does, for models trained with it
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
        Rule("layers/attention/query", own + "query", "linear", tuple((i, i) for i in local)),
        Rule("layers/attention/query", own + "query_key", "linear", hashed),
        Rule("layers/attention/key", own + "key", "linear", tuple(enumerate(local))),
        Rule("layers/attention/value", own + "value", "linear"),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/feedforward_norm", feed + "layer_norm", "norm"),
        *modules("layers/feedforward/", feed, {"up": "dense.dense", "down": "output.dense"}),
        Rule("final_norm", "reformer.encoder.layer_norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.decoder.weight", "leaf"),
        *([bias] if heads else []),
        *modules("heads/", "", {"classification/pooler": "classifier.dense", "classification": "classifier.out_proj"}),
        Rule("heads/span", "qa_outputs", "linear"),
    ]


GPT_ALIASES = {"lm_head.weight": "transformer.wte.weight"}
FAMILIES = {
    "gpt2": Family(_read_gpt2, _write_gpt2, _gpt2_rules, "transformer.", r"\.attn\.(masked_)?bias$", GPT_ALIASES),
    "gpt_neo": Family(
        _read_gpt_neo, _write_gpt_neo, _gpt_neo_rules, "transformer.", r"\.attention\.(masked_)?bias$", GPT_ALIASES
    ),
    **{
        kind: Family(
            _read_llama,
            _write_llama(kind),
            partial(_llama_rules, kind),
            "model.",
            aliases={"lm_head.weight": "model.embed_tokens.weight"},
        )
        for kind in LLAMAS
    },
    "reformer": Family(
        _read_reformer,
        _write_reformer,
        _reformer_rules,
        "reformer.",
        r"mask_value_float(16|32)$",
        {"lm_head.decoder.bias": "lm_head.bias"},
    ),
}
