"""The state of decoding, one row for each text: `append` adds one token to every row."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.decoding.arguments import Settings
from jaxformer.decoding.cache import Cache
from jaxformer.decoding.filters import History
from jaxformer.decoding.sampling import draw
from jaxformer.sharding import is_split, mesh_axes, with_logical_constraint, with_sharding


@struct.dataclass
class DecodeState:
    """The state of each row of a batch. The first axis of every array is that of the rows."""

    history: History
    cache: Cache  # of all tokens except the last one
    end: Any  # [B]: the number of tokens, prompt included, at which the row ends
    done: Any  # [B]: whether the row has ended
    keys: Any  # [B]: keys of random numbers
    broken: Any  # [B]: whether the row ended because its logits were NaN


def append(state: DecodeState, logits: Array, settings: Settings) -> DecodeState:
    """Adds one token, picked by the logits [B, V], to each row that is not done.

    A row ends where filters leave no token.
    """
    history, done = state.history, state.done
    # filters read the vocabulary many times, so a mesh does not divide it
    logits = with_logical_constraint(logits, "batch", None)
    keys = jax.vmap(jax.random.fold_in)(state.keys, history.length - history.prompt)
    filtered = settings.filtered(logits, history)
    largest = jnp.max(filtered, axis=-1)
    broken = state.broken | ~done & jnp.isnan(largest)
    token = draw(filtered, keys, settings.temperature)
    done = done | (largest == -jnp.inf) | broken
    history = history.extend(token[:, None], jnp.where(done, 0, 1))
    done = done | jnp.isin(token, settings.stop_tokens) | (history.length >= state.end)
    return replace(state, history=history, done=done, broken=broken)


def new_tokens(history: History, row: int, stop_tokens: Any) -> list[int]:
    """The tokens after the prompt of a row, up to its stop token. The arrays are on the host."""
    tokens = history.tokens[row, history.prompt[row] : history.length[row]].tolist()
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens


def end_row(state: DecodeState, row: int) -> DecodeState:
    """The state after a row ended."""
    index, done = jax.device_put((np.int32(row), np.ones(1, bool)))
    return replace(state, done=insert(state.done, index, done))


@partial(jax.jit, static_argnums=0)
def repeat(rows: int, one: Any) -> Any:
    """A tree of one row, repeated to `rows` equal rows; a mesh divides the rows."""
    row_axes = mesh_axes("batch", rows) or None

    def repeated(x):
        x = jnp.broadcast_to(x, (rows, *x.shape[1:]))
        if not is_split():
            return x
        return with_sharding(x, P(row_axes, *[P.UNCONSTRAINED] * (x.ndim - 1)))

    return jax.tree.map(repeated, one)


@partial(jax.jit, donate_argnums=0)
def insert(tree: Any, row, one: Any) -> Any:
    """Replaces row `row` of every array of `tree` by the single row of `one`."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, axis=0), tree, one
    )
