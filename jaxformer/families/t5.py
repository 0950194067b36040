"""T5: an encoder-decoder, or only its encoder."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import class_kind
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    ACTIVATION,
    GATE,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.masks import causal, full
from jaxformer.models.config import EncoderDecoder, LanguageModel, ModelConfig, Relative
from jaxformer.ops.feedforward import GATES

T5_ACTIVATION = {"gated-gelu": GATE["gelu_tanh"]} | ACTIVATION  # T5's gated-gelu is the tanh form
T5 = {
    "vocab_size": Key("vocab_size"),
    "num_layers": Key("num_layers"),
    "d_model": Key("d_model"),
    "num_heads": Key("num_heads"),
    "head_width": Key("d_kv"),
    "d_ff": Key("d_ff"),
    "context_length": Key("n_positions", 512),
    "norm_eps": Key("layer_norm_epsilon", 1e-6),
    "dropout_rate": Key("dropout_rate", 0.1),
    "feedforward": Key("feed_forward_proj", "relu", T5_ACTIVATION),
}
RELATIVE = {
    "buckets": Key("relative_attention_num_buckets", 32),
    "max_distance": Key("relative_attention_max_distance", 128),
}


def _read_t5(c: Json, names: Collection[str]) -> EncoderDecoder | ModelConfig:
    fields, relative = read_fields(c, T5), read_fields(c, RELATIVE)
    feedforward = c.get("feed_forward_proj", "relu")
    tied = get(c, "tie_word_embeddings", True)
    name = "gelu_new" if feedforward == "gated-gelu" else feedforward.removeprefix("gated-")
    only(c, dense_act_fn=name, is_gated_act=feedforward.startswith("gated-"), is_decoder=False)
    scale = fields["d_model"] ** -0.5 if get(c, "scale_decoder_outputs", tied) else 1.0
    head = LanguageModel(scale=scale)
    kinds = {"ForConditionalGeneration": (head,), "Model": (), "EncoderModel": ()}
    kind = class_kind(c, "T5", kinds)
    buckets, distance = relative["buckets"], relative["max_distance"]
    # half of the decoder's buckets hold one distance each, and must end before the maximum
    if not 2 <= buckets // 2 < distance:
        expected = (
            f"more than half of relative_attention_num_buckets={buckets}, which must be at least 4"
        )
        raise ConfigError(
            f"config.json: relative_attention_max_distance={distance}: expected {expected}"
        )
    encoder = ModelConfig(
        **fields,
        norm="rms_norm",
        positions=Relative(**relative),
        masks=(full(),),
        use_bias=False,
        attention_scale=1.0,
        heads=(),
        attention_dropout_rate=fields["dropout_rate"],
    )
    if kind == "EncoderModel":
        return encoder
    decoder = replace(
        encoder,
        num_layers=get(c, "num_decoder_layers", None) or encoder.num_layers,
        masks=(causal(),),
        heads=kinds[kind],
        positions=Relative(**relative, bidirectional=False),
        tie_embeddings=tied,
    )
    return EncoderDecoder(encoder, decoder)


def _write_t5(config: EncoderDecoder | ModelConfig) -> Json:
    encoder = config if isinstance(config, ModelConfig) else config.encoder
    c = write_fields(encoder, T5) | write_fields(encoder.positions, RELATIVE)
    if isinstance(config, ModelConfig):
        return c | {
            "architectures": ["T5EncoderModel"],
            "is_encoder_decoder": False,
            "tie_word_embeddings": True,
        }
    heads: Any = config.decoder.heads
    return c | {
        "architectures": ["T5ForConditionalGeneration" if heads else "T5Model"],
        "is_encoder_decoder": True,
        "num_decoder_layers": config.decoder.num_layers,
        "tie_word_embeddings": config.decoder.tie_embeddings,
        "scale_decoder_outputs": bool(heads) and heads[0].scale != 1.0,
    }


def _t5_rules(config: EncoderDecoder | ModelConfig) -> list[Rule]:
    if isinstance(config, ModelConfig):
        return [Rule("embedding/tokens", "shared.weight"), *_t5_stack("", "encoder", config)]
    return [
        Rule("decoder/embedding/tokens", "shared.weight"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight"),
        *_t5_stack("encoder/", "encoder", config.encoder),
        *_t5_stack("decoder/", "decoder", config.decoder),
    ]


def _t5_stack(ours: str, theirs: str, config: ModelConfig) -> list[Rule]:
    sublayers = {
        "attention": "SelfAttention",
        "cross_attention": "EncDecAttention",
        "feedforward": "DenseReluDense",
    }
    if theirs == "encoder":
        del sublayers["cross_attention"]
    up = "wi_1" if config.feedforward in GATES else "wi"
    names = {
        "query": "q",
        "key": "k",
        "value": "v",
        "out": "o",
        "gate": "wi_0",
        "up": up,
        "down": "wo",
    }
    relative = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    result = rules(
        ours, f"{theirs}.", {"shared/relative": relative, "final_norm": "final_layer_norm"}
    )
    for number, (sublayer, module) in enumerate(sublayers.items()):
        layer = f"{theirs}.block.{{}}.layer.{number}."
        result += [Rule(f"{ours}layers/{sublayer}_norm", layer + "layer_norm")]
        result += rules(f"{ours}layers/{sublayer}/", f"{layer}{module}.", names)
    return result


STACK_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# the head last: it is the table of a tied model only where the file has no other copy
T5_ALIASES = dict.fromkeys((*STACK_TABLES, "lm_head.weight"), "shared.weight")
T5_UNUSED = r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
FAMILIES = {
    "t5": Family(
        _read_t5, _write_t5, _t5_rules, "", T5_UNUSED, aliases=T5_ALIASES, tied_without_head=True
    )
}
