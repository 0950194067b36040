"""Hugging Face's model families: config.json to our config and back, and whose weight is whose, a table a family.

A family is three functions. `read(c, names)`: config.json (and the names in the file) -> our config; ConfigError where a
setting changes numbers in a way that we do not compute. `write(config)`: the other way. `rules(config)`: pairs of our
path and their name, `{}` standing for a layer (then an expert). What a config cannot say is not written: `save` reads
back what it wrote and compares.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.masks import Mask, causal, chunked, full, window
from jaxformer.models import mixers, variants
from jaxformer.models.config import (
    Axial,
    Classification,
    Embedding,
    EncoderDecoder,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    Relative,
    Sinusoidal,
    TokenClassification,
)
from jaxformer.models.mixture import Mixture
from jaxformer.models.reversible import Reversible
from jaxformer.ops.feedforward import GATES
from jaxformer.ops.positions import NTK, Linear, Llama3, Rope, YaRN

Json = dict[str, Any]
Kind = Literal["linear", "conv1d", "patches", "norm", "leaf", "leaf1", "leaf2", "lines", "columns", "unread"]


class Rule(NamedTuple):
    """Our module, or several that they fused, and theirs; `kind` says how the leaves and axes of the two correspond."""

    ours: str | tuple[str, ...]
    theirs: str
    kind: Kind
    layers: tuple[tuple[int, int], ...] | None = None  # (ours, theirs) where they are not counted alike


class Family(NamedTuple):
    """One `model_type`. `prefix`: what base models' files leave out. `ignored`: buffers, a regular expression."""

    read: Callable[[Json, Collection[str]], Any]
    write: Callable[[Any], Json]
    rules: Callable[[Any], list[Rule]]
    prefix: str = ""
    ignored: str = r"position_ids$|\.rotary_emb\.inv_freq$"
    aliases: dict[str, str] = {}  # noqa: RUF012 (a tied tensor's second name: its first)


ACTIVATION = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu", "tanh": "tanh", "sigmoid": "sigmoid",
}  # fmt: skip
GATE = {activation: name for name, activation in GATES.items()}
NAME = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}


def activation(c: Json, key: str) -> str:
    name = c.get(key)
    if name not in ACTIVATION:
        raise ConfigError(
            f"config.json: {key}={name!r} has no counterpart here; expected one of {', '.join(ACTIVATION)}"
        )
    return ACTIVATION[name]


def only(c: Json, **allowed: Any) -> None:
    """Refuses settings that would change the numbers."""
    for key, value in allowed.items():
        if c.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={c[key]!r} is not supported here; only {value!r} is")


def need(c: Json, *keys: str) -> list[Any]:
    for key in keys:
        if c.get(key) is None:
            raise ConfigError(f"config.json has no {key!r}, which a {c.get('model_type')} model needs")
    return [c[key] for key in keys]


def architecture(c: Json) -> str:
    return (c.get("architectures") or [""])[0]


def labels(c: Json) -> int:
    return c.get("num_labels") or len(c.get("id2label") or {"0": 0, "1": 1})


def written_labels(count: int) -> Json:
    return {
        "id2label": {str(i): f"LABEL_{i}" for i in range(count)},
        "label2id": {f"LABEL_{i}": i for i in range(count)},
    }


def shortest_pattern(items: list) -> tuple:
    """The shortest prefix whose repetition is the list."""
    return next(
        tuple(items[:n]) for n in range(1, len(items) + 1) if all(x == items[i % n] for i, x in enumerate(items))
    )


# Encoders: BERT, RoBERTa, Longformer, BigBird

POOLED = "pooled"
ENCODER_FIELDS = {
    "vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "d_model", "num_attention_heads":
    "num_heads", "intermediate_size": "d_ff", "layer_norm_eps": "norm_eps", "hidden_dropout_prob": "dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate", "initializer_range": "init_std",
}  # fmt: skip
HEADS = {  # architecture suffix -> heads, given the activation and the number of labels
    "Model": lambda act, n: (Classification(None, name=POOLED),),
    "ForPreTraining": lambda act, n: (LanguageModel(act, bias=True), Classification(2, name="next_sentence")),
    "ForMaskedLM": lambda act, n: (LanguageModel(act, bias=True),),
    "ForNextSentencePrediction": lambda act, n: (Classification(2, name="next_sentence"),),
    "ForSequenceClassification": lambda act, n: (Classification(n),),
    "ForTokenClassification": lambda act, n: (TokenClassification(n),),
    "ForQuestionAnswering": lambda act, n: (TokenClassification(2, name="span"),),
}


def read_encoder(class_prefix: str, pooler: str):
    def read(c: Json, names: Collection[str]) -> ModelConfig:
        need(c, "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
        need(c, "max_position_embeddings")
        only(c, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False, use_bias=True)
        act = activation({"hidden_act": "gelu"} | c, "hidden_act")
        suffix = architecture(c).removeprefix(class_prefix) or "Model"
        if suffix not in HEADS:
            raise ConfigError(
                f"config.json: architecture {architecture(c)!r}; expected {class_prefix} and {', '.join(HEADS)}"
            )
        heads = HEADS[suffix](act, labels(c))
        pooled = Classification(None, name=POOLED)
        if suffix == "Model" and names and not any(pooler in name for name in names):
            heads = ()
        if class_prefix == "BigBird" and suffix in ("ForMaskedLM", "ForTokenClassification"):
            heads = (*heads, pooled)  # its files have a pooler that nothing reads
        eps = {"Bert": 1e-12, "BigBird": 1e-12}.get(class_prefix, 1e-12)
        offset = 0 if class_prefix in ("Bert", "BigBird") else (c.get("pad_token_id", 1) or 0) + 1
        scale = c["hidden_size"] ** 0.5 if c.get("rescale_embeddings") else 1.0
        return ModelConfig(
            **{ours: c[theirs] for theirs, ours in ENCODER_FIELDS.items() if theirs in c}
            | ({} if "layer_norm_eps" in c else {"norm_eps": eps}),
            context_length=c["max_position_embeddings"] - offset,
            feedforward=act,
            norm_placement="post",
            positions=Learned(offset),
            masks=(full(),),
            embedding=Embedding(scale, norm=True, token_types=c.get("type_vocab_size", 2)),
            heads=heads,
            tie_embeddings=c.get("tie_word_embeddings", True),
            mixer=encoder_mixer(class_prefix, c),
        )

    return read


def encoder_mixer(class_prefix: str, c: Json):
    if class_prefix == "Longformer":
        windows = c["attention_window"] if isinstance(c["attention_window"], list) else [c["attention_window"]]
        if len(set(windows)) > 1:
            raise ConfigError(f"config.json: attention_window={windows} differs between layers, which is not supported")
        return mixers.Longformer(windows[0], global_tokens=0)
    if class_prefix == "BigBird" and c.get("attention_type", "block_sparse") == "block_sparse":
        return mixers.BigBird(c.get("block_size", 64), c.get("num_random_blocks", 3), layout="zero")
    return None


def write_encoder(class_prefix: str, model_type: str):
    def write(config: ModelConfig) -> Json:
        suffix = encoder_architecture(config)
        offset = config.positions.offset if isinstance(config.positions, Learned) else 0
        c = {theirs: getattr(config, ours) for theirs, ours in ENCODER_FIELDS.items()} | {
            "architectures": [class_prefix + suffix],
            "model_type": model_type,
            "intermediate_size": config.ff_width,
            "hidden_act": NAME.get(config.feedforward),
            "max_position_embeddings": config.context_length + offset,
            "type_vocab_size": getattr(config.embedding, "token_types", 0),
            "pad_token_id": max(offset - 1, 0),
            "tie_word_embeddings": config.tie_embeddings,
        }
        if isinstance(config.mixer, mixers.Longformer):
            c["attention_window"] = [config.mixer.window] * config.num_layers
        if class_prefix == "BigBird":
            c["rescale_embeddings"] = getattr(config.embedding, "scale", 1.0) != 1.0
            c["attention_type"] = "block_sparse" if config.mixer else "original_full"
            if isinstance(config.mixer, mixers.BigBird):
                c |= {"block_size": config.mixer.block, "num_random_blocks": config.mixer.random}
        for head in config.heads:
            if getattr(head, "classes", None) and head.name in ("classification", "token_classification"):
                c |= written_labels(head.classes)
        return c

    return write


def encoder_architecture(config: ModelConfig) -> str:
    heads = tuple(head for head in config.heads if getattr(head, "name", "") != POOLED)
    names = tuple(getattr(head, "name", "") for head in heads)
    known = {
        (): "Model", ("language_model", "next_sentence"): "ForPreTraining", ("language_model",): "ForMaskedLM",
        ("next_sentence",): "ForNextSentencePrediction", ("classification",): "ForSequenceClassification",
        ("token_classification",): "ForTokenClassification", ("span",): "ForQuestionAnswering",
    }  # fmt: skip
    return known.get(names, "")


def encoder_rules(base: str, roberta: bool, pooler: str):
    """BERT's names under `base.`; RoBERTa's heads have names of their own."""
    layer, e = f"{base}.encoder.layer.{{}}.", f"{base}.embeddings."
    body = [
        Rule("embedding/tokens", e + "word_embeddings.weight", "leaf"),
        Rule("embedding/positions", e + "position_embeddings.weight", "leaf"),
        Rule("embedding/token_types", e + "token_type_embeddings.weight", "leaf"),
        Rule("embedding/norm", e + "LayerNorm", "norm"),
        *(Rule(f"layers/attention/{n}", f"{layer}attention.self.{n}", "linear") for n in ("query", "key", "value")),
        *(
            Rule(f"layers/attention/global_{n}", f"{layer}attention.self.{n}_global", "linear")
            for n in ("query", "key", "value")
        ),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/attention_norm", layer + "attention.output.LayerNorm", "norm"),
        Rule("layers/feedforward/up", layer + "intermediate.dense", "linear"),
        Rule("layers/feedforward/down", layer + "output.dense", "linear"),
        Rule("layers/feedforward_norm", layer + "output.LayerNorm", "norm"),
        Rule("heads/token_classification", "classifier", "linear"),
        Rule("heads/span", "qa_outputs", "linear"),
        *(Rule(f"heads/{n}/pooler", pooler, "linear") for n in (POOLED, "next_sentence")),
        Rule("heads/next_sentence", "cls.seq_relationship", "linear"),
    ]
    lm, transform, sequence, classes = (
        ("lm_head.", "", "classifier.dense", "classifier.out_proj")
        if roberta
        else ("cls.predictions.", "transform.", pooler, "classifier")
    )
    if base == "bert" and pooler == "bert.pooler":  # BigBird's classifier is like RoBERTa's
        sequence, classes = "classifier.dense", "classifier.out_proj"
    return lambda config: [
        *body,
        Rule("heads/classification/pooler", sequence, "linear"),
        Rule("heads/classification", classes, "linear"),
        Rule("heads/language_model/transform", f"{lm}{transform}dense", "linear"),
        Rule(
            "heads/language_model/transform/norm", f"{lm}{transform}{'layer_norm' if roberta else 'LayerNorm'}", "norm"
        ),
        Rule("heads/language_model/bias", lm + "bias", "leaf"),
        Rule("heads/language_model/kernel", lm + "decoder.weight", "leaf"),
    ]


def encoder_family(class_prefix: str, model_type: str, base: str, roberta: bool = False) -> Family:
    pooler = f"{base}.pooler" + ("" if class_prefix == "BigBird" else ".dense")
    lm = "lm_head." if roberta else "cls.predictions."
    return Family(
        read_encoder(class_prefix, "pooler."),
        write_encoder(class_prefix, model_type),
        encoder_rules(base, roberta, pooler),
        prefix=base + ".",
        aliases={
            lm + "decoder.weight": f"{base}.embeddings.word_embeddings.weight",
            lm + "decoder.bias": lm + "bias",
        },
    )


# Decoders: GPT-2, GPT-Neo, LLaMA and its relatives


def read_gpt2(c: Json, names: Collection[str]) -> ModelConfig:
    V, T, D, L, N = need(c, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    only(c, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return ModelConfig(
        vocab_size=V, num_layers=L, d_model=D, num_heads=N, context_length=T, d_ff=c.get("n_inner"),
        feedforward=activation({"activation_function": "gelu_new"} | c, "activation_function"),
        norm_eps=c.get("layer_norm_epsilon", 1e-5), dropout_rate=c.get("resid_pdrop", 0.1),
        attention_dropout_rate=c.get("attn_pdrop", 0.1), init_std=c.get("initializer_range", 0.02),
        tie_embeddings=c.get("tie_word_embeddings", True), heads=lm_heads(c, "GPT2Model", "GPT2LMHeadModel"),
    )  # fmt: skip


def lm_heads(c: Json, base: str, model: str) -> tuple:
    """The heads of a decoder's architecture: none for the base model."""
    if architecture(c) not in (base, model, ""):
        raise ConfigError(f"config.json: architecture {architecture(c)!r}; expected {model} or {base}")
    return () if architecture(c) == base else (LanguageModel(),)


def write_gpt2(config: ModelConfig) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel" if config.heads else "GPT2Model"], "model_type": "gpt2",
        "vocab_size": config.vocab_size, "n_positions": config.context_length, "n_embd": config.d_model,
        "n_layer": config.num_layers, "n_head": config.num_heads, "n_inner": config.d_ff,
        "activation_function": NAME.get(config.feedforward), "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout_rate, "embd_pdrop": config.dropout_rate, "attn_pdrop": config.attention_dropout_rate,
        "initializer_range": config.init_std, "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip


def gpt2_rules(config: ModelConfig) -> list[Rule]:
    h = "transformer.h.{}."
    return [
        Rule("embedding/tokens", "transformer.wte.weight", "leaf"),
        Rule("embedding/positions", "transformer.wpe.weight", "leaf"),
        Rule("layers/attention_norm", h + "ln_1", "norm"),
        Rule(tuple(f"layers/attention/{n}" for n in ("query", "key", "value")), h + "attn.c_attn", "conv1d"),
        Rule("layers/attention/out", h + "attn.c_proj", "conv1d"),
        Rule("layers/feedforward_norm", h + "ln_2", "norm"),
        Rule("layers/feedforward/up", h + "mlp.c_fc", "conv1d"),
        Rule("layers/feedforward/down", h + "mlp.c_proj", "conv1d"),
        Rule("final_norm", "transformer.ln_f", "norm"),
        Rule("heads/language_model/kernel", "lm_head.weight", "leaf"),
    ]


def read_gpt_neo(c: Json, names: Collection[str]) -> ModelConfig:
    V, T, D, L, N = need(c, "vocab_size", "max_position_embeddings", "hidden_size", "num_layers", "num_heads")
    kinds = c.get("attention_layers") or [
        kind for group, times in need(c, "attention_types")[0] for kind in group * times
    ]
    local = causal() & window(c.get("window_size", 256) - 1)
    return ModelConfig(
        vocab_size=V, num_layers=L, d_model=D, num_heads=N, context_length=T, d_ff=c.get("intermediate_size"),
        feedforward=activation({"activation_function": "gelu_new"} | c, "activation_function"),
        masks=shortest_pattern([causal() if kind == "global" else local for kind in kinds]), attention_scale=1.0,
        use_bias="out|up|down|norm", norm_eps=c.get("layer_norm_epsilon", 1e-5), dropout_rate=c.get("resid_dropout", 0.0),
        attention_dropout_rate=c.get("attention_dropout", 0.0), init_std=c.get("initializer_range", 0.02),
        tie_embeddings=c.get("tie_word_embeddings", True), heads=lm_heads(c, "GPTNeoModel", "GPTNeoForCausalLM"),
    )  # fmt: skip


def write_gpt_neo(config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in config.masks]
    kinds = ["local" if windows[i % len(windows)] else "global" for i in range(config.num_layers)]
    return {
        "architectures": ["GPTNeoForCausalLM" if config.heads else "GPTNeoModel"], "model_type": "gpt_neo",
        "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length, "hidden_size": config.d_model,
        "num_layers": config.num_layers, "num_heads": config.num_heads, "intermediate_size": config.d_ff,
        "attention_types": [[[kind], 1] for kind in kinds], "attention_layers": kinds,
        "window_size": next(filter(None, windows), 256), "activation_function": NAME.get(config.feedforward),
        "layer_norm_epsilon": config.norm_eps, "resid_dropout": config.dropout_rate, "embed_dropout": config.dropout_rate,
        "attention_dropout": config.attention_dropout_rate, "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip


def gpt_neo_rules(config: ModelConfig) -> list[Rule]:
    h = "transformer.h.{}."
    plain = [rule for rule in gpt2_rules(config) if rule.kind != "conv1d"]
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    return [
        *plain,
        *(Rule(f"layers/attention/{ours}", f"{h}attn.attention.{theirs}", "linear") for ours, theirs in names.items()),
        Rule("layers/feedforward/up", h + "mlp.c_fc", "linear"),
        Rule("layers/feedforward/down", h + "mlp.c_proj", "linear"),
    ]


def left_window(mask: Mask) -> int | None:
    """w of `causal() & window(w - 1)`: the keys that a query sees, itself counted; None for other masks."""
    found = re.fullmatch(r"causal\(\) & window\((\d+)(?:, 0)?\)", str(mask))
    return int(found[1]) + 1 if found else None


def read_rope(c: Json) -> Rope:
    """Both dialects: `rope_parameters`, or `rope_theta` with `rope_scaling`, whose kind is `type` or `rope_type`."""
    rope = c.get("rope_parameters") or {"rope_theta": c.get("rope_theta", 10_000.0)} | (c.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", c.get("rope_theta", 10_000.0)))
    fraction = float(rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)))
    kind, length = rope.get("rope_type", rope.get("type", "default")), c.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or length
    match kind:
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
        case _:
            raise ConfigError(f"config.json: RoPE scaling {kind!r}; expected default, linear, dynamic, llama3 or yarn")
    return Rope(theta, fraction, "half", scaling)


def write_rope(rope: Rope) -> Json:
    out: Json = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.fraction != 1:
        out["partial_rotary_factor"] = rope.fraction
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


def read_llama(c: Json, names: Collection[str]) -> ModelConfig:
    V, T, D, L, N = need(
        c, "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"
    )
    kind = c["model_type"]
    if kind == "qwen2":
        biases = ["query", "key", "value"]
    else:
        biases = ["query", "key", "value", "out"] * bool(c.get("attention_bias"))
    biases += ["gate", "up", "down"] * bool(c.get("mlp_bias"))
    act = activation({"hidden_act": "silu"} | c, "hidden_act")
    if act not in GATE:
        raise ConfigError(f"config.json: hidden_act={c['hidden_act']!r} is no gate's activation here")
    feedforward: Any = GATE[act]
    if kind == "mixtral":
        only(c, router_jitter_noise=0.0)
        experts, chosen = c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2)
        feedforward = Mixture(experts, chosen, GATE[act], balance_loss=c.get("router_aux_loss_coef", 0.001))
    return ModelConfig(
        vocab_size=V, num_layers=L, d_model=D, num_heads=N, context_length=T, num_kv_heads=c.get("num_key_value_heads"),
        head_width=c.get("head_dim") or (128 if kind == "qwen3" else None), d_ff=need(c, "intermediate_size")[0],
        feedforward=feedforward, norm="rms_norm", norm_eps=c.get("rms_norm_eps", 1e-6), positions=read_rope(c),
        masks=llama_masks(c), mixer=variants.qk_norm if kind == "qwen3" else None,
        use_bias="|".join(biases) if biases else False, attention_dropout_rate=c.get("attention_dropout", 0.0),
        init_std=c.get("initializer_range", 0.02), tie_embeddings=c.get("tie_word_embeddings", False),
        heads=lm_heads(c, LLAMAS[kind] + "Model", LLAMAS[kind] + "ForCausalLM"),
    )  # fmt: skip


def llama_masks(c: Json) -> tuple[Mask, ...]:
    width, L = c.get("sliding_window"), c["num_hidden_layers"]
    if c["model_type"] in ("qwen2", "qwen3") and not c.get("use_sliding_window"):
        width = None
    if not width or c["model_type"] == "llama":
        return (causal(),)
    local = causal() & window(width - 1)
    if c["model_type"] in ("mistral", "mixtral"):
        return (local,)
    first = c.get("max_window_layers", L)
    kinds = c.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    return shortest_pattern([local if kind == "sliding_attention" else causal() for kind in kinds])


def write_llama(kind: str):
    def write(config: ModelConfig) -> Json:
        moe = config.feedforward if isinstance(config.feedforward, Mixture) else None
        gate = GATES.get(moe.activation if moe else config.feedforward)
        windows = [left_window(mask) for mask in config.masks]
        width = next(filter(None, windows), None)
        c = {
            "architectures": [LLAMAS[kind] + ("ForCausalLM" if config.heads else "Model")], "model_type": kind,
            "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length,
            "hidden_size": config.d_model, "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.kv_heads, "intermediate_size": config.ff_width,
            "hidden_act": NAME.get(gate or ""), "rms_norm_eps": config.norm_eps,
            "attention_dropout": config.attention_dropout_rate, "initializer_range": config.init_std,
            "tie_word_embeddings": config.tie_embeddings,
        }  # fmt: skip
        if isinstance(config.positions, Rope):
            c |= {"rope_parameters": write_rope(config.positions)}
        if config.head_width or kind == "qwen3":
            c["head_dim"] = config.head_size
        if kind == "llama":
            c |= {"attention_bias": config.has_bias("out"), "mlp_bias": config.has_bias("up")}
        if kind in ("mistral", "mixtral"):
            c["sliding_window"] = width
        if kind in ("qwen2", "qwen3"):
            L, kinds = config.num_layers, ["sliding_attention" if w else "full_attention" for w in windows]
            c |= {"use_sliding_window": width is not None, "sliding_window": width, "max_window_layers": L}
            c["layer_types"] = [kinds[i % len(kinds)] for i in range(L)]
        if kind == "qwen3":
            c["attention_bias"] = config.has_bias("out")
        if moe:
            c |= {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k}
            c["router_aux_loss_coef"] = moe.balance_loss
        return c

    return write


def llama_rules(config: ModelConfig) -> list[Rule]:
    layer = "model.layers.{}."
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    expert = layer + "block_sparse_moe.experts.{}."
    moe = isinstance(config.feedforward, Mixture)
    names = dict(gate=expert + "w1", up=expert + "w3", down=expert + "w2") if moe else {
        name: f"{layer}mlp.{name}_proj" for name in ("gate", "up", "down")
    }  # fmt: skip
    return [
        Rule("embedding/tokens", "model.embed_tokens.weight", "leaf"),
        Rule("layers/attention_norm", layer + "input_layernorm", "norm"),
        *(Rule(f"layers/attention/{ours}", f"{layer}self_attn.{name}", "linear") for ours, name in attention.items()),
        Rule("layers/attention/query_norm", layer + "self_attn.q_norm", "norm"),
        Rule("layers/attention/key_norm", layer + "self_attn.k_norm", "norm"),
        Rule("layers/feedforward_norm", layer + "post_attention_layernorm", "norm"),
        Rule("layers/feedforward/router", layer + "block_sparse_moe.gate", "linear"),
        *(Rule(f"layers/feedforward/{ours}", theirs, "linear") for ours, theirs in names.items()),
        Rule("final_norm", "model.norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.weight", "leaf"),
    ]


# Encoder-decoders: T5, Marian


def read_t5(c: Json, names: Collection[str]) -> EncoderDecoder:
    V, D, H, F, L, N = need(c, "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    if architecture(c) not in ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model", ""):
        raise ConfigError(
            f"config.json: architecture {architecture(c)!r}; expected T5ForConditionalGeneration or T5Model"
        )
    named = c.get("feed_forward_proj", "relu")
    gated, act = named.startswith("gated-"), named.removeprefix("gated-")
    act = "gelu_new" if gated and act == "gelu" else act  # theirs: "gated-gelu" has always meant the tanh form
    act = activation({"feed_forward_proj": act}, "feed_forward_proj")
    tied = c.get("tie_word_embeddings", True)
    scaled = c.get("scale_decoder_outputs", tied)
    untied = "lm_head.weight" in names if names else not tied
    buckets, distance = c.get("relative_attention_num_buckets", 32), c.get("relative_attention_max_distance", 128)
    encoder = ModelConfig(
        vocab_size=V, num_layers=L, d_model=D, num_heads=N, head_width=H, d_ff=F, context_length=c.get("n_positions", 512),
        feedforward=GATE[act] if gated else act, norm="rms_norm", norm_eps=c.get("layer_norm_epsilon", 1e-6),
        positions=Relative(buckets, distance), masks=(full(),), use_bias=False, attention_scale=1.0, heads=(),
        dropout_rate=c.get("dropout_rate", 0.1), attention_dropout_rate=c.get("dropout_rate", 0.1),
        tie_embeddings=not untied,
    )  # fmt: skip
    decoder = replace(
        encoder,
        num_layers=c.get("num_decoder_layers") or L,
        positions=Relative(buckets, distance, bidirectional=False),
        masks=(causal(),),
        heads=() if architecture(c) == "T5Model" else (LanguageModel(scale=D**-0.5 if scaled else 1.0),),
    )
    return EncoderDecoder(encoder, decoder)


def write_t5(config: EncoderDecoder) -> Json:
    encoder, decoder = config.encoder, config.decoder
    gated = encoder.feedforward in GATES
    name = NAME.get(GATES[encoder.feedforward] if gated else encoder.feedforward) or ""
    named = "gated-" * gated + ("gelu" if gated and name == "gelu_new" else name)
    return {
        "architectures": ["T5ForConditionalGeneration" if decoder.heads else "T5Model"], "model_type": "t5",
        "is_encoder_decoder": True, "vocab_size": decoder.vocab_size, "d_model": decoder.d_model,
        "d_kv": decoder.head_size, "d_ff": decoder.ff_width, "num_layers": encoder.num_layers,
        "num_decoder_layers": decoder.num_layers, "num_heads": decoder.num_heads, "feed_forward_proj": named,
        "layer_norm_epsilon": decoder.norm_eps, "dropout_rate": decoder.dropout_rate, "n_positions": encoder.context_length,
        "relative_attention_num_buckets": getattr(encoder.positions, "buckets", 0),
        "relative_attention_max_distance": getattr(encoder.positions, "max_distance", 0),
        "tie_word_embeddings": decoder.tie_embeddings, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        "scale_decoder_outputs": bool(decoder.heads) and decoder.heads[0].scale != 1.0,
    }  # fmt: skip


def t5_rules(config: EncoderDecoder) -> list[Rule]:
    rules = [
        Rule("decoder/embedding/tokens", "shared.weight", "leaf"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight", "leaf"),
    ]
    for stack in ("encoder", "decoder"):
        block, feed = stack + ".block.{}.layer.", 1 if stack == "encoder" else 2
        for sub, ours, theirs in ((0, "attention", "SelfAttention"), (1, "cross_attention", "EncDecAttention")):
            if sub < feed:
                rules += [Rule(f"{stack}/layers/{ours}_norm", f"{block}{sub}.layer_norm", "norm")]
                names = zip(("query", "key", "value", "out"), "qkvo", strict=True)
                rules += [Rule(f"{stack}/layers/{ours}/{n}", f"{block}{sub}.{theirs}.{m}", "linear") for n, m in names]
        dense = f"{block}{feed}.DenseReluDense."
        up = "wi_1" if getattr(config, stack).feedforward in GATES else "wi"
        rules += [
            Rule(f"{stack}/layers/feedforward_norm", f"{block}{feed}.layer_norm", "norm"),
            Rule(f"{stack}/layers/feedforward/gate", dense + "wi_0", "linear"),
            Rule(f"{stack}/layers/feedforward/up", dense + up, "linear"),
            Rule(f"{stack}/layers/feedforward/down", dense + "wo", "linear"),
            Rule(f"{stack}/final_norm", f"{stack}.final_layer_norm", "norm"),
            Rule(
                f"{stack}/shared/relative",
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                "leaf",
            ),
        ]
    return rules


def read_marian(c: Json, names: Collection[str]) -> EncoderDecoder:
    V, D, T = need(c, "vocab_size", "d_model", "max_position_embeddings")
    only(
        c,
        normalize_embedding=False,
        normalize_before=False,
        add_final_layer_norm=False,
        static_position_embeddings=True,
    )
    shared = c.get("share_encoder_decoder_embeddings", True)
    act = activation({"activation_function": "gelu"} | c, "activation_function")

    def stack(side: str, **rest) -> ModelConfig:
        layers, heads, width = need(c, f"{side}_layers", f"{side}_attention_heads", f"{side}_ffn_dim")
        return ModelConfig(
            num_layers=layers, d_model=D, num_heads=heads, d_ff=width, context_length=T, feedforward=act,
            norm_placement="post", positions=Sinusoidal(layout="half"), dropout_rate=c.get("dropout", 0.1),
            attention_dropout_rate=c.get("attention_dropout", 0.0), init_std=c.get("init_std", 0.02),
            embedding=Embedding(D**0.5 if c.get("scale_embedding") else 1.0),
            tie_embeddings=c.get("tie_word_embeddings", True), **rest,
        )  # fmt: skip

    head = () if architecture(c) == "MarianModel" else (LanguageModel(bias=True),)
    target = V if shared else c.get("decoder_vocab_size") or V
    encoder = stack("encoder", vocab_size=V, masks=(full(),), heads=())
    return EncoderDecoder(encoder, stack("decoder", vocab_size=target, masks=(causal(),), heads=head), shared)


def write_marian(config: EncoderDecoder) -> Json:
    encoder, decoder = config.encoder, config.decoder
    sides = {}
    for side, stack in (("encoder", encoder), ("decoder", decoder)):
        sides |= {f"{side}_layers": stack.num_layers, f"{side}_attention_heads": stack.num_heads}
        sides |= {f"{side}_ffn_dim": stack.ff_width}
    last = decoder.vocab_size - 1
    return sides | {
        "architectures": ["MarianMTModel" if decoder.heads else "MarianModel"], "model_type": "marian",
        "is_encoder_decoder": True, "vocab_size": encoder.vocab_size, "decoder_vocab_size": decoder.vocab_size,
        "d_model": decoder.d_model, "max_position_embeddings": decoder.context_length,
        "activation_function": NAME.get(decoder.feedforward), "dropout": decoder.dropout_rate,
        "attention_dropout": decoder.attention_dropout_rate, "init_std": decoder.init_std,
        "scale_embedding": getattr(decoder.embedding, "scale", 1.0) != 1.0,
        "share_encoder_decoder_embeddings": config.share_embeddings, "tie_word_embeddings": decoder.tie_embeddings,
        "pad_token_id": last, "decoder_start_token_id": last, "eos_token_id": 0, "forced_eos_token_id": 0,
    }  # fmt: skip


def marian_rules(config: EncoderDecoder) -> list[Rule]:
    table = "model.shared.weight" if config.share_embeddings else "model.decoder.embed_tokens.weight"
    rules = [
        Rule("decoder/embedding/tokens", table, "leaf"),
        Rule("encoder/embedding/tokens", "model.encoder.embed_tokens.weight", "leaf"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight", "leaf"),
        Rule("decoder/heads/language_model/bias", "final_logits_bias", "leaf1"),
    ]
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    for stack in ("encoder", "decoder"):
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            rules += [Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm", "norm")]
            rules += [Rule(f"{ours}{name}/{n}", f"{theirs}{module}.{m}", "linear") for n, m in attention.items()]
        rules += [
            Rule(ours + "feedforward/up", theirs + "fc1", "linear"),
            Rule(ours + "feedforward/down", theirs + "fc2", "linear"),
            Rule(ours + "feedforward_norm", theirs + "final_layer_norm", "norm"),
        ]
    return rules


# Images: ViT


def read_vit(c: Json, names: Collection[str]) -> ModelConfig:
    D, L, N, F = need(c, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    pair = lambda value: tuple(value) if isinstance(value, list) else (value, value)
    patches = Patches(pair(c.get("image_size", 224)), pair(c.get("patch_size", 16)), c.get("num_channels", 3))
    only(c, pooler_output_size=D)
    kind = architecture(c) or "ViTModel"
    if kind not in ("ViTModel", "ViTForImageClassification"):
        raise ConfigError(f"config.json: architecture {kind!r}; expected ViTModel or ViTForImageClassification")
    heads = (Classification(labels(c), pooler=None),) if kind == "ViTForImageClassification" else ()
    if kind == "ViTModel" and (not names or any("pooler." in name for name in names)):
        heads = (Classification(None, pooler=activation({"pooler_act": "tanh"} | c, "pooler_act"), name=POOLED),)
    return ModelConfig(
        vocab_size=0, num_layers=L, d_model=D, num_heads=N, d_ff=F, context_length=patches.length,
        feedforward=activation({"hidden_act": "gelu"} | c, "hidden_act"), norm_eps=c.get("layer_norm_eps", 1e-12),
        masks=(full(),), use_bias=True if c.get("qkv_bias", True) else "out|up|down|norm|patches", embedding=patches,
        heads=heads, dropout_rate=c.get("hidden_dropout_prob", 0.0),
        attention_dropout_rate=c.get("attention_probs_dropout_prob", 0.0), init_std=c.get("initializer_range", 0.02),
    )  # fmt: skip


def write_vit(config: ModelConfig) -> Json:
    patches: Any = config.embedding
    head: Any = config.heads[0] if config.heads else None
    c = {
        "architectures": ["ViTForImageClassification" if head and head.classes else "ViTModel"], "model_type": "vit",
        "hidden_size": config.d_model, "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "intermediate_size": config.ff_width, "hidden_act": NAME.get(config.feedforward), "layer_norm_eps": config.norm_eps,
        "image_size": list(patches.image), "patch_size": list(patches.patch), "num_channels": patches.channels,
        "qkv_bias": config.has_bias("query"), "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate, "initializer_range": config.init_std,
        "pooler_output_size": config.d_model, "pooler_act": NAME.get(head.pooler, "tanh") if head else "tanh",
    }  # fmt: skip
    for key in ("image_size", "patch_size"):
        if len(set(c[key])) == 1:
            c[key] = c[key][0]
    return c | (written_labels(head.classes) if head and head.classes else {})


def vit_rules(config: ModelConfig) -> list[Rule]:
    layer, e = "vit.encoder.layer.{}.", "vit.embeddings."
    return [
        Rule("embedding/patches", e + "patch_embeddings.projection", "patches"),
        Rule("embedding/class_token", e + "cls_token", "leaf2"),
        Rule("embedding/positions", e + "position_embeddings", "leaf1"),
        Rule("layers/attention_norm", layer + "layernorm_before", "norm"),
        *(
            Rule(f"layers/attention/{n}", f"{layer}attention.attention.{n}", "linear")
            for n in ("query", "key", "value")
        ),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/feedforward_norm", layer + "layernorm_after", "norm"),
        Rule("layers/feedforward/up", layer + "intermediate.dense", "linear"),
        Rule("layers/feedforward/down", layer + "output.dense", "linear"),
        Rule("final_norm", "vit.layernorm", "norm"),
        Rule(f"heads/{POOLED}/pooler", "vit.pooler.dense", "linear"),
        Rule("heads/classification", "classifier", "linear"),
    ]


# Reformer


def read_reformer(c: Json, names: Collection[str]) -> ModelConfig:
    V, D, H, N, F = need(
        c, "vocab_size", "hidden_size", "attention_head_size", "num_attention_heads", "feed_forward_size"
    )
    only(c, is_decoder=True, axial_pos_embds=True, tie_word_embeddings=False, lsh_num_chunks_after=0)
    only(c, local_num_chunks_after=0)
    if architecture(c) not in ("ReformerModelWithLMHead", "ReformerModel", ""):
        raise ConfigError(
            f"config.json: architecture {architecture(c)!r}; expected ReformerModelWithLMHead or ReformerModel"
        )
    kinds, shape, widths = need(c, "attn_layers", "axial_pos_shape", "axial_pos_embds_dim")
    buckets = c.get("num_buckets")
    lsh = mixers.Reformer(
        chunk=c.get("lsh_attn_chunk_length", 64), rounds=c.get("num_hashes", 1),
        buckets=tuple(buckets) if isinstance(buckets, list) else buckets,
        chunks_before=c.get("lsh_num_chunks_before", 1), seed=c.get("hash_seed") or 0, duplicates=True,
    )  # fmt: skip
    local = causal() & chunked(c.get("local_attn_chunk_length", 64), c.get("local_num_chunks_before", 1))
    pattern = shortest_pattern(kinds)
    return ModelConfig(
        vocab_size=V, num_layers=len(kinds), d_model=D, num_heads=N, head_width=H, d_ff=F, context_length=math.prod(shape),
        feedforward=activation({"hidden_act": "relu"} | c, "hidden_act"), norm_eps=c.get("layer_norm_eps", 1e-12),
        positions=Axial(tuple(shape), tuple(widths)), masks=tuple(local if kind == "local" else causal() for kind in pattern),
        mixer=tuple(None if kind == "local" else lsh for kind in pattern), stack=Reversible(streams=2),
        use_bias="up|down|norm", heads=() if architecture(c) == "ReformerModel" else (LanguageModel(bias=True),),
        tie_embeddings=False, dropout_rate=c.get("hidden_dropout_prob", 0.05), init_std=c.get("initializer_range", 0.02),
    )  # fmt: skip


def write_reformer(config: ModelConfig) -> Json:
    pattern = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    kinds = ["lsh" if pattern[i % len(pattern)] else "local" for i in range(config.num_layers)]
    lsh: Any = next(filter(None, pattern), mixers.Reformer())
    local = next((mask for mask, kind in zip(config.masks, kinds, strict=False) if kind == "local"), None)
    found = re.fullmatch(r"causal\(\) & chunked\((\d+), (\d+)(?:, 0)?\)", str(local))
    chunk, before = map(int, found.groups()) if found else (64, 1)
    positions: Any = config.positions
    return {
        "architectures": ["ReformerModelWithLMHead" if config.heads else "ReformerModel"], "model_type": "reformer",
        "is_decoder": True, "vocab_size": config.vocab_size, "hidden_size": config.d_model,
        "attention_head_size": config.head_size, "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers, "feed_forward_size": config.ff_width, "attn_layers": kinds,
        "hidden_act": NAME.get(config.feedforward), "layer_norm_eps": config.norm_eps, "axial_pos_embds": True,
        "axial_pos_shape": list(positions.shape), "axial_pos_embds_dim": list(positions.widths),
        "max_position_embeddings": config.context_length, "lsh_attn_chunk_length": lsh.chunk, "num_hashes": lsh.rounds,
        "num_buckets": list(lsh.buckets) if isinstance(lsh.buckets, tuple) else lsh.buckets,
        "lsh_num_chunks_before": lsh.chunks_before, "lsh_num_chunks_after": lsh.chunks_after, "hash_seed": lsh.seed or None,
        "local_attn_chunk_length": chunk, "local_num_chunks_before": before, "local_num_chunks_after": 0,
        "hidden_dropout_prob": config.dropout_rate, "initializer_range": config.init_std, "tie_word_embeddings": False,
    }  # fmt: skip


def reformer_rules(config: ModelConfig) -> list[Rule]:
    e, layer = "reformer.embeddings.", "reformer.encoder.layers.{}."
    own, feed = layer + "attention.self_attention.", layer + "feed_forward."
    pattern = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    local = [i for i in range(config.num_layers) if pattern[i % len(pattern)] is None]
    same = tuple((i, i) for i in local)
    hashed = tuple((i, i) for i in range(config.num_layers) if i not in local)
    return [
        Rule("embedding/tokens", e + "word_embeddings.weight", "leaf"),
        Rule("embedding/positions/lines", e + "position_embeddings.weights.0", "lines"),
        Rule("embedding/positions/columns", e + "position_embeddings.weights.1", "columns"),
        Rule("layers/attention_norm", layer + "attention.layer_norm", "norm"),
        Rule("layers/attention/query", own + "query", "linear", same),
        Rule("layers/attention/query", own + "query_key", "linear", hashed),
        Rule("layers/attention/key", own + "key", "linear", tuple(enumerate(local))),
        Rule("layers/attention/value", own + "value", "linear"),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/feedforward_norm", feed + "layer_norm", "norm"),
        Rule("layers/feedforward/up", feed + "dense.dense", "linear"),
        Rule("layers/feedforward/down", feed + "output.dense", "linear"),
        Rule("final_norm", "reformer.encoder.layer_norm", "norm"),
        Rule("heads/language_model/kernel", "lm_head.decoder.weight", "leaf"),
        Rule("heads/language_model/bias", "lm_head.bias", "unread"),
    ]


TIED_HEAD = {"lm_head.weight": "model.embed_tokens.weight"}
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        read_gpt2, write_gpt2, gpt2_rules, "transformer.", r"\.attn\.(masked_)?bias$",
        {"lm_head.weight": "transformer.wte.weight"},
    ),
    "gpt_neo": Family(
        read_gpt_neo, write_gpt_neo, gpt_neo_rules, "transformer.", r"\.attention\.(masked_)?bias$",
        {"lm_head.weight": "transformer.wte.weight"},
    ),
    **{
        kind: Family(read_llama, write_llama(kind), llama_rules, "model.", aliases=TIED_HEAD) for kind in LLAMAS
    },
    "bert": encoder_family("Bert", "bert", "bert"),
    "roberta": encoder_family("Roberta", "roberta", "roberta", roberta=True),
    "longformer": encoder_family("Longformer", "longformer", "longformer", roberta=True),
    "big_bird": encoder_family("BigBird", "big_bird", "bert"),
    "t5": Family(
        read_t5, write_t5, t5_rules, ignored=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias",
        aliases={
            "lm_head.weight": "shared.weight", "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
    ),
    "marian": Family(
        read_marian, write_marian, marian_rules, "model.", r"embed_positions\.weight$",
        {
            "lm_head.weight": "model.shared.weight", "model.encoder.embed_tokens.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
        },
    ),
    "vit": Family(read_vit, write_vit, vit_rules, "vit."),
    "reformer": Family(read_reformer, write_reformer, reformer_rules, "reformer."),
}  # fmt: skip
