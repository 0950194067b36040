"""Attention on TPU by JAX's splash kernel, with our masks as its masks and segment ids."""

from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.masks import EMPTY, FAR, FULL, PARTIAL, Mask, full, rules
from jaxformer.ops.attention.blocks import padded
from jaxformer.ops.attention.call import Call, Share, device_count, refuse, share
from jaxformer.ops.attention.kernel import Kernel
from jaxformer.ops.attention.splash_blocks import Blocks, blocks_of

# A sink without weight: exp(-1e38 - s) is 0 for any score s. With it, a query that sees no key
# divides 0 by 1. Without it the kernel would divide by the number of hidden keys, whose score is
# -2.4e38, or by 0.
NO_SINK = -1e38
HIDDEN = np.iinfo(np.int32).min  # the segment of keys that nobody sees
# one query and one key, to find the shape of a mask
PAIR = (np.zeros(1, np.int32), np.zeros(1, np.int32))


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """softmax(mask(softcap(query key^T * scale))) value, in the blocks that the mask leaves.

    On every platform but a TPU the kernel runs as ordinary JAX, slowly; that is decided when the
    program is lowered, so that a CPU can compile for a TPU. 16-bit queries are rounded again after
    they are scaled. Differentiable once. Raises NotImplementedError for what `refuses` and
    `refuses_on_mesh` name.
    """
    refuse("splash", refuses(query, key, value, call))
    refuse("splash", refuses_on_mesh(query, key, value, call))
    (B, T, N, H), S = query.shape, key.shape[1]
    width = max(H, value.shape[-1])
    split = share(B, T, key.shape[2])
    blocks = blocks_of(T, S, width, device_count(split.length))
    assert blocks is not None  # `refuses_on_mesh` would have named it
    block = blocks.query, blocks.key
    dynamic = [conjunct for conjunct in call.mask.conjuncts() if not conjunct.static]
    static = _static_part(call.mask, T, S)
    tables = _tables(static, N, T, S, block)
    if B == 0 or not any(table.blocks.any() for table in tables):
        return jnp.zeros((B, T, N, value.shape[-1]), query.dtype)
    ids = _segment_ids(dynamic, static.offset + np.arange(T), B, S, block) if dynamic else None
    scaled = (query.astype(jnp.float32) * call.scale).astype(query.dtype)
    sizes = (scaled, block[0]), (key, block[1]), (value, block[1])
    whole_blocks = (padded(x, 1, size) for x, size in sizes)
    sinks = jnp.full((B, N), NO_SINK) if call.sinks is None else _by_batch_row(B, call.sinks)
    kernel, kernel_spec = _kernel(tables, blocks, call.softcap, split)
    run = partial(jax.lax.platform_dependent, tpu=partial(_run, False), default=partial(_run, True))
    by_head = P(split.batch, split.heads, split.length)
    gathered = P(split.batch, split.heads)
    ids_spec = None if ids is None else (P(split.batch, split.length), P(split.batch))
    in_specs = kernel_spec, by_head, gathered, gathered, gathered, ids_spec
    arrays = *(x.swapaxes(1, 2) for x in whole_blocks), sinks, ids
    out = split.run(run, in_specs, by_head, kernel, *arrays)
    return out.swapaxes(1, 2)[:, :T]


def refuses(query: Array, key: Array, value: Array, call: Call) -> str | None:
    """The part of a call that splash cannot compute on one device, in a few words; None: it can.

    It looks at shapes and types only.
    """
    if call.bias is not None:
        return "bias"
    if call.dropout_seed is not None:
        return "dropout"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key, value of different types: {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return str(query.dtype)
    if not isinstance(call.mask.offset, int | None):
        return "mask at an offset that is an array"
    conjuncts = call.mask.conjuncts()
    for conjunct in conjuncts:
        if conjunct.static:
            pair = _visible(conjunct, *PAIR)
            if isinstance(pair, jax.core.Tracer) or len(pair) > 1:
                return f"mask {conjunct} whose rule reads arrays"
        elif conjunct.rule not in (rules.segments, rules.lengths):
            return f"mask {conjunct} (with arrays: segments and lengths alone, joined by &)"
    segments = [conjunct for conjunct in conjuncts if conjunct.rule is rules.segments]
    return "second mask of segments" if len(segments) > 1 else None


def refuses_on_mesh(query: Array, key: Array, value: Array, call: Call) -> str | None:
    """The part of a call that splash cannot compute on the mesh of `jax.set_mesh`; None: it can."""
    (B, T, _, H), S = query.shape, key.shape[1]
    width = max(H, value.shape[-1])
    devices = device_count(share(B, T, key.shape[2]).length)
    blocks = blocks_of(T, S, width, devices)
    if blocks is None:
        return f"{T // devices} queries a device, {T} on mesh.context={devices} (multiples of 128)"
    if devices == 1:
        return None
    # JAX 0.12's kernel joins an empty list of tables (`_process_mask`, with q_seq_shards)
    mask = _static_part(call.mask, T, S)
    kinds = mask.blocks(T, S, (blocks.query, blocks.key))
    if (kinds == PARTIAL).any() or not kinds.any():  # no kernel runs where all is hidden
        return None
    return f"mask {call.mask} that leaves each block whole or empty, on mesh.context={devices}"


def _static_part(mask: Mask, T: int, S: int) -> Mask:
    """The conjuncts that read no arrays, at the offset of T queries among S keys."""
    static = [conjunct for conjunct in mask.conjuncts() if conjunct.static] or [full()]
    return reduce(and_, static).at(mask.first(T, S))


def _refuses_here(query: Array, key: Array, value: Array, call: Call) -> str | None:
    return refuses(query, key, value, call) or refuses_on_mesh(query, key, value, call)


SPLASH = Kernel("splash", attention, _refuses_here, platforms=("tpu",))


def _tables(mask: Mask, N: int, T: int, S: int, block: tuple[int, int]) -> list[Any]:
    """A static mask as one kernel mask for each head; heads that see the same are equal."""
    count = _heads(mask)
    if count not in (1, N):
        raise ValueError(f"splash: a mask for {count} heads and queries of {N}: {mask}")
    heads = [_for_head(mask, n) for n in range(N)]
    kinds = {each: each.blocks(T, S, block) for each in set(heads)}
    tables = []
    for n, each in enumerate(heads):
        head = n if _heads(each) > 1 else 0
        tables.append(_table(each, head, T, S, block, kinds[each]))
    return tables


def _visible(mask: Mask, q_positions: np.ndarray, kv_positions: np.ndarray):
    """A static mask `[1, 1|N, T, S]` at positions `[T]`, `[S]`, in NumPy, also while tracing."""
    with jax.ensure_compile_time_eval():  # a user's rule may call jax.numpy
        visible = mask.rule(mask, q_positions[None, None, :, None], kv_positions[None, None, None])
    return visible if isinstance(visible, jax.core.Tracer) else np.asarray(visible)


def _heads(mask: Mask) -> int:
    return _visible(mask, *PAIR).shape[1]


def _for_head(mask: Mask, head: int) -> Mask:
    """`by_head` replaced by its mask for one head."""
    if mask.rule is rules.by_head and all(_heads(each) == 1 for each in mask.parts):
        return replace(_for_head(mask.parts[head], head), offset=mask.offset)
    if mask.rule not in (rules.and_, rules.or_, rules.not_):
        return mask  # a user's rule may combine the heads of its masks in any way
    operands = tuple(_for_head(each, head) for each in mask.parts)
    if mask.rule is rules.and_:
        return replace(reduce(and_, operands), offset=mask.offset)
    return replace(mask, parts=operands)


def _segment_ids(
    dynamic: list[Mask],
    q_positions: np.ndarray,
    B: int,
    S: int,
    block: tuple[int, int],
) -> tuple[Array, Array]:
    """Ids `[B, T]`, `[B, S]`, padded: a query sees the keys with its id.

    Queries that see nothing have id 0.
    """

    def whole_blocks(ids, size):
        return padded(jnp.broadcast_to(ids, (B, ids.shape[1])), 1, size).astype(jnp.int32)

    q_ids, kv_ids = rules.segment_ids(dynamic, q_positions, np.arange(S))
    q_ids = whole_blocks(q_ids, block[0])
    kv_ids = whole_blocks(kv_ids, block[1])
    return q_ids, jnp.where(kv_ids == 0, HIDDEN, kv_ids)


def _kernel(tables, blocks: Blocks, softcap, split: Share) -> tuple[Any, Any]:
    """The kernel, a tree of tables, and its PartitionSpecs."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

    q, kv, product, is_fused = blocks
    sizes = kernels.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_kv_compute=product,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=product,
        block_q_dq=None if is_fused else q,
        block_kv_dq=None if is_fused else kv,
        use_fused_bwd_kernel=is_fused,
    )
    kernel = kernels.make_splash_mha(
        MultiHeadMask(tables),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention",
        head_shards=device_count(split.heads),
        q_seq_shards=device_count(split.length),
    )
    if not split.manual:
        return kernel, None
    # without axis types: a pipeline has manual axes
    mesh = jax.sharding.get_abstract_mesh()
    mesh = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    sharding = jax.sharding.NamedSharding(mesh, P(split.heads, split.length))
    return kernel, kernel.manual_sharding_spec(sharding)


def _run(interpret: bool, kernel, query, key, value, sinks, ids) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    tables, options = kernel.tree_flatten()
    kernel = kernels.SplashAttentionKernel(*tables, **options | {"interpret": interpret})

    def each(q, k, v, s, ids):
        return kernel(q, k, v, None if ids is None else kernels.SegmentIds(*ids), s)

    return jax.vmap(each)(query, key, value, sinks, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_batch_row(B: int, sinks):
    """The sinks [N] as float32 [B, N].

    The kernel's gradient has the type of its values; here it is summed in float32.
    """
    finite = jnp.clip(sinks.astype(jnp.float32), NO_SINK, -NO_SINK)
    return jnp.broadcast_to(finite, (B, sinks.shape[0]))


def _by_batch_row_forward(B: int, sinks):
    return _by_batch_row(B, sinks), jnp.zeros(0, sinks.dtype)


def _by_batch_row_backward(B: int, like_sinks, g):
    return (jnp.sum(g.astype(jnp.float32), axis=0).astype(like_sinks.dtype),)


_by_batch_row.defvjp(_by_batch_row_forward, _by_batch_row_backward)


def _table(mask: Mask, head: int, T: int, S: int, block: tuple[int, int], blocks: np.ndarray):
    """One head's static mask as a kernel mask: a band is computed, others are read from a table."""
    Table, Computed = _kinds()
    shape = T + -T % block[0], S + -S % block[1]
    ends = band(*mask.conjuncts())
    # the computed mask does not know S: only padded queries may reach the padded keys
    inside = ends is not None and shape[1] == S
    if ends is not None and ends[1] is not None:
        inside = inside or T - 1 + mask.offset + ends[1] < S
    kind = Computed if inside and (blocks == PARTIAL).any() else Table
    return kind(mask, head, S, block, shape, blocks)


def band(*conjuncts: Mask) -> tuple[int | None, int | None] | None:
    """(l, r) if these masks together show the keys i - l to i + r (None: no end); else None."""
    lefts = []
    rights = []
    for mask in conjuncts:
        if mask.rule is rules.causal:
            rights.append(0)
        elif mask.rule is rules.window:
            left, right, *dilation = mask.args
            if any(d != 1 for d in dilation):
                return None
            # kernels add these to positions, in 32 bits
            lefts.append(min(left, FAR))
            rights.append(min(right, FAR))
        elif mask.rule is not rules.full:
            return None
    return min(lefts, default=None), min(rights, default=None)


@cache
def _kinds():
    """Two kinds of kernel masks that know which blocks are EMPTY or FULL.

    The import takes 0.3 s.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as theirs

    @dataclass(frozen=True)
    class Table(theirs.Mask):
        """Any static mask, evaluated one PARTIAL block at a time."""

        mask: Mask
        head: int
        kv_length: int
        block: tuple[int, int]
        padded: tuple[int, int]
        blocks: np.ndarray = field(compare=False)  # the other fields determine it

        shape = property(lambda self: self.padded)

        def __getitem__(self, idx):
            q, kv = idx
            size = (q.stop - q.start, kv.stop - kv.start)
            kind = self.blocks[q.start // self.block[0], kv.start // self.block[1]]
            if kind == EMPTY or (kind == FULL and kv.stop <= self.kv_length):
                return np.full(size, kind == FULL)
            q_positions = self.mask.offset + np.arange(q.start, q.stop, dtype=np.int32)
            kv_positions = np.arange(kv.start, kv.stop, dtype=np.int32)
            visible = _visible(self.mask, q_positions, kv_positions)[0, self.head]
            return np.broadcast_to(visible, size) & (kv_positions < self.kv_length)[None]

    class Computed(Table):
        """A band, which the kernel computes from positions."""

        q_sequence = property(lambda self: np.arange(self.shape[0], dtype=np.int32))

        @property
        def mask_function(self):
            ends = band(*self.mask.conjuncts()) or (None, None)
            return theirs.LocalMask(self.shape, ends, self.mask.offset).mask_function

    return Table, Computed
