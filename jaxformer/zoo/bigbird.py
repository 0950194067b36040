"""Global, neighbouring and random blocks: Zaheer et al. 2020, arXiv:2007.14062."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jaxtyping import Float, Int

from jaxformer import ops
from jaxformer.masks import Mask, segments
from jaxformer.models.config import LanguageModel, ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.models.presets import NEXT_SENTENCE, bert_base_encoder, sized
from jaxformer.ops.attention.blocks import padded
from jaxformer.ops.attention.kernel import Implementation
from jaxformer.zoo.frame import approximation, by_layer, options, refuse_packed, zero_padding
from jaxformer.zoo.visible import segment_ids

Layout = Int[Array, "N inner_blocks r"] | Int[np.ndarray, "N inner_blocks r"]


@jax.named_scope("bigbird_attention")
def attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B T K H"], value: Float[Array, "B T K Hv"], layout: Layout, *,
    block: int, mask: Mask | None = None, scale: float | None = None, dropout_rate: float = 0.0,
    dropout_key: Array | None = None, implementation: Implementation = None,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """Internal transformer construction (ITC): global, neighbouring and random blocks. Zaheer et al. 2020, arXiv:2007.14062.

    Of the nb = ceil(T / block) blocks of queries the first and the last attend to all keys, block i between them to
    the key blocks {0, i - 1, i, i + 1, nb - 1} and `layout[n, i - 1]` (`[N, nb - 2, r]`, of a `random_layout` function). A
    block that it names twice, or that is among the five, counts twice in the softmax, as in the authors' code. `mask` hides
    padding (`segments`, `lengths`), which yields zeros; NotImplementedError for others. Cost grows with T * block * (5 + r).
    """
    ids = segment_ids("bigbird_attention", mask, query, key, value)
    B, T, N = query.shape[:3]
    blocks = -(-T // block)
    if layout.shape[:2] != (N, max(blocks - 2, 0)):
        raise ValueError(f"bigbird_attention: layout is [{N}, {max(blocks - 2, 0)}, r]; got {layout.shape}")
    if B * T == 0:
        return jnp.zeros((B, T, N, value.shape[-1]), value.dtype)
    query, key, value, q_ids, kv_ids = (padded(x, 1, block) for x in (query, key, value, *ids))
    keys = (None, None) if dropout_key is None else random.split(dropout_key)

    ends = np.unique(np.r_[:block, -block:0] % (blocks * block))
    shared: dict[str, Any] = dict(scale=scale, dropout_rate=dropout_rate)
    outer = dict(mask=segments(q_ids[:, ends], kv_ids), dropout_key=keys[0], implementation=implementation)
    dense: Any = ops.attention(query[:, ends], key, value, **outer, **shared)
    outs = [dense[:, :block], dense[:, block:]]
    if blocks > 2:
        outs.insert(1, _inner_blocks(query, key, value, q_ids, kv_ids, layout, block, keys[1], shared))
    return jnp.concatenate(outs, axis=1)[:, :T]


def _inner_blocks(query, key, value, q_ids, kv_ids, layout, block, dropout_key, shared):
    """All but the first and last block of queries, `[B, T - 2 block, N, Hv]`: each block attends to gathered keys."""
    (B, T, N, _), K, r = query.shape, key.shape[2], layout.shape[-1]
    inner_blocks = T // block - 2
    near, counted = _neighbours(inner_blocks + 2)
    index = jnp.concatenate([jnp.broadcast_to(near[None], (N, inner_blocks, 5)), jnp.asarray(layout)], axis=-1)
    head = (jnp.arange(N) // (N // K))[:, None, None]

    def split(x):
        return x.reshape(B, inner_blocks + 2, block, *x.shape[2:])

    def take_blocks(x):  # [B, T, K, H] -> [B, inner_blocks, (5 + r) block, N, H]
        x = split(x).transpose(0, 3, 1, 2, 4)[:, head, index]
        return x.reshape(B, N, inner_blocks, (5 + r) * block, -1).transpose(0, 2, 3, 1, 4)

    counted = np.concatenate([counted, np.ones((inner_blocks, r), bool)], axis=1)[None, None, :, :, None]
    kv_ids = jnp.where(counted, split(kv_ids)[:, index], 0).reshape(B, N, inner_blocks, 1, -1)
    ids = split(q_ids)[:, 1:-1, None, :, None].swapaxes(0, 1), jnp.moveaxis(kv_ids, 2, 0)
    of_each_block = dict(
        mask=Mask(_same_id, arrays=ids), dropout_key=None if dropout_key is None else random.split(dropout_key, inner_blocks)
    )
    # query blocks joined to the batch would be computed whole on each device of a mesh
    attend = jax.vmap(partial(ops.attention, implementation="reference", **shared), 1, 1)  # of keywords it maps the first axis
    out = attend(split(query)[:, 1:-1], take_blocks(key), take_blocks(value), **of_each_block)
    return out.reshape(B, inner_blocks * block, N, -1)


def _same_id(mask, q, kv):
    """`segments` of one query block: ids `[B, 1, T, 1]` of its queries, `[B, N, 1, S]` of the keys that each head gathered."""
    q_ids, kv_ids = mask.arrays
    return (q_ids == kv_ids) & (kv_ids != 0)


def _neighbours(blocks):
    """Key blocks 0, i - 1, i, i + 1, last of the query blocks 1 .. last - 1 `[inner_blocks, 5]`, and which of them are new."""
    i = np.arange(1, blocks - 1)
    near = np.stack([0 * i, i - 1, i, i + 1, 0 * i + blocks - 1], axis=1)
    first = np.stack([(near[:, :j] != near[:, j : j + 1]).all(axis=1) for j in range(5)], axis=1)
    return near, first


def random_layout(key: Array, T: int, block: int, r: int, heads: int) -> Int[Array, "N inner_blocks r"]:
    """r distinct random blocks for every inner block of queries and every head, none of them among its five."""
    blocks = -(-T // block)
    if blocks > 2 and blocks - 5 < r:
        raise ValueError(f"random_layout: {r} random blocks beside the five need {5 + r} of them; got {blocks}")
    inner_blocks = max(blocks - 2, 0)
    is_near = np.zeros((inner_blocks, blocks), bool)
    if inner_blocks:
        np.put_along_axis(is_near, _neighbours(blocks)[0], True, axis=1)
    draws = jnp.where(is_near[None], -1.0, random.uniform(key, (heads, inner_blocks, blocks)))
    return jax.lax.top_k(draws, r)[1]


def zero_layout(T: int, block: int, r: int, heads: int) -> Int[np.ndarray, "N inner_blocks r"]:
    """Block 0, r times, as in Hugging Face's model outside training: the first block counts 1 + r times."""
    return np.zeros((heads, max(-(-T // block) - 2, 0), r), np.int32)


def seeded_layout(T: int, block: int, r: int, heads: int, layer: int, *, max_length: int = 4096) -> Layout:
    """The layout of the published checkpoints: NumPy's legacy generator, seeded by the layer's number.

    Random blocks come from the first 2 r + 5. For the published lengths 1,024, 3,072 and 4,096 an older plan draws from the
    first 1,024 positions, for `max_length` positions (the config's); there some neighbours count twice. ValueError for a T that
    is no multiple of `block`, or has at most 2 r + 5 blocks (there Hugging Face's model is dense).
    """
    blocks, old = T // block, T in (1024, 3072, 4096)
    if T % block or blocks <= 2 * r + 5:
        raise ValueError(f"seeded_layout: T is a multiple of block {block}, > {2 * r + 5} blocks; got {T}")
    state = np.random.RandomState(layer)
    planned = max_length // block if old else blocks  # blocks beyond T are drawn too: they advance the generator
    layout = np.zeros((heads, planned, r), np.int32)
    pairs = [(head, query_block) for head in range(heads) for query_block in range(1, planned - 1)]
    for head, query_block in pairs if old else sorted(pairs, key=lambda pair: pair[1]):  # the newer plan draws block by block
        candidates = _old_candidates(query_block, block, planned) if old else np.arange(2 * r + 5)
        drop = set() if old else _dropped(query_block, 2 * r + 5)
        drawn = [j for j in state.permutation(candidates) if j not in drop][:r]
        if len(drawn) < r:
            raise ValueError(f"seeded_layout: block {query_block} finds {len(drawn)} of {r} blocks of {block}")
        layout[head, query_block] = drawn
    return layout[:, 1 : blocks - 1]


def _dropped(query_block, end):
    """Blocks of 0 .. end - 1 that a query block may not draw: its five, as if there were no more blocks."""
    return (
        {0, query_block - 1, query_block, query_block + 1, end - 1}
        | ({end - 2} if query_block == 1 else set())
        | ({1} if query_block == end - 2 else set())
    )


def _old_candidates(query_block, block, blocks):
    """Inner blocks of the first 1,024 positions, without the neighbours of the query block if it is among them."""
    last = 1024 // block - 1 if 2 * block < 1024 else blocks - 1
    last = min(last, blocks - 2)
    if query_block >= blocks - 3 or query_block - 2 > last:
        return np.arange(1, last + 1)
    return np.concatenate([np.arange(1, query_block - 1), np.arange(query_block + 2, last + 1)])


@dataclass(frozen=True)
class BigBird:
    """Global, neighbouring and random blocks: Zaheer et al. 2020, arXiv:2007.14062, ITC. Masks: full().

    `apply(..., constants=layout [L, N, blocks - 2, random])` replaces the layout. Padding of sparse layers yields zeros, and a
    row of several segments NaN: the blocks are those of the row.
    """

    block: int = 64  # tokens of a block
    random: int = 3  # random blocks that a block sees
    # of random blocks. seeded: as published (T a multiple of the block, more than 2 random + 5 blocks); zero: as in Hugging
    # Face's model outside training; random: drawn from `seed` (any T of at least random + 5 blocks)
    layout: Literal["seeded", "zero", "random"] = "seeded"
    seed: int = 0  # of the random layout
    dense_length: int = 0  # up to so many tokens all attend to all (in Hugging Face's model: (5 + 2 random) block)

    __post_init__ = require_numbers(block=1, random=0, seed=0, dense_length=0)

    def __call__(self, config: ModelConfig) -> Mixer:
        def mix(params, context, query, key, value):
            shared = options(config, context) | {"implementation": config.attention_implementation}
            if context.constants is None:
                return ops.attention(query, key, value, **shared)
            out = attention(query, key, value, context.constants, block=self.block, **shared)
            return refuse_packed(context, zero_padding(context, out))

        return approximation(self, config, mix, constants=partial(self._layout, config))

    def _layout(self, config: ModelConfig, T: int) -> Array | None:
        """The random blocks of every layer `[L, N, blocks - 2, random]`; None where attention is dense."""
        if self.dense_length >= T:
            return None
        L, N = config.num_layers, config.num_heads
        plan = (T, self.block, self.random, N)
        match self.layout:
            case "seeded":
                draw = partial(seeded_layout, *plan, max_length=config.context_length)
                return jnp.stack([jnp.asarray(draw(layer)) for layer in range(L)])
            case "zero":
                return jnp.asarray(np.stack([zero_layout(*plan)] * L))
            case "random":
                return by_layer(self.seed, L, lambda key: random_layout(key, *plan))


# Zaheer et al. 2020, arXiv:2007.14062, internal transformer construction
bigbird_base = replace(bert_base_encoder, vocab_size=50358, context_length=4096, feedforward="gelu_tanh", mixer=BigBird(64, 3))
bigbird_base_pretraining = replace(bigbird_base, heads=(LanguageModel("gelu_tanh", bias=True), NEXT_SENTENCE))
bigbird_large = sized(bigbird_base, 24, 1024, 16)
