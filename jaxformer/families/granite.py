"""Granite 3: LLaMA with four multipliers, of embeddings, scores, sub-layers and logits."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxformer.errors import check_numbers
from jaxformer.families.classes import read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    FIELDS,
    decoder_family,
    decoder_rules,
    head_width,
    read_biases,
    write_biases,
    write_widths,
)
from jaxformer.families.family import Rule
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import Json, Key, get, read_fields, write_fields
from jaxformer.models.blocks import (
    Stream,
    Sublayers,
    add,
    final_norm,
    final_norm_spec,
    norms,
)
from jaxformer.models.config import Embedding, LanguageModel, ModelConfig
from jaxformer.models.heads import language_model
from jaxformer.models.layer import Block, Context, Tree
from jaxformer.models.norm import norm

GRANITE = FIELDS | {"attention_scale": Key("attention_multiplier", 1.0)}
BIASES = {"attention_bias": ALL_BIASES, "mlp_bias": "gate|up|down"}


@dataclass(frozen=True)
class ScaledResidual:
    """x + m f(norm(x)) for each sub-layer f, and a norm at the end.

    Such a multiplier lets learning rates transfer over depth: Yang et al. 2023, arXiv:2310.02244.
    Granite has it: IBM 2024, "Granite 3.0 Language Models".
    """

    multiplier: float  # m

    def __post_init__(self):
        check_numbers("ScaledResidual.", self, multiplier=0)

    def __call__(self, config: ModelConfig, names: Sequence[str]) -> Block:
        """The block of a layer with the sub-layers `names`."""

        def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
            for name, f in sublayers.items():
                y = f(norm(config, params[f"{name}_norm"], x))
                x = add(x, self.multiplier * y)
            return x

        return Block(
            norms(config, names, "{}_norm"), apply, final_norm_spec(config), end=final_norm(config)
        )


def _classes(divisor: float) -> dict[str, tuple]:
    """{end of a class name: its heads}. Logits are divided by `divisor`."""
    return {"ForCausalLM": (LanguageModel(scale=1 / divisor),), "Model": ()}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, GRANITE)
    width = head_width(c)
    multiplier = get(c, "residual_multiplier", 1.0)
    return ModelConfig(
        **fields,
        head_width=width,
        norm="rms_norm",
        block=None if multiplier == 1 else ScaledResidual(multiplier),
        positions=read_rope(c, width or fields["d_model"] // fields["num_heads"]),
        embedding=Embedding(scale=get(c, "embedding_multiplier", 1.0)),
        use_bias=read_biases(c, BIASES),
        heads=read_heads(c, "Granite", _classes(get(c, "logits_scaling", 1.0))),
    )


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, GRANITE) | write_heads(config.heads, "Granite", _classes(1.0))
    c |= write_widths(config)
    head = language_model(config)
    # 1 / (1 / 13) is 13.000000000000002
    divisor = 1.0 if head is None else float(f"{1 / head.scale:.15g}")
    c |= {
        "attention_multiplier": config.attention_scale or config.head_size**-0.5,
        "embedding_multiplier": getattr(config.embedding, "scale", 1.0),
        "residual_multiplier": getattr(config.block, "multiplier", 1.0),
        "logits_scaling": divisor,
    }
    return c | write_rope(config.positions) | write_biases(config, BIASES)


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules()


FAMILIES = {"granite": decoder_family(_read, _write, _rules)}
