"""The tokens that a mask shows, for an attention that never makes the matrix of all pairs.

`visibility` reads the few masks whose pairs follow from one number for each token, and refuses the
others by name.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from jaxformer.masks import as_mask, rules
from jaxformer.ops.attention.call import check_shapes, mask_refusal
from jaxformer.ops.positions import fill_padding


class View(NamedTuple):
    """What a mask shows: a query sees the keys with its own id; if causal, those before it.

    The id 0 is padding.
    """

    causal: bool
    first: Any  # the absolute position of the first query
    q_ids: Int[Array, "#B T"]
    kv_ids: Int[Array, "#B S"]
    ids: Int[Array, "#B L"] | None  # segments by absolute position

    queries = property(lambda self: self.q_ids != 0)
    keys = property(lambda self: self.kv_ids != 0)

    def runs(self, positions):
        """`[B|1, n]`: the number of each position's segment in its row, from the left.

        Padding does not end a segment.
        """
        if self.ids is None:
            return jnp.zeros((1, len(positions)), jnp.int32)
        ids = fill_padding(rules.lookup(self.ids, positions[None]))
        return jnp.cumsum(ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1), axis=1)

    def refuse_recurring(self, x):
        """x with NaN in rows where an id comes again after another id.

        The sums have dropped its earlier keys. Traced ids cannot raise an error.
        """
        if self.ids is None:
            return x

        def changes(ids):
            return jnp.sum(ids[:, 1:] != ids[:, :-1], axis=1)

        ids = fill_padding(self.ids)
        recurs = (changes(ids) > changes(jnp.sort(ids, axis=1))).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(recurs, jnp.nan, x)

    def refuse_several(self, x):
        """x with NaN in rows of several segments. Traced ids cannot raise an error."""
        maximum = jnp.iinfo(self.kv_ids.dtype).max
        smallest = jnp.min(self.kv_ids, axis=1, where=self.keys, initial=maximum)
        largest = jnp.max(self.kv_ids, axis=1, initial=0)  # a row may have no tokens
        return jnp.where((largest > smallest).reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)


def visibility(mask: Any, T: int, S: int, function: str, takes_causal: bool = True) -> View:
    """Reads `full()` or `causal()`, with `lengths(...)` and one `segments(ids)` or without them.

    Raises NotImplementedError, which names `function`, for other masks.
    """
    mask = as_mask(mask, function)
    causal = False
    ids = None
    padding = []
    for conjunct in mask.conjuncts():
        if conjunct.rule is rules.causal and takes_causal:
            causal = True
        elif conjunct.rule is rules.lengths:
            padding.append(conjunct)
        elif (
            conjunct.rule is rules.segments
            and ids is None
            and (conjunct.offset is None or len(conjunct.arrays) == 1)
        ):
            ids = conjunct.arrays[0]
            padding.append(conjunct)
        elif conjunct.rule is not rules.full:
            takes = "full(), causal()" if takes_causal else "full()"
            raise mask_refusal(
                function, mask, conjunct, f"{takes}, lengths(...) and one segments(ids)"
            )
    q_ids, kv_ids = rules.segment_ids(padding, *mask.positions(T, S))
    return View(causal, mask.first(T, S), q_ids, kv_ids, ids)


def hide(x, shown):
    """x with zeros where `shown`, along x's first axes, is False.

    A product with `shown` would let NaN and infinity through.
    """
    return jnp.where(shown.reshape(*shown.shape, *(1,) * (x.ndim - shown.ndim)), x, 0)


def segment_ids(name, mask, query, key, value):
    """The ids [B, T] of queries and of keys that a self-attention's mask gives, 0 for padding."""
    check_shapes(name, query, key, value)
    B, T = query.shape[:2]
    if key.shape[1] != T:
        raise ValueError(
            f"{name}: T of query and key must agree; got query {query.shape}, key {key.shape}"
        )
    view = visibility(mask, T, T, name, takes_causal=False)
    if not isinstance(view.first, int) or view.first:
        raise mask_refusal(name, mask, "offset", "the positions of a self-attention")
    return tuple(jnp.broadcast_to(ids, (B, T)) for ids in (view.q_ids, view.kv_ids))
