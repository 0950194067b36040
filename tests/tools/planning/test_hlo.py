"""Collectives, bytes and buffers read out of compiled programs."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.planning import hlo
from jaxformer.tools.planning.hlo import Collective, collectives

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def compiled(body, *shapes):
    mapped = jax.shard_map(
        body,
        mesh=make_mesh(Mesh(**MESH)),
        in_specs=P("data", "tensor"),
        out_specs=P(),
        check_vma=False,
    )
    return (
        jax.jit(mapped)
        .lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        .compile()
        .as_text()
    )


def found(body, *shapes):
    return collectives(compiled(body, *shapes), make_mesh(Mesh(**MESH)))


def test_kinds_axes_and_bytes():
    sums = found(lambda x: jax.lax.psum(x, "data"), (8, 8))
    assert sums == [Collective("all-reduce", ("data",), 1, 4 * 4 * 4)]
    (gathered,) = found(lambda x: jax.lax.all_gather(x, ("data", "tensor")), (8, 8))
    assert gathered == Collective("all-gather", ("data", "tensor"), 1, 4 * 4 * 4 * 4)
    # groups of one exchange nothing
    assert found(lambda x: jax.lax.psum(x, "context"), (8, 8)) == []


def test_loops_are_multiplied_out():
    def body(x):
        step = lambda _, y: jnp.sin(jax.lax.psum(y, "tensor"))
        return jax.lax.fori_loop(0, 5, lambda i, y: jax.lax.fori_loop(0, 3, step, y), x)

    (one,) = found(body, (8, 8))
    assert (one.kind, one.axes, one.count) == ("all-reduce", ("tensor",), 15)


WRITTEN = """
%turn (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %p = (f32[8]{0}, u32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %i = u32[] get-tuple-element(%p), index=1
  %two = u32[]{:T(128)} constant(2)
  %next = u32[] add(%i, %two)
  %sent = (f32[8]{0}, f32[8]{0:S(1)}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %got = f32[8]{0} collective-permute-done(%sent)
  ROOT %out = (f32[8]{0}, u32[]) tuple(%got, %next)
}

%more (q: (f32[8], u32[])) -> pred[] {
  %q = (f32[8]{0}, u32[]) parameter(0)
  %j = u32[] get-tuple-element(%q), index=1
  %end = u32[] constant(8)
  ROOT %less = pred[] compare(%j, %end), direction=LT
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (c: f32[8]) -> f32[1] {
  %c = f32[8]{0} parameter(0)
  %whole = f32[8]{0} all-reduce(%c), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %part = f32[1]{0} slice(%whole), slice={[0:1]}
}

ENTRY %main (x: f32[8]) -> f32[1] {
  %x = f32[8]{0} parameter(0), metadata={op_name="state.params"}
  %table = s8[2,2]{1,0} constant({ { 0, 1 },
  { 1, 2
} })
  %zero = u32[] constant(0)
  %begin = (f32[8]{0}, u32[]) tuple(%x, %zero)
  %loop = (f32[8]{0}, u32[]) while(%begin), condition=%more, body=%turn
  %y = f32[8]{0} get-tuple-element(%loop), index=0
  %gathered = ((f32[8]{0}, f32[2]{0}), (bf16[16]{0}, f32[4]{0})) all-gather-start(%y, %y), replica_groups={{0,1},{2,3}}
  ROOT %fused = f32[1]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}
"""  # noqa: E501  (the compiler's own lines)


def test_what_the_tpu_compiler_writes():
    """A fused reduce-scatter, a loop in steps of two, exchanges begun early, constants on lines of
    their own."""
    mesh = make_mesh(Mesh(**MESH))
    kinds = {one.kind: one for one in collectives(WRITTEN, mesh)}
    assert set(kinds) == {"collective-permute", "all-gather", "reduce-scatter"}
    assert kinds["collective-permute"] == Collective(
        "collective-permute", ("tensor",), 4, 4 * 8 * 4
    )
    assert kinds["all-gather"].bytes == 16 * 2 + 4 * 4
    assert kinds["reduce-scatter"] == Collective("reduce-scatter", ("data", "fsdp", "tensor"), 1, 4)


def test_bytes_through_memory():
    """Operands and results of what runs; of a slice the piece; what lies in the chip's fast memory
    not at all."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = jax.jit(lambda x, y: jnp.sin(x) @ y).lower(shape, shape).compile().as_text()
    size = 4 * 64 * 64
    assert 3 * size <= sum(hlo.traffic(text)) <= 5 * size
    stacked = jax.ShapeDtypeStruct((100, 64, 64), jnp.float32)
    scanned = lambda x, ws: jax.lax.scan(lambda x, w: (x + jnp.sin(w), None), x, ws)[0]
    moved = sum(hlo.traffic(jax.jit(scanned).lower(shape, stacked).compile().as_text()))
    # each turn its own part, not the stack
    assert 100 * 2 * size < moved < 100 * 5 * size + 5 * size
    assert sum(hlo.traffic(WRITTEN.replace("f32[8]{0}", "f32[8]{0:S(1)}"))) < sum(
        hlo.traffic(WRITTEN)
    )


CUT = """
%piece (a: f32[4,100], i: s32[4,2]) -> f32[4] {
  %a = f32[4,100]{1,0} parameter(0)
  %i = s32[4,2]{1,0} parameter(1)
  %same = f32[2,2,100]{2,1,0} bitcast(%a)
  ROOT %found = f32[4]{0} gather(%same, %i), offset_dims={}, slice_sizes={1,1,1}
}

%yes (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  ROOT %doubled = f32[4]{0} add(%t, %t)
}

%no (u: f32[4]) -> f32[4] {
  ROOT %u = f32[4]{0} parameter(0)
}

ENTRY %main (a: f32[4,100], i: s32[4,2], p: pred[]) -> f32[4] {
  %a = f32[4,100]{1,0} parameter(0)
  %i = s32[4,2]{1,0} parameter(1)
  %p = pred[] parameter(2)
  %got = f32[4]{0} fusion(%a, %i), kind=kLoop, calls=%piece
  ROOT %out = f32[4]{0} conditional(%p, %got, %got), true_computation=%yes, false_computation=%no
}
"""


def test_what_the_gpu_compiler_writes():
    """Elements cut out of an array under another shape; a condition of bits, whose branch 1 is that
    of True."""
    # elements, their places, the result; two operands and the result
    cut, doubled = (
        4 * 4 + 4 * 2 * 4 + 4 * 4,
        3 * 4 * 4,
    )
    assert hlo.traffic(CUT, branch=1).others == cut + doubled
    assert hlo.traffic(CUT, branch=0).others == cut


def test_the_largest_buffers_are_those_of_the_report():
    report = """Memory Space: default (color=0)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
    2.00GiB(  8%);    2.00GiB;   6442450944;                3; f32[4,32,2048,2048], 2×pred[4,32,2048,2048]
    2.67GiB( 10%);  688.00MiB;            0;                7; bf16[2,8], 5×f32[32,11008,512]
    2.67GiB( 10%);    4.0KiB;   6442450944;                0; \n"""  # noqa: E501  (the compiler's own lines)
    first, second = hlo.largest(report)
    assert first == {"count": 1, "bytes": 2**31, "shape": "f32[4,32,2048,2048]"}
    assert second == {"count": 1, "bytes": 688 * 2**20, "shape": "f32[32,11008,512]"}
    # libtpu 0.0.50 writes it three times, the last one in front of its error
    message = (
        f"E1126 18:41:24.055985    3123 deepsea_compiler_base.cc:3540] Memory usage "
        f"report:\n{report}"
    )
    assert hlo.largest(f"I1126 first\n{message}{message}{message}RESOURCE_EXHAUSTED: no room") == [
        first,
        second,
    ]


def test_an_exchange_beside_other_work_counts_once():
    """As the TPU compiler writes it: begun in one fusion, carried on in the next, done in the last,
    on one channel."""
    gather = (
        "  %g.{0} = bf16[1,64] all-gather(%p), channel_id=7, "
        "replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{1}}"
    )
    fusions = "\n".join(
        f"%f.{i} (p: bf16[1,8]) -> bf16[1,64] {{\n{gather.format(i)}\n}}\n" for i in range(3)
    )
    calls = "\n".join(
        f"  %c.{i} = bf16[1,64] fusion(%x), kind=kCustom, calls=%f.{i}" for i in range(3)
    )
    text = f"{fusions}\nENTRY %main (x: bf16[1,8]) -> bf16[1,64] {{\n{calls}\n}}\n"
    assert collectives(text, make_mesh(Mesh())) == [Collective("all-gather", ("data",), 1, 128)]
