"""Numbers of each token that a model's logits give, without an array of all logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import Float, Integer

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models import heads
from jaxformer.ops.losses import chunk_length, cut_length
from jaxformer.params import Tree
from jaxformer.sharding import mesh_axes

# (logits [B, t, V], labels [B, t]) -> an array [B, t], or a tree of such arrays
OfLogits = Callable[[Array, Array], Any]


class Numbers(NamedTuple):
    """What a function of the logits gave for each token, and what the model answered beside it."""

    values: Any  # an array [B, T], or a tree of such arrays
    output: Any  # `models.Output`, without logits if the model is a config


class LanguageHead(NamedTuple):
    """The language model of a model of this library."""

    config: models.ModelConfig  # of the stack that it reads
    head: models.LanguageModel
    params: Tree  # of that stack


def language_head(model: Any, params: Tree) -> LanguageHead:
    """The language model of a config. Raises ConfigError for a config without one."""
    config = models.last_stack(model)
    head = heads.language_model(config)
    if head is None:
        raise ConfigError(
            f"model.heads={config.heads}: this objective needs a LanguageModel among them"
        )
    of_stack = params if isinstance(model, models.ModelConfig) else params["decoder"]
    return LanguageHead(config, head, of_stack)


def of_logits(
    function: OfLogits,
    model: Any,
    params: Any,
    tokens: Integer[Array, "B T"],
    labels: Integer[Array, "B T"],
    **inputs: Any,
) -> Numbers:
    """`function(logits, labels)` of a model that reads `tokens`: arrays `[B, T]`.

    The logits of some positions are in memory at a time. The backward pass computes these again.
    `inputs` are arguments of `models.apply`. Raises ConfigError for a model without a language
    model.
    """
    if not models.is_config(model):
        output = models.apply(model, params, tokens, **inputs)
        return Numbers(function(output.logits, labels), output)
    config, head, tree = language_head(model, params)
    output = models.encode(model, params, tokens, **inputs)
    own, table = heads.tables(head, tree)

    def of_hidden(hidden, labels):
        return function(heads.logits(config, head, own, hidden, table), labels)

    return Numbers(over_chunks(of_hidden, output.hidden, labels, config.vocab_size), output)


def over_chunks(
    function: Callable[[Array, Array], Any],
    hidden: Float[Array, "B T D"],
    labels: Integer[Array, "B T"],
    vocab_size: int,
) -> Any:
    """`function(hidden, labels)` -> arrays `[B, T]`, computed for some positions at a time.

    Where a mesh splits the positions, each device has few of them, and all are computed at once.
    """
    B, T = labels.shape
    of_chunk = jax.checkpoint(lambda chunk: function(*chunk))
    size = chunk_length(B, T, vocab_size)
    if size >= T or mesh_axes("length", T):
        return of_chunk((hidden, labels))

    def join(x):
        return x.swapaxes(0, 1).reshape(B, -1)[:, :T]

    chunks = cut_length(hidden, size), cut_length(labels, size)
    return jax.tree.map(join, jax.lax.map(of_chunk, chunks))
