"""Multi-head latent attention: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.

A cache holds one narrow vector for each token, from which keys and values of all heads are made.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, ones
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.checks import require_numbers
from jaxformer.models.config import Axial, Learned, ModelConfig, Sinusoidal
from jaxformer.models.layer import (
    Context,
    Mixer,
    MixerOutput,
    Tree,
    linear,
    linear_spec,
    residual_std,
)
from jaxformer.models.mixers.attention import (
    attention_options,
    count_tokens,
    split_weights,
    tapped_weights,
)
from jaxformer.ops.attention import cached
from jaxformer.ops.attention.cached import (
    Slots,
    as_array,
    empty_slots,
    first_slots,
    slot_positions,
    write_slots,
    write_token,
)
from jaxformer.ops.attention.call import Call
from jaxformer.ops.einsum import einsum
from jaxformer.ops.positions import Rope, rope
from jaxformer.ops.stored_weight import plain_matrix
from jaxformer.params import Spec, linear as map_without_bias
from jaxformer.sharding import with_logical_constraint


def absorb(query: Float[Array, "B T N H"], key: Float[Array, "C N P"]) -> Float[Array, "B T N CR"]:
    """Queries that read a cache of latents: (q_content W_key, q_rotated) of C + H - P features.

    q_content . (W_key c) = (q_content W_key) . c, so the keys of the heads are never made.
    """
    content, rotated = jnp.split(query, [key.shape[-1]], axis=-1)
    return jnp.concatenate([einsum("btnp,cnp->btnc", content, key), rotated], axis=-1)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): DeepSeek-AI 2024, arXiv:2405.04434, eq. 9-19.

    Of each token a layer keeps a latent c of `rank` features and a key of `rotated` features that
    all heads share: `rank + rotated` numbers in a cache, for any number of heads. A head's query
    has `head_width` features. The last `rotated` of them meet the shared key, and `Rope` turns
    these alone. The others meet the head's own key, W_key c. A head's value is W_value c. Maps that
    read a latent have no biases.

    Raises ConfigError for key heads, and for positions that are a bias or belong to attention.
    """

    rank: int = 512  # features of the latent of keys and values
    rotated: int = 64  # features of the key that all heads share; the rotation acts on these
    query_rank: int | None = None  # features of a latent of queries, too; None: there is none
    value_width: int | None = None  # features of a head's value; None: head_width
    norm_eps: float = 1e-6  # of the RMSNorm of each latent

    __post_init__ = require_numbers(rank=1, rotated=1, query_rank=1, value_width=1, norm_eps=0)

    def __call__(self, config: ModelConfig) -> Mixer:
        N, H = config.num_heads, config.head_size
        if self.rotated >= H:
            raise ConfigError(
                f"model.mixer.rotated={self.rotated}: expected less than model.head_width={H}"
            )
        if config.kv_heads != N:
            raise ConfigError(
                f"model.num_kv_heads={config.num_kv_heads}: heads of latent attention share the "
                "latent; omit it"
            )
        if not isinstance(config.positions, Rope | Learned | Sinusoidal | Axial | None):
            raise ConfigError(
                f"model.positions={config.positions}: latent attention takes Rope, or a table"
            )

        def apply(params: Tree, x: Float[Array, "B T D"], context: Context) -> MixerOutput:
            return self.apply(config, params, x, context)

        def state(batch: int, length: int, dtype) -> Tree:
            return {"latent": empty_slots((batch, 1, length, self.rank + self.rotated), dtype)}

        return Mixer(self.spec(config), apply, state, rolls=True)

    def spec(self, config: ModelConfig) -> Tree:
        D, N, H, C, R = config.d_model, config.num_heads, config.head_size, self.rank, self.rotated

        def of_latent(rank, axis, width):
            axes = "rank", axis, "head"
            shape = rank, N, width
            return map_without_bias(shape, axes, axes[:1], normal(config.std), bias=False)

        def inward(name, width, axis="rank"):
            return linear_spec(config, name, (D, width), ("embed", axis), ("embed",), config.std)

        def norm(width):
            return {"scale": Spec((width,), ("rank",), ones)}

        value_width = self.value_width or H
        axes = "heads", "head", "embed"
        shape = N, value_width, D
        tree = {
            "latent": inward("latent", C),
            "latent_norm": norm(C),
            "shared_key": inward("shared_key", R, "head"),
            "key": of_latent(C, "kv_heads", H - R),
            "value": of_latent(C, "kv_heads", value_width),
            "out": linear_spec(config, "out", shape, axes, axes[:2], residual_std(config)),
        }
        if self.query_rank is None:
            axes = "embed", "heads", "head"
            tree["query"] = linear_spec(config, "query", (D, N, H), axes, axes[:1], config.std)
            return tree
        query = of_latent(self.query_rank, "heads", H)
        norm_of_query = norm(self.query_rank)
        latent = inward("query_latent", self.query_rank)
        return tree | {"query_latent": latent, "query_norm": norm_of_query, "query": query}

    def apply(
        self, config: ModelConfig, params: Tree, x: Float[Array, "B T D"], context: Context
    ) -> MixerOutput:
        def turned(y):
            if not isinstance(config.positions, Rope):
                return y
            return rope(y, context.positions, config.positions, context.text_lengths)

        def normed(name, y):
            return ops.rms_norm(y, params[name]["scale"], self.norm_eps)

        y = x
        if self.query_rank is not None:
            y = normed("query_norm", linear("btd,dc->btc", x, params["query_latent"]))
        query = linear("btc,cnh->btnh", y, params["query"])
        content, rotated = jnp.split(query, [config.head_size - self.rotated], axis=-1)
        query = context.tap("query", jnp.concatenate([content, turned(rotated)], axis=-1))
        query = with_logical_constraint(query, "batch", "length", "heads", None)
        latent = normed("latent_norm", linear("btd,dc->btc", x, params["latent"]))
        shared = linear("btd,dr->btr", x, params["shared_key"])[:, :, None]
        kept = jnp.concatenate([latent[:, :, None], turned(shared)], axis=-1)
        kept = context.tap("latent", kept)  # [B, T, 1, C + R]
        options = attention_options(config, context)
        options["scale"] = options["scale"] or config.head_size**-0.5
        if context.state is not None and context.lengths is not None:
            result, state = self._decode(params, query, kept, context, options)
        else:
            result, state = self._attend(params, query, kept, context, options)
        standard = None if context.state is not None else self._heads(params, kept)[1]
        out = context.tap("heads", tapped_weights(context, result, standard))
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state)

    def _heads(self, params: Tree, kept: Array) -> tuple[Array, Array]:
        """The keys `[B, T, N, H]` and the values of all heads."""
        latent, shared = jnp.split(kept[:, :, 0], [self.rank], axis=-1)
        key = linear("btc,cnh->btnh", latent, params["key"])
        value = linear("btc,cnh->btnh", latent, params["value"])
        shared = jnp.broadcast_to(shared[:, :, None], (*key.shape[:3], self.rotated))
        return jnp.concatenate([key, shared], axis=-1), value

    def _attend(
        self, params: Tree, query: Array, kept: Array, context: Context, options: dict[str, Any]
    ) -> tuple[Any, Tree]:
        """(attention of tokens to each other, the state of a cache that was empty)."""
        result = ops.attention(query, *self._heads(params, kept), **options)
        if context.state is None:
            return result, None
        new = {"latent": kept.swapaxes(1, 2)}
        return result, cached.write(first_slots, context.state, new, count_tokens(context, query))

    def _decode(
        self, params: Tree, query: Array, kept: Array, context: Context, options: dict[str, Any]
    ) -> tuple[Any, Tree]:
        """(attention of new tokens to a cache and to each other, the state with the new tokens).

        The token at position p is in slot p mod S. Scores and sums are of the latents: the sum of
        latents becomes a head's output by W_value afterwards.
        """
        B, T = query.shape[:2]
        state = context.state
        S = jax.tree.leaves(state)[0].shape[2]
        new = {"latent": kept.swapaxes(1, 2)}
        steps = jnp.arange(T)[None]
        positions = context.lengths[:, None] + steps
        new_positions = jnp.where(steps < count_tokens(context, query)[:, None], positions, -1)
        old_positions = slot_positions(S, context.lengths)
        write_first = T == 1 and B <= 32  # a single token is written before the slots are read
        if write_first:
            state = cached.write(write_token, state, new, new_positions)
        query = absorb(query, plain_matrix(params["key"]["kernel"], query.dtype))
        old = state["latent"]
        weights = None
        if context.tap.asks("weights"):
            both = jnp.concatenate([as_array(old, kept.dtype), new["latent"]], axis=2)
            both = both.swapaxes(1, 2)
            of_keys = jnp.concatenate([old_positions, new_positions], axis=1)
            options = options | {"positions": (positions, of_keys), "implementation": None}
            out, weights = split_weights(ops.attention(query, both, both, **options))
        else:
            call = Call(options["mask"], scale=options["scale"], softcap=options["softcap"])
            widths = cached.widths(S) if context.cache_length == S else [S]
            width = jnp.searchsorted(jnp.array(widths), jnp.max(context.lengths))
            # the sums of the shared keys, R of C + R, are computed and left out: it saves a copy
            slots = Slots(old, old, old_positions)
            new_slots = Slots(new["latent"], new["latent"], new_positions)
            out = cached.attention(query, positions, slots, new_slots, call, widths, width)
        if not write_first:
            state = cached.write(write_slots, state, new, new_positions, out)
        value = plain_matrix(params["value"]["kernel"], query.dtype)
        out = einsum("btnc,cnh->btnh", out[..., : self.rank], value)
        return (out if weights is None else (out, weights)), state
