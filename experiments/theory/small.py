"""What the experiments of this folder share: the shortest training loop, for any function from tokens to logits.

A batch is a dictionary of `tokens`, `labels` and `weights` [B, T], drawn from a key: the same (seed, step), the same batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

Batch = dict[str, Array]
Forward = Callable[[Any, Array], Array]  # (params, tokens [B, T]) -> logits [B, T, V]


def cross_entropy(logits: Array, batch: Batch) -> Array:
    """The mean of -log p(label), in nats, with the weights of the batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def accuracy(logits: Array, batch: Batch) -> Array:
    """The share of labels that are the likeliest token."""
    return ((logits.argmax(axis=-1) == batch["labels"]) * batch["weights"]).sum() / batch["weights"].sum()


def copies(tree: Any, count: int) -> Any:
    """Each leaf [count, ...]: models that train side by side, by `jax.vmap`. Adam does not see that the loss is their mean."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def previous_tokens(key: Array, vocabulary: int, batch: int, length: int) -> Batch:
    """Random tokens; the label of each but the first is the one before it."""
    tokens = jax.random.randint(key, (batch, length), 0, vocabulary)
    weights = jnp.broadcast_to(jnp.arange(length)[None] > 0, tokens.shape).astype(jnp.float32)
    return {"tokens": tokens, "labels": jnp.roll(tokens, 1, axis=1), "weights": weights}


def train(
    forward: Forward, params: Any, draw: Callable[[Array], Batch], optimizer: optax.GradientTransformation, steps: int,
    every: int, measure: Callable[[Any], dict[str, Array]] | None = None, seed: int = 0,
) -> tuple[Any, list[dict]]:  # fmt: skip
    """(trained parameters, a record each `every` steps: step, mean training loss since the last, what `measure` says)."""
    key, state, measured = jax.random.key(seed), optimizer.init(params), jax.jit(measure) if measure else lambda params: {}
    records, losses = [], []

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, step):
        batch = draw(jax.random.fold_in(key, step))
        loss, gradient = jax.value_and_grad(lambda p: cross_entropy(forward(p, batch["tokens"]), batch))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(jnp.array, params)  # the caller keeps its own
    for step in range(1, steps + 1):
        params, state, loss = update(params, state, step)
        losses.append(loss)
        if step % every == 0:
            found = {name: jax.device_get(value) for name, value in measured(params).items()}
            records.append({"step": step, "loss": float(jnp.stack(losses).mean()), **found})
            losses = []
    return params, records
