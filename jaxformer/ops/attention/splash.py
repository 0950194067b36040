"""Attention on TPU by JAX's splash kernel: our masks as its masks and segment ids, exact also where a query sees nothing."""

from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.masks import EMPTY, FAR, FULL, PARTIAL, Mask, full, rules
from jaxformer.ops.attention.share import Share, share, size

# A sink that weighs nothing: exp(-1e38 - s) is 0 beside any score s. With it, a query that sees no key divides 0 by 1
# where the kernel would divide by the number of hidden keys (they score -2.4e38, far below it) or by 0.
NO_SINK = -1e38
HIDDEN = np.iinfo(np.int32).min  # the segment of keys that nobody sees
DTYPES = (jnp.float32, jnp.bfloat16)
PAIR = (np.zeros(1, np.int32), np.zeros(1, np.int32))  # one query and one key, to look at what shape a mask has


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask,
    bias: Any = None,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    interpret: bool | None = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(mask(softcap(query key^T * scale))) value in blocks that the mask does not leave empty, forward and backward.

    Static masks decide at trace time which blocks are visited; `segments` and `lengths` joined to them by `&` become
    segment ids. Lengths are padded to whole blocks. `interpret` runs the kernel as ordinary JAX (slowly, anywhere);
    None: on every platform but a TPU, decided when the program is lowered, so that a CPU can compile for a TPU.
    16-bit queries are scaled before they are rounded again. Differentiable once. On the mesh of `jax.set_mesh` each device
    has its share of the batch, the heads and, over `context`, the queries, whose keys and values are gathered there.

    Raises NotImplementedError for what `refuses` names.
    """
    options = dict(mask=mask, bias=bias, softcap=softcap, sinks=sinks, dropout_rate=dropout_rate)
    if reason := refuses(query, key, value, dropout_key=dropout_key, **options):
        raise NotImplementedError(f"splash: no {reason}; implementation='blockwise' has it")
    (B, T, N, H), S = query.shape, key.shape[1]
    width, split = max(H, value.shape[-1]), share(B, T, key.shape[2])
    block = _query_block(T, width, size(split.length)), block_size(S, width)
    static, dynamic = _split(mask, T, S)
    tables = _tables(static, N, T, S, block)
    if not any(table.blocks.any() for table in tables):
        return jnp.zeros((B, T, N, value.shape[-1]), query.dtype)
    ids = _segment_ids(dynamic, static.offset + np.arange(T), B, S, block) if dynamic else None
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    padded = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % b), (0, 0), (0, 0)))
        for x, b in ((scaled, block[0]), (key, block[1]), (value, block[1]))
    )
    sinks = jnp.full((B, N), NO_SINK) if sinks is None else _by_row(B, sinks)
    kernel, places = _kernel(tables, block, softcap, split)
    if interpret is not None:
        run = partial(_run, interpret)
    else:
        run = partial(jax.lax.platform_dependent, tpu=partial(_run, False), default=partial(_run, True))
    by_head, whole = P(split.batch, split.heads, split.length), P(split.batch, split.heads)
    in_specs = places, by_head, whole, whole, whole, (P(split.batch, split.length), P(split.batch))
    arrays = kernel, *(x.swapaxes(1, 2) for x in padded), sinks, ids
    out = split.run(run, in_specs if ids is not None else (*in_specs[:-1], None), by_head, *arrays)
    return out.swapaxes(1, 2)[:, :T]


def refuses(query, key, value, *, mask, bias, softcap, sinks, dropout_rate, dropout_key) -> str | None:
    """What of a call this kernel cannot do, in a few words, or None if it can all of it. Looks at shapes and types only."""
    if bias is not None:
        return "bias"
    if dropout_rate and dropout_key is not None:
        return "dropout"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key, value of different types: {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dtype not in DTYPES:
        return str(query.dtype)
    if not isinstance(mask.offset, int | np.integer | None):
        return "mask at an offset that is an array"
    dynamic = [part for part in mask.conjuncts() if not part.static]
    for part in dynamic:
        if part.rule not in (rules.segments, rules.lengths):
            return f"mask {part} (with arrays: segments and lengths alone, joined by &)"
    if sum(part.rule is rules.segments for part in dynamic) > 1:
        return "second mask of segments"
    for part in mask.sized(key.shape[1]).conjuncts():
        if part.static and (isinstance(pair := _visible(part, *PAIR), jax.core.Tracer) or len(pair) > 1):
            return f"mask {part} whose rule reads arrays"
    return None


def block_size(length: int, head_width: int) -> int:
    """Rows of a block: a multiple of 128 (the TPU's lanes) that pads `length` least, at most 512 (256 for wide heads).

    The on-chip memory holds a block of each operand twice and some float32 squares of scores: 512 x 512 x 4 B = 1 MB.
    """
    most = 512 if head_width <= 256 else 256
    count = max(1, -(-length // most))
    return -(-max(1, length) // (count * 128)) * 128


def _query_block(T: int, head_width: int, parts: int) -> int:
    """The rows of a block where queries are split among so many devices, none of which pads its own."""
    if parts == 1:
        return block_size(T, head_width)
    fit = [b for b in (512, 384, 256, 128) if T // parts % b == 0 and b <= block_size(b, head_width)]
    if not fit:
        raise NotImplementedError(
            f"splash: no {T // parts} queries a device, {T} on mesh.context={parts} (multiples of 128); "
            "implementation='ring' has them"
        )
    return fit[0]


def _split(mask: Mask, T: int, S: int) -> tuple[Mask, list[Mask]]:
    """The static part, its first query's position written out, and the conjuncts that hold arrays."""
    first = int(mask.first(T, S))
    parts = mask.sized(S).conjuncts()
    static = [part for part in parts if part.static] or [full()]
    return reduce(and_, static).at(first), [part for part in parts if not part.static]


def _tables(mask: Mask, N: int, T: int, S: int, block: tuple[int, int]) -> list[Any]:
    """A static mask as one mask of the kernel's for each head; heads that see the same are equal."""
    count = _heads(mask)
    if count not in (1, N):
        raise ValueError(f"splash: a mask for {count} heads and queries of {N}: {mask}")
    heads = [_for_head(mask, n) for n in range(N)]
    known = {m: (_heads(m) > 1, m.blocks(T, S, block)) for m in set(heads)}
    return [_as_splash(m, n if known[m][0] else 0, T, S, block, known[m][1]) for n, m in enumerate(heads)]


def _visible(mask: Mask, q_positions: np.ndarray, kv_positions: np.ndarray):
    """A static mask `[1, 1|N, T, S]` at positions `[T]`, `[S]`, in NumPy, also while tracing."""
    with jax.ensure_compile_time_eval():  # a rule of the user's own may call jax.numpy
        visible = mask.rule(mask, q_positions[None, None, :, None], kv_positions[None, None, None])
    return visible if isinstance(visible, jax.core.Tracer) else np.asarray(visible)


def _heads(mask: Mask) -> int:
    return _visible(mask, *PAIR).shape[1]


def _for_head(mask: Mask, head: int) -> Mask:
    """`by_head` replaced by its part for one head."""
    if mask.rule is rules.by_head and all(_heads(part) == 1 for part in mask.parts):
        return replace(_for_head(mask.parts[head], head), offset=mask.offset)
    if mask.rule not in (rules.and_, rules.or_, rules.not_):
        return mask  # what a rule of somebody else's makes of its parts' heads is its own affair
    parts = tuple(_for_head(part, head) for part in mask.parts)
    return replace(reduce(and_, parts), offset=mask.offset) if mask.rule is rules.and_ else replace(mask, parts=parts)


def _segment_ids(dynamic: list[Mask], q_positions: np.ndarray, B: int, S: int, block) -> tuple[Array, Array]:
    """Ids `[B, T]`, `[B, S]`, padded: a query sees the keys whose id is its own. Queries that see nothing have id 0."""
    q_ids, kv_ids = (
        jnp.pad(jnp.broadcast_to(ids, (B, ids.shape[1])).astype(jnp.int32), ((0, 0), (0, -ids.shape[1] % size)))
        for ids, size in zip(rules.segment_ids(dynamic, q_positions, np.arange(S)), block, strict=True)
    )
    return q_ids, jnp.where(kv_ids == 0, HIDDEN, kv_ids)


def _kernel(tables, block: tuple[int, int], softcap, split: Share) -> tuple[Any, Any]:
    """The kernel, a tree of tables, and over which axes they are split."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

    q, kv = block
    sizes = kernels.BlockSizes(block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv)
    kernel = kernels.make_splash_mha(
        MultiHeadMask(tables),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        head_shards=size(split.heads),
        q_seq_shards=size(split.length),
        residual_checkpoint_name="attention",
    )
    if not split.free:
        return kernel, None
    mesh = jax.sharding.get_abstract_mesh()
    mesh = jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names
    )  # its shape alone: in a pipeline some axes are manual
    place = jax.sharding.NamedSharding(mesh, P(split.heads, split.length))
    return kernel, kernel.manual_sharding_spec(place)


def _run(interpret: bool, kernel, query, key, value, sinks, ids) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    tables, options = kernel.tree_flatten()
    kernel = kernels.SplashAttentionKernel(*tables, **options | {"interpret": interpret})
    each = lambda q, k, v, s, ids: kernel(q, k, v, None if ids is None else kernels.SegmentIds(*ids), s)
    return jax.vmap(each)(query, key, value, sinks, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_row(B: int, sinks):
    """The sinks [N] as float32 [B, N]. The kernel's gradient for them has the type of its values: summed in float32 here."""
    return jnp.broadcast_to(jnp.clip(sinks.astype(jnp.float32), NO_SINK, -NO_SINK), (B, sinks.shape[0]))


_by_row.defvjp(
    lambda B, sinks: (_by_row(B, sinks), jnp.zeros(0, sinks.dtype)),
    lambda B, like, g: (jnp.sum(g.astype(jnp.float32), axis=0).astype(like.dtype),),
)


def _as_splash(mask: Mask, head: int, T: int, S: int, block: tuple[int, int], blocks: np.ndarray):
    """One head's static mask as the kernel's: computed inside it for a band of keys, else read from a table of blocks."""
    Table, Computed = _kinds()
    padded = T + -T % block[0], S + -S % block[1]
    ends = band(*mask.conjuncts())
    # what is computed does not know S: no query but the padded ones may reach the padded keys
    inside = ends is not None and (padded[1] == S or (ends[1] is not None and T - 1 + mask.offset + ends[1] < S))
    kind = Computed if inside and (blocks == PARTIAL).any() else Table
    return kind(mask, head, S, block, padded, blocks)


def band(*conjuncts: Mask) -> tuple[int | None, int | None] | None:
    """(l, r) if `full`, `causal` and `window`s show keys i - l to i + r together, None for no end; None for other masks."""
    lefts, rights = [], []
    for part in conjuncts:
        if part.rule is rules.causal:
            rights.append(0)
        elif part.rule is rules.window:
            left, right, *dilation = part.args
            if any(d != 1 for d in dilation):
                return None
            lefts.append(min(left, FAR))  # kernels add these to positions, in 32 bits
            rights.append(min(right, FAR))
        elif part.rule is not rules.full:
            return None
    return min(lefts, default=None), min(rights, default=None)


@cache
def _kinds():
    """Our masks as two kinds of the kernel's that know which blocks are EMPTY or FULL. The import takes 0.3 s."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as theirs

    @dataclass(frozen=True)
    class Table(theirs.Mask):
        """Any static mask, evaluated one PARTIAL block at a time as the kernel's tables are filled."""

        mask: Mask
        head: int
        kv_length: int
        block: tuple[int, int]
        padded: tuple[int, int]
        blocks: np.ndarray = field(compare=False)  # which the other fields determine

        @property
        def shape(self):
            return self.padded

        def __getitem__(self, idx):
            q, kv = idx
            size = (q.stop - q.start, kv.stop - kv.start)
            kind = self.blocks[q.start // self.block[0], kv.start // self.block[1]]
            if kind == EMPTY or (kind == FULL and kv.stop <= self.kv_length):
                return np.full(size, kind == FULL)
            q_positions, kv_positions = (np.arange(x.start, x.stop, dtype=np.int32) for x in (q, kv))
            visible = _visible(self.mask, self.mask.offset + q_positions, kv_positions)[0, self.head]
            return np.broadcast_to(visible, size) & (kv_positions < self.kv_length)[None]

    class Computed(Table):
        """A band, which the kernel computes from positions: nothing is read for its PARTIAL blocks."""

        @property
        def q_sequence(self):
            return np.arange(self.padded[0], dtype=np.int32)

        @property
        def mask_function(self):
            ends = band(*self.mask.conjuncts()) or (None, None)
            return theirs.LocalMask(self.padded, ends, self.mask.offset).mask_function

    return Table, Computed
