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
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    layout: Layout,
    *,
    block: int,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B T N Hv"]:
    """Global, neighbouring and random blocks (ITC): Zaheer et al. 2020, arXiv:2007.14062.

    There are nb = ceil(T / block) blocks of queries. The first and the last attend to all keys.
    Block i between them attends to the key blocks {0, i - 1, i, i + 1, nb - 1} and
    `layout[n, i - 1]`, where `layout` is `[N, nb - 2, r]`, made by one of the `*_layout` functions.
    A block that the layout names twice, or that is among the five, counts twice in the softmax, as
    in the authors' code.

    `mask` hides padding (`segments`, `lengths`), which yields zeros. Raises NotImplementedError for
    other masks. The cost grows with T * block * (5 + r).
    """
    ids = segment_ids("bigbird_attention", mask, query, key, value)
    B, T, N = query.shape[:3]
    blocks = -(-T // block)
    if layout.shape[:2] != (N, max(blocks - 2, 0)):
        raise ValueError(
            f"bigbird_attention: layout is [{N}, {max(blocks - 2, 0)}, r]; got {layout.shape}"
        )
    if B * T == 0:
        return jnp.zeros((B, T, N, value.shape[-1]), value.dtype)
    query, key, value, q_ids, kv_ids = (padded(x, 1, block) for x in (query, key, value, *ids))
    keys = (None, None) if dropout_key is None else random.split(dropout_key)

    ends = np.unique(np.r_[:block, -block:0] % (blocks * block))
    shared: dict[str, Any] = dict(scale=scale, dropout_rate=dropout_rate)
    outer = dict(
        mask=segments(q_ids[:, ends], kv_ids), dropout_key=keys[0], implementation=implementation
    )
    dense: Any = ops.attention(query[:, ends], key, value, **outer, **shared)
    outs = [dense[:, :block], dense[:, block:]]
    if blocks > 2:
        inner = _inner_blocks(query, key, value, q_ids, kv_ids, layout, block, keys[1], shared)
        outs.insert(1, inner)
    return jnp.concatenate(outs, axis=1)[:, :T]


def _inner_blocks(query, key, value, q_ids, kv_ids, layout, block, dropout_key, shared):
    """Attention of the inner blocks of queries, neither first nor last: `[B, T - 2 block, N, Hv]`.

    Each block attends to keys that are gathered for it.
    """
    B, T, N, _ = query.shape
    K, r = key.shape[2], layout.shape[-1]
    inner_blocks = T // block - 2
    near, is_new = _neighbours(inner_blocks + 2)
    index = jnp.concatenate(
        [jnp.broadcast_to(near[None], (N, inner_blocks, 5)), jnp.asarray(layout)], axis=-1
    )
    head = (jnp.arange(N) // (N // K))[:, None, None]

    def split(x):
        return x.reshape(B, inner_blocks + 2, block, *x.shape[2:])

    def take_blocks(x):  # [B, T, K, H] -> [B, inner_blocks, (5 + r) block, N, H]
        x = split(x).transpose(0, 3, 1, 2, 4)[:, head, index]
        return x.reshape(B, N, inner_blocks, (5 + r) * block, -1).transpose(0, 2, 3, 1, 4)

    # random blocks always count, also those that are among the five
    counts = np.concatenate([is_new, np.ones((inner_blocks, r), bool)], axis=1)
    counts = counts[None, None, :, :, None]
    kv_ids = jnp.where(counts, split(kv_ids)[:, index], 0).reshape(B, N, inner_blocks, 1, -1)
    ids = split(q_ids)[:, 1:-1, None, :, None].swapaxes(0, 1), jnp.moveaxis(kv_ids, 2, 0)
    by_block = dict(
        mask=Mask(_same_id, arrays=ids),
        dropout_key=None if dropout_key is None else random.split(dropout_key, inner_blocks),
    )
    # If query blocks were a part of the batch, each device of a mesh would compute all of them. So
    # vmap maps them: axis 1 of the arguments, axis 0 of the keywords.
    attend = jax.vmap(partial(ops.attention, implementation="reference", **shared), 1, 1)
    out = attend(split(query)[:, 1:-1], take_blocks(key), take_blocks(value), **by_block)
    return out.reshape(B, inner_blocks * block, N, -1)


def _same_id(mask, q, kv):
    """The rule of `segments` for one block of queries.

    `mask.arrays` are the ids `[B, 1, T, 1]` of its queries, and `[B, N, 1, S]` of the keys that
    each head gathered.
    """
    q_ids, kv_ids = mask.arrays
    return (q_ids == kv_ids) & (kv_ids != 0)


def _neighbours(blocks):
    """(five key blocks of each inner block of queries `[inner_blocks, 5]`, which of them are new).

    Block i has the key blocks 0, i - 1, i, i + 1 and the last. One that occurs again is not new.
    """
    i = np.arange(1, blocks - 1)
    near = np.stack([0 * i, i - 1, i, i + 1, 0 * i + blocks - 1], axis=1)
    is_new = np.stack([(near[:, :j] != near[:, j : j + 1]).all(axis=1) for j in range(5)], axis=1)
    return near, is_new


def random_layout(
    key: Array, T: int, block: int, r: int, heads: int
) -> Int[Array, "N inner_blocks r"]:
    """r distinct random blocks for each head and each inner block of queries.

    None of them is among the five blocks that it sees in any case.
    """
    blocks = -(-T // block)
    if blocks > 2 and blocks - 5 < r:
        raise ValueError(
            f"random_layout: {r} random blocks beside the five need {5 + r} of them; got {blocks}"
        )
    inner_blocks = max(blocks - 2, 0)
    is_near = np.zeros((inner_blocks, blocks), bool)
    if inner_blocks:
        np.put_along_axis(is_near, _neighbours(blocks)[0], True, axis=1)
    draws = jnp.where(is_near[None], -1.0, random.uniform(key, (heads, inner_blocks, blocks)))
    return jax.lax.top_k(draws, r)[1]


def zero_layout(T: int, block: int, r: int, heads: int) -> Int[np.ndarray, "N inner_blocks r"]:
    """Block 0, r times, as in Hugging Face's model outside training.

    So the first block counts 1 + r times.
    """
    return np.zeros((heads, max(-(-T // block) - 2, 0), r), np.int32)


def seeded_layout(
    T: int, block: int, r: int, heads: int, layer: int, *, max_length: int = 4096
) -> Layout:
    """The layout of the published checkpoints: NumPy's legacy generator, seeded by `layer`.

    Random blocks come from the first 2 r + 5 blocks. For the published lengths 1,024, 3,072 and
    4,096, an older plan draws them from the first 1,024 positions, and for `max_length` positions
    (the config's). In it some neighbours count twice. Raises ValueError for a T that is no multiple
    of `block` or has at most 2 r + 5 blocks (there Hugging Face's model is dense).
    """
    blocks = T // block
    older = T in (1024, 3072, 4096)
    if T % block or blocks <= 2 * r + 5:
        raise ValueError(
            f"seeded_layout: T is a multiple of block {block}, > {2 * r + 5} blocks; got {T}"
        )
    state = np.random.RandomState(layer)
    # blocks beyond T are drawn, too: they advance the generator
    planned = max_length // block if older else blocks
    layout = np.zeros((heads, planned, r), np.int32)
    pairs = [(head, query_block) for head in range(heads) for query_block in range(1, planned - 1)]
    # the older plan draws head by head, the newer plan block by block
    for head, query_block in pairs if older else sorted(pairs, key=lambda pair: pair[1]):
        if older:
            candidates = _older_candidates(query_block, block, planned)
            dropped = set()
        else:
            candidates = np.arange(2 * r + 5)
            dropped = _dropped(query_block, 2 * r + 5)
        drawn = [j for j in state.permutation(candidates) if j not in dropped][:r]
        if len(drawn) < r:
            raise ValueError(
                f"seeded_layout: block {query_block} finds {len(drawn)} of {r} blocks of {block}"
            )
        layout[head, query_block] = drawn
    return layout[:, 1 : blocks - 1]


def _dropped(query_block, end):
    """Blocks of 0 .. end - 1 that a query block may not draw.

    They are its five, as if there were only `end` blocks. As in the authors' code, block 1 may not
    draw block end - 2 either, nor block end - 2 block 1.
    """
    dropped = {0, query_block - 1, query_block, query_block + 1, end - 1}
    if query_block == 1:
        dropped.add(end - 2)
    if query_block == end - 2:
        dropped.add(1)
    return dropped


def _older_candidates(query_block, block, blocks):
    """The inner blocks of the first 1,024 positions from which the older plan draws.

    The neighbours of the query block are left out, except for the last query blocks.
    """
    last = 1024 // block - 1 if 2 * block < 1024 else blocks - 1
    last = min(last, blocks - 2)
    if query_block >= blocks - 3 or query_block - 2 > last:
        return np.arange(1, last + 1)
    return np.concatenate([np.arange(1, query_block - 1), np.arange(query_block + 2, last + 1)])


@dataclass(frozen=True)
class BigBird:
    """Global, neighbouring and random blocks: Zaheer et al. 2020, arXiv:2007.14062. Masks: full().

    It is the paper's internal transformer construction (ITC).
    `apply(..., constants=layout [L, N, blocks - 2, random])` replaces the layout. Padding of sparse
    layers yields zeros. A row of several segments yields NaN, because its blocks belong to the row.
    """

    block: int = 64  # tokens of a block
    random: int = 3  # random blocks that each block sees
    # layout of the random blocks. seeded: as published (T is a multiple of the block and has more
    # than 2 random + 5 blocks); zero: as in Hugging Face's model outside training; random: drawn
    # from `seed` (T has at least random + 5 blocks)
    layout: Literal["seeded", "zero", "random"] = "seeded"
    seed: int = 0  # of the random layout
    # Up to this length, all tokens attend to all. Hugging Face's model has (5 + 2 random) block.
    dense_length: int = 0

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
        """Random blocks of every layer `[L, N, blocks - 2, random]`; None if attention is dense."""
        if self.dense_length >= T:
            return None
        L = config.num_layers
        plan = (T, self.block, self.random, config.num_heads)
        match self.layout:
            case "seeded":
                draw = partial(seeded_layout, *plan, max_length=config.context_length)
                return jnp.stack([jnp.asarray(draw(layer)) for layer in range(L)])
            case "zero":
                return jnp.asarray(np.stack([zero_layout(*plan)] * L))
            case "random":
                return by_layer(self.seed, L, lambda key: random_layout(key, *plan))


# Zaheer et al. 2020, arXiv:2007.14062, internal transformer construction
bigbird_base = replace(
    bert_base_encoder,
    vocab_size=50358,
    context_length=4096,
    feedforward="gelu_tanh",
    mixer=BigBird(64, 3),
)
bigbird_base_pretraining = replace(
    bigbird_base, heads=(LanguageModel("gelu_tanh", bias=True), NEXT_SENTENCE)
)
bigbird_large = sized(bigbird_base, 24, 1024, 16)
