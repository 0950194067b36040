"""T5, mT5 and UMT5: an encoder-decoder, or only its encoder.

UMT5 has a table of relative positions in each layer, and T5 one table for all layers.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from jax.nn.initializers import normal

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.families.classes import SPAN, class_kind, count_labels, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    ACTIVATION,
    GATE,
    GATED,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.masks import causal, full
from jaxformer.models.config import (
    EncoderDecoder,
    LanguageModel,
    ModelConfig,
    Relative,
    TokenClassification,
)
from jaxformer.models.layer import Context, Mixer, Tree
from jaxformer.models.mixers.attention import attention, bias_at_positions
from jaxformer.ops.bias import t5
from jaxformer.ops.feedforward import GATES
from jaxformer.params import Spec

T5_ACTIVATION = ACTIVATION | {f"gated-{name}": gate for name, gate in GATED.items()}
T5_ACTIVATION["gated-gelu"] = GATE["gelu_tanh"]  # the tanh form
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


@dataclass(frozen=True)
class RelativeByLayer:
    """A mixer: attention whose scores have a trained bias, with a table of its own in each layer.

    It is `Relative`, but no layers share a table. UMT5: Chung et al. 2023, arXiv:2304.09151.
    """

    relative: Relative  # the buckets of distance

    def __call__(self, config: ModelConfig) -> Mixer:
        """The mixer. Its table `[R, N]` has a row for each of the R buckets."""
        buckets, max_distance, bidirectional = vars(self.relative).values()

        def attend(params: Tree, context: Context, query, key, value, **options):
            bias = t5(params["relative"], bidirectional, max_distance)
            options["bias"] = bias_at_positions(bias, context)
            return ops.attention(query, key, value, **options)

        table = Spec((buckets, config.num_heads), (None, "heads"), normal(config.std))
        return attention(config, extra={"relative": table}, attend=attend)


class Variant(NamedTuple):
    """T5 or a relative: its class names, and what differs from T5."""

    name: str  # prefix of its class names
    feedforward: str = "relu"  # default of feed_forward_proj
    # whether hidden states are scaled before the head; None: a setting says it
    is_scaled: bool | None = None
    table_in_each_layer: bool = False


VARIANTS = {
    "t5": Variant("T5"),
    "mt5": Variant("MT5", "gated-gelu", is_scaled=False),
    # transformers 5 ties each UMT5, and scales if it is tied
    "umt5": Variant("UMT5", "gated-gelu", is_scaled=True, table_in_each_layer=True),
}


# {the rest of a class name: its heads}
PAIRS = {
    "ForConditionalGeneration": (LanguageModel(),),
    "Model": (),
    "ForQuestionAnswering": (SPAN,),
}
ENCODERS = {"EncoderModel": (), "ForTokenClassification": (TokenClassification(2),)}


def _fields(variant: Variant) -> dict[str, Key]:
    return T5 | {"feedforward": Key("feed_forward_proj", variant.feedforward, T5_ACTIVATION)}


def _read_t5(variant: Variant, c: Json, names: Collection[str]) -> EncoderDecoder | ModelConfig:
    fields, relative = read_fields(c, _fields(variant)), read_fields(c, RELATIVE)
    feedforward = c.get("feed_forward_proj", variant.feedforward)
    tied = get(c, "tie_word_embeddings", True)
    name = "gelu_new" if feedforward == "gated-gelu" else feedforward.removeprefix("gated-")
    only(c, dense_act_fn=name, is_gated_act=feedforward.startswith("gated-"), is_decoder=False)
    if variant.is_scaled is not None:
        only(c, scale_decoder_outputs=variant.is_scaled)
    is_scaled = tied if variant.is_scaled is None else variant.is_scaled
    is_scaled = get(c, "scale_decoder_outputs", is_scaled)
    head = LanguageModel(scale=fields["d_model"] ** -0.5 if is_scaled else 1.0)
    classes = TokenClassification(count_labels(c))
    kinds: dict[str, tuple] = PAIRS | ENCODERS
    kinds |= {"ForConditionalGeneration": (head,), "ForTokenClassification": (classes,)}
    kind = class_kind(c, variant.name, kinds)
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
        **_relative(variant, Relative(**relative)),
        norm="rms_norm",
        masks=(full(),),
        use_bias=False,
        attention_scale=1.0,
        heads=(),
        attention_dropout_rate=fields["dropout_rate"],
    )
    if kind in ENCODERS:
        return replace(encoder, heads=kinds[kind])
    decoder = replace(
        encoder,
        num_layers=get(c, "num_decoder_layers", None) or encoder.num_layers,
        masks=(causal(),),
        heads=kinds[kind],
        **_relative(variant, Relative(**relative, bidirectional=False)),
        tie_embeddings=tied,
    )
    return EncoderDecoder(encoder, decoder)


def _relative(variant: Variant, relative: Relative) -> dict[str, Any]:
    """The fields of a stack with these positions."""
    if variant.table_in_each_layer:
        return {"positions": None, "mixer": RelativeByLayer(relative)}
    return {"positions": relative}


def _write_t5(variant: Variant, config: EncoderDecoder | ModelConfig) -> Json:
    encoder = config if isinstance(config, ModelConfig) else config.encoder
    mixer: Any = encoder.mixer
    relative = mixer.relative if variant.table_in_each_layer else encoder.positions
    c = write_fields(encoder, _fields(variant)) | write_fields(relative, RELATIVE)
    if isinstance(config, ModelConfig):
        c |= {"is_encoder_decoder": False, "tie_word_embeddings": True}
        return c | write_heads(config.heads, variant.name, ENCODERS)
    decoder = config.decoder
    c |= write_heads(decoder.heads, variant.name, PAIRS)
    c |= {
        "is_encoder_decoder": True,
        "num_decoder_layers": decoder.num_layers,
        "tie_word_embeddings": decoder.tie_embeddings,
    }
    if variant.is_scaled is None:
        c["scale_decoder_outputs"] = any(
            getattr(head, "scale", 1.0) != 1.0 for head in decoder.heads
        )
    return c


def _t5_rules(config: EncoderDecoder | ModelConfig) -> list[Rule]:
    if isinstance(config, ModelConfig):
        base = "transformer." if config.heads else ""
        return [
            Rule("embedding/tokens", base + "shared.weight"),
            Rule("heads/token_classification", "classifier"),
            *_t5_stack("", base + "encoder", config),
        ]
    return [
        Rule("decoder/embedding/tokens", "shared.weight"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight"),
        Rule("decoder/heads/span", "qa_outputs"),
        *_t5_stack("encoder/", "encoder", config.encoder),
        *_t5_stack("decoder/", "decoder", config.decoder),
    ]


def _t5_stack(ours: str, theirs: str, config: ModelConfig) -> list[Rule]:
    sublayers = {
        "attention": "SelfAttention",
        "cross_attention": "EncDecAttention",
        "feedforward": "DenseReluDense",
    }
    if theirs.endswith("encoder"):
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
    relative = "block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    tables = {"shared/relative": relative.format(0), "layers/attention/relative": relative}
    result = rules(ours, f"{theirs}.", tables | {"final_norm": "final_layer_norm"})
    for number, (sublayer, module) in enumerate(sublayers.items()):
        layer = f"{theirs}.block.{{}}.layer.{number}."
        result += [Rule(f"{ours}layers/{sublayer}_norm", layer + "layer_norm")]
        result += rules(f"{ours}layers/{sublayer}/", f"{layer}{module}.", names)
    return result


STACK_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# the head last: it is the table of a tied model only where the file has no other copy
T5_ALIASES = dict.fromkeys((*STACK_TABLES, "lm_head.weight"), "shared.weight")
T5_ALIASES["transformer.encoder.embed_tokens.weight"] = "transformer.shared.weight"
OTHER_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
T5_UNUSED = r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"


def _family(variant: Variant) -> Family:
    return Family(
        partial(_read_t5, variant),
        partial(_write_t5, variant),
        _t5_rules,
        prefix="",
        ignored=T5_UNUSED,
        aliases=T5_ALIASES,
        other_names=OTHER_NAMES,
        tied_without_head=True,
    )


FAMILIES = {kind: _family(variant) for kind, variant in VARIANTS.items()}
