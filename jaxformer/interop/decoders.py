"""GPT-2, GPT-Neo, LLaMA and what became of it (Mistral, Qwen, Mixtral), Reformer."""

import math
import re
from collections.abc import Collection
from typing import Any

from jaxformer.config import ConfigError
from jaxformer.interop.tables import NAME as ACTIVATION_NAME
from jaxformer.interop.tables import (
    REQUIRED,
    Family,
    Json,
    Rule,
    check_kinds,
    layer_kinds,
    lm_heads,
    modules,
    only,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
)
from jaxformer.masks import Mask, causal, chunked, window
from jaxformer.models import mixers, variants
from jaxformer.models.config import Axial, ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.models.reversible import Reversible
from jaxformer.ops.feedforward import GATES
from jaxformer.ops.positions import NTK, Linear, Llama3, Rope, YaRN

GPT2 = {
    "vocab_size": ("vocab_size", REQUIRED), "n_positions": ("context_length", REQUIRED), "n_embd": ("d_model", REQUIRED),
    "n_layer": ("num_layers", REQUIRED), "n_head": ("num_heads", REQUIRED), "n_inner": ("d_ff", None),
    "activation_function": ("feedforward", "gelu_new"), "layer_norm_epsilon": ("norm_eps", 1e-5),
    "resid_pdrop": ("dropout_rate", 0.1), "attn_pdrop": ("attention_dropout_rate", 0.1),
    "initializer_range": ("init_std", 0.02), "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip


def _read_gpt2(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return ModelConfig(**read_fields(c, GPT2), heads=lm_heads(c, "GPT2LMHeadModel", "GPT2Model"))


def _write_gpt2(config: ModelConfig) -> Json:
    kind = "GPT2LMHeadModel" if config.heads else "GPT2Model"
    return write_fields(config, GPT2) | {
        "architectures": [kind],
        "model_type": "gpt2",
        "embd_pdrop": config.dropout_rate,
    }


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
    types = c.get("attention_types") or []
    kinds = c.get("attention_layers") or [kind for group, times in types for kind in group * min(times, L)]
    layer_kinds("attention_layers", kinds, L, "global", "local")
    local = causal() & window(c.get("window_size", 256) - 1)
    masks = shortest_pattern([causal() if kind == "global" else local for kind in kinds])
    heads = lm_heads(c, "GPTNeoForCausalLM", "GPTNeoModel")
    bias = "out|up|down|norm"
    return ModelConfig(**read_fields(c, GPT_NEO), masks=masks, attention_scale=1.0, use_bias=bias, heads=heads)


def _write_gpt_neo(config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in repeated(config.masks, config)]
    kinds = ["local" if width else "global" for width in windows]
    return write_fields(config, GPT_NEO) | {
        "architectures": ["GPTNeoForCausalLM" if config.heads else "GPTNeoModel"], "model_type": "gpt_neo",
        "attention_types": [[[kind], 1] for kind in kinds], "attention_layers": kinds,
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
    found = re.fullmatch(r"causal\(\) & window\((\d+)(?:, 0)?\)", str(mask))
    return int(found[1]) + 1 if found else None


def read_rope(c: Json) -> Rope:
    """Both dialects: `rope_parameters`, or `rope_theta` with `rope_scaling`, whose kind is `type` or `rope_type`."""
    base = c.get("rope_theta", 1e6 if c["model_type"] == "mixtral" else 1e4)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(c.get(key), dict | None):
            raise ConfigError(f"config.json: {key}={c[key]!r}: expected an object")
    rope = c.get("rope_parameters") or {"rope_theta": base} | (c.get("rope_scaling") or {})
    for part in (c, rope):
        only(part, partial_rotary_factor=1.0)  # which these classes do not heed
    check_kinds(rope, 0)
    theta = float(rope.get("rope_theta", base))
    length: Any = c.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or length
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            scaling = None
        case "linear":
            scaling = Linear(float(rope["factor"]))
        case "dynamic":
            scaling = NTK(float(rope["factor"]), length, length)
        case "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            scaling = Llama3(float(rope["factor"]), original, low, high)
        case "yarn":
            only(rope, attention_factor=None, mscale=None, mscale_all_dim=None)
            fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
            scaling = YaRN(float(rope["factor"]), original, fast, slow, rope.get("truncate", True))
        case kind:
            raise ConfigError(f"config.json: RoPE scaling {kind!r}; expected default, linear, dynamic, llama3 or yarn")
    return Rope(theta, 1.0, "half", scaling)


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
        case YaRN(factor, original, fast, slow, truncate):
            out |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            out |= {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
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
    fields = read_fields(c, LLAMA | ({"rms_norm_eps": ("norm_eps", 1e-5)} if kind == "mixtral" else {}), gated=True)
    if fields["feedforward"] is None:
        raise ConfigError(f"config.json: hidden_act={c['hidden_act']!r} is no gate's activation here")
    if kind == "mixtral":
        only(c, router_jitter_noise=0.0)
        experts, chosen = c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2)
        fields["feedforward"] = Mixture(
            experts, chosen, fields["feedforward"], balance_loss=c.get("router_aux_loss_coef", 0.001)
        )
    if kind == "qwen3":
        fields |= {"mixer": variants.qk_norm, "head_width": fields["head_width"] or 128}
    biases = ["query", "key", "value"] if kind == "qwen2" or c.get("attention_bias") else []
    biases += ["out"] * (kind != "qwen2" and bool(c.get("attention_bias"))) + ["gate", "up", "down"] * bool(
        c.get("mlp_bias")
    )
    heads = lm_heads(c, LLAMAS[kind] + "ForCausalLM", LLAMAS[kind] + "Model")
    masks, bias = _llama_masks(c), "|".join(biases) or False
    return ModelConfig(**fields, norm="rms_norm", positions=read_rope(c), masks=masks, use_bias=bias, heads=heads)


def _llama_masks(c: Json) -> tuple[Mask, ...]:
    kind, L = c["model_type"], c["num_hidden_layers"]
    width = c.get("sliding_window", None if kind in ("llama", "mixtral") else 4096)
    if not width or kind == "llama" or (kind in ("qwen2", "qwen3") and not c.get("use_sliding_window")):
        return (causal(),)
    local = causal() & window(width - 1)
    if kind in ("mistral", "mixtral"):
        return (local,)
    first = c.get("max_window_layers", 28)
    kinds = c.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    layer_kinds("layer_types", kinds, L, "full_attention", "sliding_attention")
    return shortest_pattern([local if one == "sliding_attention" else causal() for one in kinds])


def _write_llama(kind: str):
    def write(config: ModelConfig) -> Json:
        windows = [left_window(mask) for mask in repeated(config.masks, config)]
        width, positions = next(filter(None, windows), None), config.positions
        c = write_fields(config, LLAMA) | {
            "architectures": [LLAMAS[kind] + ("ForCausalLM" if config.heads else "Model")], "model_type": kind,
            "num_key_value_heads": config.kv_heads,
            "rope_parameters": write_rope(positions) if isinstance(positions, Rope) else {},
        }  # fmt: skip
        if kind in ("llama", "qwen3"):
            c |= {"attention_bias": config.has_bias("out"), "mlp_bias": config.has_bias("up")}
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


def _llama_rules(config: ModelConfig) -> list[Rule]:
    layer = "model.layers.{}."
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    feed, names = layer + "mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if isinstance(config.feedforward, Mixture):
        feed, names = layer + "block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}
    return [
        Rule("embedding/tokens", "model.embed_tokens.weight", "leaf"),
        Rule("layers/attention_norm", layer + "input_layernorm", "norm"),
        *modules("layers/attention/", layer + "self_attn.", attention),
        *modules("layers/attention/", layer + "self_attn.", {"query_norm": "q_norm", "key_norm": "k_norm"}, "norm"),
        Rule("layers/feedforward_norm", layer + "post_attention_layernorm", "norm"),
        Rule("layers/feedforward/router", layer + "block_sparse_moe.gate", "linear"),
        *modules("layers/feedforward/", feed, names),
        Rule("final_norm", "model.norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.weight", "leaf"),
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
    only({"is_decoder": False} | c, is_decoder=True)
    only(c, axial_pos_embds=True, tie_word_embeddings=False, local_num_chunks_after=0)
    fields, how = read_fields(c, REFORMER), read_fields(c, LSH)
    if (b := how["buckets"]) is not None:
        numbers = b if isinstance(b, list) else [b]
        if not numbers or any(type(number) is not int or number < 2 or number % 2 for number in numbers):
            raise ConfigError(f"config.json: num_buckets={b!r}: expected an even number, or a list of them")
    how |= {"buckets": tuple(b) if isinstance(b := how["buckets"], list) else b, "seed": how["seed"] or 0}
    lsh = mixers.Reformer(**how, duplicates=True)
    local = causal() & chunked(c.get("local_attn_chunk_length", 64), c.get("local_num_chunks_before", 1))
    kinds = layer_kinds(
        "attn_layers", c["attn_layers"], c.get("num_hidden_layers", len(c["attn_layers"])), "local", "lsh"
    )
    shape, widths = tuple(c["axial_pos_shape"]), tuple(c["axial_pos_embds_dim"])
    pattern = shortest_pattern(kinds)
    return ModelConfig(
        **fields, num_layers=len(kinds), context_length=math.prod(shape), positions=Axial(shape, widths),
        masks=tuple(local if kind == "local" else causal() for kind in pattern),
        mixer=tuple(None if kind == "local" else lsh for kind in pattern), stack=Reversible(streams=2),
        use_bias="up|down|norm", heads=lm_heads(c, "ReformerModelWithLMHead", "ReformerModel", bias=True),
    )  # fmt: skip


def _write_reformer(config: ModelConfig) -> Json:
    kinds = repeated(config.mixer, config)
    lsh: Any = next(filter(None, kinds), mixers.Reformer())
    local = [str(mask) for mask, kind in zip(repeated(config.masks, config), kinds, strict=True) if kind is None]
    found = re.fullmatch(r"causal\(\) & chunked\((\d+), (\d+)(?:, 0)?\)", local[0]) if local else None
    chunk, before = map(int, found.groups()) if found else (64, 1)
    positions: Any = config.positions
    return write_fields(config, REFORMER) | write_fields(lsh, LSH) | {
        "architectures": ["ReformerModelWithLMHead" if config.heads else "ReformerModel"], "model_type": "reformer",
        "is_decoder": True, "num_hidden_layers": config.num_layers, "attention_head_size": config.head_size,
        "attn_layers": ["lsh" if kind else "local" for kind in kinds], "axial_pos_embds": True,
        "axial_pos_shape": list(positions.shape), "axial_pos_embds_dim": list(positions.widths),
        "max_position_embeddings": config.context_length, "local_attn_chunk_length": chunk,
        "local_num_chunks_before": before, "local_num_chunks_after": 0, "hash_seed": lsh.seed or None,
    }  # fmt: skip


def _reformer_rules(config: ModelConfig) -> list[Rule]:
    e, layer = "reformer.embeddings.", "reformer.encoder.layers.{}."
    own, feed = layer + "attention.self_attention.", layer + "feed_forward."
    kinds = repeated(config.mixer, config)
    local = [i for i, kind in enumerate(kinds) if kind is None]
    hashed = tuple((i, i) for i, kind in enumerate(kinds) if kind is not None)
    return [
        Rule("embedding/tokens", e + "word_embeddings.weight", "leaf"),
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
        Rule("heads/language_model/bias", "lm_head.bias", "unread"),
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
            _llama_rules,
            "model.",
            aliases={"lm_head.weight": "model.embed_tokens.weight"},
        )
        for kind in LLAMAS
    },
    "reformer": Family(_read_reformer, _write_reformer, _reformer_rules, "reformer."),
}
