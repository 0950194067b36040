"""ELECTRA: BERT with a head that finds replaced tokens. Clark et al. 2020, arXiv:2003.10555.

The small models and the generators have an embedding that is narrower than their layers, as in
`zoo.albert`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import params
from jaxformer.errors import ConfigError
from jaxformer.families.bert import TASKS, TEXT_FIELDS, encoder_rules
from jaxformer.families.classes import class_kind, count_labels, heads_by_class, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import ACTIVATION, Json, Key, get, only, read_fields, write_fields
from jaxformer.masks import causal
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import Classification, Embedding, LanguageModel, Learned, ModelConfig
from jaxformer.models.heads import Head
from jaxformer.models.layer import Tree, linear
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.zoo.albert import Factorised
from jaxformer.zoo.projection import Projection


@dataclass(frozen=True)
class Discriminator:
    """A head: one number for each token `[B, T]`, large if the token was replaced.

    Clark et al. 2020, arXiv:2003.10555, section 2.
    """

    activation: str = "gelu"  # after the linear map that comes first
    name: str = "discriminator"  # key of its parameters and of its output

    def __call__(self, config: ModelConfig) -> Head:
        """The head for models of this config."""
        D, start = config.hidden_width, normal(config.std)

        def matrix(out: int) -> Tree:
            return params.linear((D, out), ("embed", None), ("embed",), start, True)

        def apply(params: Tree, hidden: Float[Array, "B T D"], *_) -> Float[Array, "B T"]:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            hidden = ACTIVATIONS[self.activation](linear("btd,dc->btc", hidden, params["dense"]))
            return linear("btd,dc->btc", hidden, params, wide)[..., 0]

        return Head(self.name, matrix(1) | {"dense": matrix(D)}, apply)


NAME = "Electra"
KINDS = ("Model", "ForPreTraining", *TASKS, "ForQuestionAnswering", "ForCausalLM")
SUMMARY = {"pooler": Key("summary_activation", "gelu", ACTIVATION)}  # of ForMultipleChoice


def _heads(
    classes: int, activation: str = "gelu", summary: str = "gelu", transform: Any = "gelu"
) -> dict[str, tuple]:
    """{end of a class name: its heads}."""
    sequence = Classification(classes, pool="position_0", pooler="gelu")
    choice = Classification(1, pool="position_0", pooler=summary, name="multiple_choice")
    found = heads_by_class(KINDS, sequence, LanguageModel(transform, bias=True))
    return found | {"ForPreTraining": (Discriminator(activation),), "ForMultipleChoice": (choice,)}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, position_embedding_type="absolute", add_cross_attention=False)
    fields = read_fields(c, TEXT_FIELDS)
    width = get(c, "embedding_size", 128)
    token_types = get(c, "type_vocab_size", 2)
    embedding: Any = Embedding(norm=True, token_types=token_types)
    transform: Any = "gelu"
    if width != fields["d_model"]:
        embedding = Factorised(width, token_types)
        transform = Projection("gelu", width)
    kind = class_kind(c, NAME, KINDS)
    summary = _read_summary(c) if kind == "ForMultipleChoice" else "gelu"
    heads = _heads(count_labels(c), fields["feedforward"], summary, transform)[kind]
    # position 0 sees no token if it is padding: transformers gives NaN
    if c.get("is_decoder") and any(isinstance(head, Classification) for head in heads):
        raise ConfigError(f"config.json: is_decoder=True is not supported with {NAME + kind}")
    return ModelConfig(
        **fields,
        block=post_norm,
        positions=Learned(),
        embedding=embedding,
        heads=heads,
    )


def _read_summary(c: Json) -> str:
    """The activation after the linear map of a choice."""
    only(c, summary_type="first", summary_use_proj=True, summary_proj_to_labels=False)
    if c.get("summary_activation", "gelu") is None:
        return "identity"
    return read_fields(c, SUMMARY)["pooler"]


def _write(config: Any) -> Json:
    # first the classes that are decoders if the config is one, and otherwise those that are not
    is_decoder = config.masks == (causal(),)
    kinds = sorted(KINDS, key=lambda kind: (kind == "ForCausalLM") != is_decoder)
    heads = _heads(2)
    c = write_fields(config, TEXT_FIELDS)
    width = getattr(config.embedding, "width", config.d_model)
    c |= {"embedding_size": width, "type_vocab_size": config.embedding.token_types}
    for head in config.heads:
        if head.name == "multiple_choice":
            c |= write_fields(head, SUMMARY)
    return c | write_heads(config.heads, NAME, {kind: heads[kind] for kind in kinds})


def _rules(config: ModelConfig) -> list[Rule]:
    heads = {
        "discriminator/dense": "discriminator_predictions.dense",
        "discriminator": "discriminator_predictions.dense_prediction",
        "language_model/transform": "generator_predictions.dense",
        "language_model/transform/norm": "generator_predictions.LayerNorm",
        "language_model/kernel": "generator_lm_head.weight",
        "language_model/bias": "generator_lm_head.bias",
        "classification/pooler": "classifier.dense",
        "classification": "classifier.out_proj",
        "multiple_choice/pooler": "sequence_summary.summary",
        "multiple_choice": "classifier",
        "token_classification": "classifier",
        "span": "qa_outputs",
    }
    projection = Rule("embedding/projection", "electra.embeddings_project")
    return [*encoder_rules("electra"), projection, *rules("heads/", "", heads)]


FAMILY = Family(
    _read,
    _write,
    _rules,
    prefix="electra.",
    heads=r"^(discriminator_predictions|generator_\w+|sequence_summary|classifier|qa_outputs)\.",
    aliases={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
)
FAMILIES = {"electra": FAMILY}
