"""What reads the last hidden states: logits of tokens, classes of sequences, of positions, of images."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal, zeros
from jaxtyping import Bool, Float

from jaxformer import ops, params
from jaxformer.config import code
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask, is_causal
from jaxformer.masks.blocks import evaluate
from jaxformer.models.config import Classification, LanguageModel, ModelConfig, TokenClassification
from jaxformer.models.layer import linear
from jaxformer.models.mup import MuP
from jaxformer.models.norm import norm, norm_spec
from jaxformer.ops.einsum import Weight, add_bias
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.params import Spec, Tree
from jaxformer.sharding import with_logical_constraint

MOST_POSITIONS = 1024  # positions whose pairs are evaluated: a long context has too many


class Head(NamedTuple):
    """A head: `ModelConfig.heads` may hold any function `config -> Head`."""

    name: str  # the key of its parameters and of its output
    spec: Tree  # of `Spec`
    # (params, hidden [B, T, D], padding_mask [B, T], False for padding, or None, inputs) -> array, float32 or better;
    # `inputs` is what `models.apply` got by that name
    apply: Callable


def run(head: Head, params: Tree, hidden: Float[Array, "B T D"], padding_mask, inputs: Tree) -> Array:
    """The output of a head. A head of three parameters is called without `inputs`: heads of older files have three."""
    if len(code.positional_names(head.apply)) == 3:
        return head.apply(params, hidden, padding_mask)
    return head.apply(params, hidden, padding_mask, inputs)


def heads(config: ModelConfig, table: Weight | None = None) -> dict[str, Head]:
    """The heads of the config by name; a language model may read the embedding's `table` `[V, D]`."""
    made = [_head(config, head, table) for head in config.heads]
    for name, count in Counter(head.name for head in made).items():
        if count > 1:
            raise ConfigError(f"model.heads: {count} of them are called {name!r}; give each a name of its own")
    return {head.name: head for head in made}


def spec(config: ModelConfig) -> Tree:
    """Parameters of all heads that have some: `{name: tree}`."""
    return {name: head.spec for name, head in heads(config).items() if head.spec}


def _head(config: ModelConfig, head, table: Weight | None) -> Head:
    D, V, start = config.hidden_width, config.vocab_size, normal(config.std)

    def matrix(width, out, axis, bias):
        return params.linear((width, out), ("embed", axis), ("embed",), start, bias)

    match head:
        case LanguageModel():
            tree: Tree = {"bias": Spec((V,), ("vocab",), zeros)} if head.bias else {}
            if head.transform:  # its bias keeps the axis "embed"
                bias = {"bias": Spec((D,), ("embed",), zeros)}
                tree["transform"] = matrix(D, D, None, False) | bias | {"norm": norm_spec(config, D)}
            if not config.tie_embeddings:  # [V, D] like the embedding: one product for both
                tree["kernel"] = Spec((V, D), ("vocab", "embed"), start, ("embed",))
            return Head(head.name, tree, lambda params, hidden, *_: logits(config, head, params, hidden, table))
        case Classification():
            width = head.pooler_width or config.d_model  # also of two streams
            tree = {"pooler": matrix(D, width, None, True)} if head.pooler else {}
            if head.classes is not None:
                tree |= matrix(width if head.pooler else D, head.classes, "class", head.bias)
            return Head(head.name, tree, partial(classify, head))
        case TokenClassification():

            def classes(params, hidden, *_):
                return linear("btd,dc->btc", hidden, params, _wide(hidden))

            return Head(head.name, matrix(D, head.classes, "class", True), classes)
    return head(config)


def logits(config: ModelConfig, head: LanguageModel, params: Tree, hidden: Float[Array, "B T D"], table) -> Array:
    """`[B, T, V]`: the product of `unembedding`, after the softcap."""
    hidden, kernel, bias = unembedding(config, head, params, hidden, table)
    found = ops.einsum("btd,vd->btv", hidden, kernel, dtype=_wide(hidden))
    found = with_logical_constraint(add_bias(found, bias), "batch", "length", "vocab")
    cap = config.logit_softcap
    return found if cap is None else cap * jnp.tanh(found / cap)


def classify(
    head: Classification, params: Tree, hidden: Float[Array, "B T D"], padding_mask: Any, inputs: Tree = None
) -> Float[Array, "B C"]:
    """Classes of each batch row, or its pooled hidden state."""
    pooled, wide = pool(hidden, head.pool, padding_mask), _wide(hidden)
    if head.pooler:
        pooled = ACTIVATIONS[head.pooler](linear("bd,dc->bc", pooled, params["pooler"]))
    return pooled.astype(wide) if head.classes is None else linear("bd,dc->bc", pooled, params, wide)


def _wide(x: Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def unembedding(config: ModelConfig, head: LanguageModel, params: Tree, hidden: Float[Array, "B T D"], tokens_table):
    """(hidden, kernel `[V, D]`, bias `[V]` or None) of `ops.projected_cross_entropy`: logits are hidden kernel^T + bias."""
    if head.transform:
        hidden = ACTIVATIONS[head.transform](linear("btd,dc->btc", hidden, params["transform"]))
        hidden = norm(config, params["transform"]["norm"], hidden)
    scale, start = head.scale, config.init_std
    if config.tie_embeddings and isinstance(start, MuP):  # the table starts and learns as an embedding
        scale *= start.base_width / config.d_model
    if scale != 1.0:
        hidden = hidden * scale
    return hidden, tokens_table if config.tie_embeddings else params["kernel"], params.get("bias")


def pool(hidden: Float[Array, "B T D"], pooling: str, padding_mask: Bool[Array, "B T"] | None = None) -> Float[Array, "B D"]:
    """The first or the last position that is no padding, the mean of those, or position 0, padding or not (`position_0`)."""
    flags = jnp.ones(hidden.shape[:2], bool) if padding_mask is None else padding_mask
    match pooling:
        case "mean":
            return ops.einsum("btd,bt->bd", hidden, flags / jnp.maximum(flags.sum(axis=1, keepdims=True), 1))
        case "position_0":
            return hidden[:, 0]
        case "first":
            at = jnp.argmax(flags, axis=1)
        case "last":
            at = flags.shape[1] - 1 - jnp.argmax(flags[:, ::-1], axis=1)
        case _:
            raise ConfigError(f"pool={pooling!r}: expected first, last, mean or position_0")
    return jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]


def sees_later_tokens(config: ModelConfig, everywhere: bool = False) -> bool:
    """Whether a mask of the model lets a token see later ones, so that it cannot predict the next one.

    A prefix LM (`causal() | prefix(n)`) sees later tokens of its prefix alone: it generates, and not all of its labels count.
    """
    return any(shows_later(mask, config.context_length, everywhere) for mask in set(config.masks))


def shows_later(mask: Mask, length: int, everywhere: bool = True) -> bool:
    """Whether the mask shows a later position to any, or else (not `everywhere`) one behind a prefix to the last half.

    A prefix is the first positions, which all see. At most `MOST_POSITIONS` of each half are evaluated.
    """
    half = min(length // 2 + 1, MOST_POSITIONS)
    positions = np.union1d(np.arange(half), np.arange(length - half, length))
    visible = evaluate(mask.sized(length), positions[None], positions[None])
    later = np.triu(visible, 1)
    if not everywhere:
        prefix = int(np.cumprod(visible.all(axis=(0, 1, 2))).sum())  # the first keys that all queries see
        later = later[..., -half:, prefix if prefix < len(positions) else 0 :]
    return bool(later.any())


def shows_labels(config: ModelConfig, prompt: int, length: int) -> bool:
    """Whether a mask shows a position from `prompt` on to an earlier one, in the `MOST_POSITIONS` around the prompt's end."""
    positions = np.arange(max(0, prompt - MOST_POSITIONS // 2), min(length, prompt + MOST_POSITIONS // 2))
    masks = {mask.sized(config.context_length) for mask in config.masks if not is_causal(mask)}
    visible = (evaluate(mask, positions[None], positions[None]) for mask in masks)
    return any(np.triu(pairs, 1)[..., positions >= prompt].any() for pairs in visible)


def language_model(config: ModelConfig) -> LanguageModel | None:
    """The config's language model head, if it has one."""
    return next((head for head in config.heads if isinstance(head, LanguageModel)), None)


def continues_text(model: Any) -> bool:
    """Whether a model predicts the next token from those before it: a masked language model does not."""
    has_head = isinstance(model, ModelConfig) and language_model(model) is not None
    return has_head and not sees_later_tokens(model)
