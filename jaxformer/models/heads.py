"""What reads the last hidden states: logits of tokens, classes of sequences, of positions, of images."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, zeros
from jaxtyping import Bool, Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Classification, LanguageModel, ModelConfig, TokenClassification
from jaxformer.models.embedding import norm, norm_spec
from jaxformer.ops.einsum import add_bias
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.params import Spec
from jaxformer.sharding import with_logical_constraint

Tree = Any


class Head(NamedTuple):
    """A head of your own: `ModelConfig.heads` may hold any function `config -> Head`.

    spec: tree of `Spec`; apply: (params, hidden [B, T, D], real [B, T] or None) -> array.
    """

    name: str
    spec: Tree
    apply: Callable


def name(config: ModelConfig, head) -> str:
    """What its parameters and its output are filed under."""
    return head(config).name if callable(head) else head.name


def spec(config: ModelConfig) -> Tree:
    """Parameters of all heads that have some: `{name: tree}`."""
    names = [name(config, head) for head in config.heads]
    for one in set(names):
        if names.count(one) > 1:
            raise ConfigError(
                f"model.heads: {names.count(one)} of them are called {one!r}; give each a name of its own"
            )
    trees = dict(zip(names, (_spec(config, head) for head in config.heads), strict=True))
    return {key: tree for key, tree in trees.items() if tree}


def _spec(config: ModelConfig, head) -> Tree:
    D, V = config.hidden_width, config.vocab_size
    classes = lambda width, n, bias: _linear_spec((width, n), ("embed", "class"), config.init_std, bias)
    match head:
        case LanguageModel():
            tree: Tree = {}
            if head.transform:
                bias = Spec((D,), ("embed",), zeros)
                kernel = Spec((D, D), ("embed", None), normal(config.init_std), ("embed",))
                tree["transform"] = {"kernel": kernel, "bias": bias, "norm": norm_spec(config, D)}
            if not config.tie_embeddings:  # [V, D] like the embedding: one product for both
                tree["kernel"] = Spec((V, D), ("vocab", "embed"), normal(config.init_std), ("embed",))
            return tree | ({"bias": Spec((V,), ("vocab",), zeros)} if head.bias else {})
        case Classification():
            tree = {}
            P = head.pooler_width or config.d_model  # also of two streams
            if head.pooler:
                tree["pooler"] = _linear_spec((D, P), ("embed", None), config.init_std, True)
            return tree | ({} if head.classes is None else classes(P if head.pooler else D, head.classes, head.bias))
        case TokenClassification():
            return classes(D, head.classes, True)
    return head(config).spec


def apply(config: ModelConfig, head, params: Tree, hidden: Float[Array, "B T D"], real, tokens_table) -> Array:
    """The head's output: `[B, T, V]` logits, `[B, classes]` of sequences, `[B, T, classes]` of positions; float32 or better.

    `params` are the head's own, `tokens_table` the embedding `[V, D]`, `real` flags `[B, T]` what is not padding.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    match head:
        case LanguageModel():
            hidden, kernel, bias = unembedding(config, head, params, hidden, tokens_table)
            logits = ops.einsum("btd,vd->btv", hidden, kernel, dtype=wide)
            logits = with_logical_constraint(
                logits if bias is None else add_bias(logits, bias), "batch", "length", "vocab"
            )
            cap = config.logit_softcap
            return logits if cap is None else cap * jnp.tanh(logits / cap)
        case Classification():
            pooled = pool(hidden, head.pool, real)
            if head.pooler:
                pooled = ACTIVATIONS[head.pooler](_linear(pooled, params["pooler"], hidden.dtype))
            return pooled.astype(wide) if head.classes is None else _linear(pooled, params, wide)
        case TokenClassification():
            return _linear(hidden, params, wide)
    return head(config).apply(params, hidden, real)


def unembedding(config: ModelConfig, head: LanguageModel, params: Tree, hidden: Float[Array, "B T D"], tokens_table):
    """(hidden, kernel `[V, D]`, bias `[V]` or None): the logits are hidden kernel^T + bias, before the softcap.

    For losses that never hold the logits of a whole batch (`ops.projected_cross_entropy`).
    """
    if head.transform:
        hidden = ACTIVATIONS[head.transform](_linear(hidden, params["transform"], hidden.dtype))
        hidden = norm(config, params["transform"]["norm"], hidden)
    if head.scale != 1.0:
        hidden = hidden * head.scale
    kernel = tokens_table if config.tie_embeddings else params["kernel"]
    return hidden, kernel, params.get("bias")


def pool(hidden: Float[Array, "B T D"], how: str, real: Bool[Array, "B T"] | None = None) -> Float[Array, "B D"]:
    """The first or the last position that is not padding, the mean of those, or slot 0, padding or not (`position_0`)."""
    flags = jnp.ones(hidden.shape[:2], bool) if real is None else real
    match how:
        case "mean":
            weights = flags / jnp.maximum(flags.sum(axis=1, keepdims=True), 1)
            return ops.einsum("btd,bt->bd", hidden, weights)
        case "position_0":
            return hidden[:, 0]
        case "first":
            at = jnp.argmax(flags, axis=1)
        case "last":
            at = flags.shape[1] - 1 - jnp.argmax(flags[:, ::-1], axis=1)
        case _:
            raise ConfigError(f"pool={how!r}: expected first, last, mean or position_0")
    return jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]


def language_model(config: ModelConfig) -> LanguageModel | None:
    """The config's language model head, if it has one."""
    return next((head for head in config.heads if isinstance(head, LanguageModel)), None)


def _linear_spec(shape, axes, std: float, bias: bool) -> Tree:
    kernel = {"kernel": Spec(shape, axes, normal(std), axes[:1])}
    return kernel | ({"bias": Spec(shape[1:], axes[1:], zeros)} if bias else {})


def _linear(x, params: Tree, dtype):
    y = ops.einsum("bd,dc->bc" if x.ndim == 2 else "btd,dc->btc", x, params["kernel"], dtype=dtype)
    return add_bias(y, params["bias"]) if "bias" in params else y
