"""Heads read the last hidden states: logits of tokens, classes of sequences or of positions."""

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

MOST_POSITIONS = 1024  # a long context has too many pairs of positions to evaluate them all


class Head(NamedTuple):
    """A head. `ModelConfig.heads` may hold any function `config -> Head`."""

    name: str  # the key of its parameters and of its output
    spec: Tree  # of `Spec`
    # (params, hidden [B, T, D], padding_mask [B, T] or None, inputs) -> array, float32 or wider, or
    # a tree of arrays; the padding mask is False for padding; `inputs` is the argument of
    # `models.apply`. A fifth parameter called `tokens` gets those of `models.apply`, or None where
    # only hidden states are known, as in decoding
    apply: Callable


class Transform(NamedTuple):
    """What comes before the product with the vocabulary's rows.

    `LanguageModel.transform` may be any function `config -> Transform`.
    """

    spec: Tree  # of `Spec`
    apply: Callable  # (params, hidden [B, T, D]) -> [B, T, width]
    width: int  # features of the result, and of the rows of the vocabulary


def run(
    head: Head,
    params: Tree,
    hidden: Float[Array, "B T D"],
    padding_mask,
    inputs: Tree,
    tokens: Any = None,
) -> Tree:
    """The output of a head.

    Heads in older files have three parameters. They are called without `inputs`.
    """
    names = code.positional_names(head.apply)
    if len(names) == 3:
        return head.apply(params, hidden, padding_mask)
    if names[4:5] == ["tokens"]:
        return head.apply(params, hidden, padding_mask, inputs, tokens)
    return head.apply(params, hidden, padding_mask, inputs)


def heads(config: ModelConfig, table: Weight | None = None) -> dict[str, Head]:
    """{name: head} of the config. A language model may read the embedding's `table` `[V, D]`."""
    made = [_head(config, head, table) for head in config.heads]
    for name, count in Counter(head.name for head in made).items():
        if count > 1:
            raise ConfigError(
                f"model.heads: {count} of them are called {name!r}; give each a name of its own"
            )
    return {head.name: head for head in made}


def spec(config: ModelConfig) -> Tree:
    """{name: parameters} of the heads that have parameters."""
    return {name: head.spec for name, head in heads(config).items() if head.spec}


def _head(config: ModelConfig, head, table: Weight | None) -> Head:
    D, V = config.hidden_width, config.vocab_size
    start = normal(config.std)

    def matrix(width, out, axis, bias):
        return params.linear((width, out), ("embed", axis), ("embed",), start, bias)

    match head:
        case LanguageModel():
            tree: Tree = {"bias": Spec((V,), ("vocab",), zeros)} if head.bias else {}
            transform = transform_of(config, head)
            if transform is not None:
                tree["transform"] = transform.spec
            if not config.tie_embeddings:  # [V, D] like the embedding: one product for both
                width = row_width(config, head)
                tree["kernel"] = Spec((V, width), ("vocab", "embed"), start, ("embed",))
            return Head(
                head.name,
                tree,
                lambda params, hidden, *_: logits(config, head, params, hidden, table),
            )
        case Classification():
            width = head.pooler_width or config.d_model  # also for a stack of two streams
            tree = {"pooler": matrix(D, width, None, True)} if head.pooler else {}
            if head.classes is not None:
                tree |= matrix(width if head.pooler else D, head.classes, "class", head.bias)
            return Head(head.name, tree, partial(classify, head))
        case TokenClassification():

            def classes(params, hidden, *_):
                return linear("btd,dc->btc", hidden, params, _wide(hidden))

            return Head(head.name, matrix(D, head.classes, "class", True), classes)
    return head(config)


def transform_of(config: ModelConfig, head: LanguageModel) -> Transform | None:
    """The transform of a language model: a linear map, an activation and a norm, or your own."""
    if head.transform is None:
        return None
    if callable(head.transform):
        return head.transform(config)
    return projection(config, head.transform)


def projection(
    config: ModelConfig, activation: str, width: int | None = None, bias: bool = True
) -> Transform:
    """norm(activation(x W + b)), with `width` features; None: those of the hidden states.

    BERT: Devlin et al. 2018, arXiv:1810.04805, in the published code.
    """
    D = config.hidden_width
    width = width or D
    spec = params.linear((D, width), ("embed", None), ("embed",), normal(config.std), bias=False)
    spec["norm"] = norm_spec(config, width)
    if bias:
        spec["bias"] = Spec((width,), ("embed",), zeros)  # it keeps the axis "embed"

    def apply(params: Tree, hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        hidden = ACTIVATIONS[activation](linear("btd,dc->btc", hidden, params))
        return norm(config, params["norm"], hidden)

    return Transform(spec, apply, width)


def row_width(config: ModelConfig, head: LanguageModel) -> int:
    """The width of the vocabulary's rows that a language model reads by."""
    transform = transform_of(config, head)
    return config.hidden_width if transform is None else transform.width


def logits(
    config: ModelConfig, head: LanguageModel, params: Tree, hidden: Float[Array, "B T D"], table
) -> Array:
    """Logits `[B, T, V]`: the product of `unembedding`, after the softcap."""
    hidden, kernel, bias = unembedding(config, head, params, hidden, table)
    y = ops.einsum("btd,vd->btv", hidden, kernel, dtype=_wide(hidden))
    y = with_logical_constraint(add_bias(y, bias), "batch", "length", "vocab")
    cap = config.logit_softcap
    return y if cap is None else cap * jnp.tanh(y / cap)


def classify(
    head: Classification,
    params: Tree,
    hidden: Float[Array, "B T D"],
    padding_mask: Any,
    inputs: Tree = None,
) -> Float[Array, "B C"]:
    """Classes of each batch row, or its pooled hidden state."""
    wide = _wide(hidden)
    pooled = pool(hidden, head.pool, padding_mask)
    if head.pooler:
        pooled = ACTIVATIONS[head.pooler](linear("bd,dc->bc", pooled, params["pooler"]))
    if head.classes is None:
        return pooled.astype(wide)
    return linear("bd,dc->bc", pooled, params, wide)


def _wide(x: Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def unembedding(
    config: ModelConfig,
    head: LanguageModel,
    params: Tree,
    hidden: Float[Array, "B T D"],
    tokens_table,
):
    """(hidden, kernel `[V, D]`, bias `[V]` or None): logits are hidden kernel^T + bias.

    These are the arguments of `ops.projected_cross_entropy`.
    """
    transform = transform_of(config, head)
    if transform is not None:
        hidden = transform.apply(params["transform"], hidden)
    scale = head.scale
    # with MuP, a tied table starts and learns as an embedding
    if config.tie_embeddings and isinstance(config.init_std, MuP):
        scale *= config.init_std.base_width / config.d_model
    if scale != 1.0:
        hidden = hidden * scale
    kernel = tokens_table if config.tie_embeddings else params["kernel"]
    return hidden, kernel, params.get("bias")


def pool(
    hidden: Float[Array, "B T D"], pooling: str, padding_mask: Bool[Array, "B T"] | None = None
) -> Float[Array, "B D"]:
    """One hidden state for each batch row: "first", "last", "mean" or "position_0".

    The first three read the positions that are not padding. `position_0` reads position 0, even if
    it is padding.
    """
    flags = jnp.ones(hidden.shape[:2], bool) if padding_mask is None else padding_mask
    match pooling:
        case "mean":
            weights = flags / jnp.maximum(flags.sum(axis=1, keepdims=True), 1)
            return ops.einsum("btd,bt->bd", hidden, weights)
        case "position_0":
            return hidden[:, 0]
        case "first":
            position = jnp.argmax(flags, axis=1)
        case "last":
            position = flags.shape[1] - 1 - jnp.argmax(flags[:, ::-1], axis=1)
        case _:
            raise ConfigError(f"pool={pooling!r}: expected first, last, mean or position_0")
    return jnp.take_along_axis(hidden, position[:, None, None], axis=1)[:, 0]


def sees_later_tokens(config: ModelConfig, everywhere: bool = False) -> bool:
    """Whether a mask of the model lets a token see later tokens, which it could then copy.

    Without `everywhere`, a prefix LM (`causal() | prefix(n)`) does not count: its tokens see later
    tokens only within the prefix. It generates, but not all of its labels are predictions.
    """
    return any(shows_later(mask, config.context_length, everywhere) for mask in set(config.masks))


def shows_later(mask: Mask, length: int, everywhere: bool = True) -> bool:
    """Whether the mask shows a later position to any query.

    Without `everywhere`: whether it shows a later position behind the prefix to a query in the last
    half. The prefix is the first positions, if all queries see them. At most `MOST_POSITIONS` of
    each half are evaluated.
    """
    half = min(length // 2 + 1, MOST_POSITIONS)
    positions = np.union1d(np.arange(half), np.arange(length - half, length))
    visible = evaluate(mask.sized(length), positions[None], positions[None])
    later = np.triu(visible, 1)
    if not everywhere:
        # the number of first keys that all queries see
        prefix = int(np.cumprod(visible.all(axis=(0, 1, 2))).sum())
        later = later[..., -half:, prefix if prefix < len(positions) else 0 :]
    return bool(later.any())


def shows_labels(config: ModelConfig, prompt: int, length: int) -> bool:
    """Whether a mask shows a position from `prompt` on to an earlier position.

    Only the `MOST_POSITIONS` positions around the prompt's end are evaluated.
    """
    positions = np.arange(
        max(0, prompt - MOST_POSITIONS // 2), min(length, prompt + MOST_POSITIONS // 2)
    )
    masks = {mask.sized(config.context_length) for mask in config.masks if not is_causal(mask)}
    visible = (evaluate(mask, positions[None], positions[None]) for mask in masks)
    return any(np.triu(pairs, 1)[..., positions >= prompt].any() for pairs in visible)


def language_model(config: ModelConfig) -> LanguageModel | None:
    """The config's language model head, if it has one."""
    return next((head for head in config.heads if isinstance(head, LanguageModel)), None)


def tables(head: LanguageModel, params: Tree) -> tuple[Tree, Any]:
    """(the parameters of a language model's head, the embedding's table) of a stack's `params`."""
    own = params.get("heads", {}).get(head.name, {})
    return own, params.get("embedding", {}).get("tokens")


def continues_text(model: Any) -> bool:
    """Whether a model predicts the next token from earlier tokens; a masked LM does not."""
    has_head = isinstance(model, ModelConfig) and language_model(model) is not None
    return has_head and not sees_later_tokens(model)
