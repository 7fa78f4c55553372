"""The reader of compiled programs: every notation of groups, and no instruction skipped."""

import pytest
from refusals import refused
from test_traffic import traffic

from jaxdist.plan.compiled.collectives import read_collectives
from jaxdist.plan.compiled.hlo import UnknownHLO, parse, shapes_of

MESH = {"pipeline": 2, "data": 2, "fsdp": 1, "tensor": 2}

PROGRAM = """HloModule jit_train, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

COMPUTATIONS

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
BODY
  ROOT %out = f32[64]{0} copy(%x), metadata={op_name="jit(train)/out"}
}
"""


def read(body: str, computations: str = "", mesh=MESH, gpus_per_node: int = 4):
    text = PROGRAM.replace("BODY", body).replace("COMPUTATIONS", computations)
    return read_collectives(text, mesh, gpus_per_node=gpus_per_node)


def reduction(groups: str, name: str = "r") -> str:
    return (
        f"  %{name} = f32[64]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(train)/psum"}'
    )


@pytest.mark.parametrize(
    ("groups", "axes", "nodes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 1),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("data",), 1),
        ("{{4,0},{1,5},{2,6},{3,7}}", ("pipeline",), 2),
        ("{{0,1,4,5},{2,3,6,7}}", ("pipeline", "tensor"), 2),
        ("{{0,1,2,3,4,5,6,7}}", ("pipeline", "data", "tensor"), 2),
        ("{}", ("pipeline", "data", "tensor"), 2),
        ("[4,2]<=[8]", ("tensor",), 1),
        ("[4,2]<=[2,4]T(1,0)", ("pipeline",), 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("data",), 1),
        ("[1,8]<=[8]", ("pipeline", "data", "tensor"), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",), 1),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=1,'axis_3'=2] {'axis_0'}", ("pipeline",), 2),
        ("mesh['a'=2,'b'=4] {'a','b'}", ("pipeline", "data", "tensor"), 2),
        ("mesh['a'=8] {'a':(1)2}", ("pipeline",), 2),
        ("mesh['a'=8] {'a':(2)2}", ("data",), 1),
        ("mesh['a'=8] {'a':(4)2}", ("tensor",), 1),
        ("mesh['a'=8] {'a':(1)2, 'a':(4)2}", ("pipeline", "tensor"), 2),
        ("mesh['a'=4,'b'=2, device_ids=([2,4]T(1,0))] {'b'}", None, None),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("pipeline",), 2),
        ("mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", ("tensor",), 1),
    ],
)
def test_groups_are_read_in_every_notation(groups, axes, nodes):
    if axes is None:
        with refused("replica groups", error=UnknownHLO):
            read(reduction(groups))
        return
    (op,) = read(reduction(groups))
    assert (op.axes, op.nodes) == (axes, nodes)
    assert op.group_size == {("pipeline", "tensor"): 4}.get(axes, 8 if len(axes) == 3 else 2)
    assert (op.kind, op.bytes, op.count) == ("all-reduce", 256, 1)
    assert (op.dtypes, op.op_name) == (("f32",), "jit(train)/psum")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("{{0,3},{1,2},{4,7},{5,6}}", "match mesh axes"),
        ("{{0,1},{2,3}}", "8 devices once"),
        ("[2,2,2]<=[8]", "no list of lists"),
        ("mesh['a'=8] {'a':(3)2}", "do not divide"),
        ("mesh['a'=8] {'b'}", "unknown axes"),
        ("mesh['a'=4] {'a'}", "8 devices once"),
        ("strange", "unknown replica groups"),
    ],
)
def test_unknown_groups_raise(groups, message):
    with pytest.raises(UnknownHLO, match=message):
        read(reduction(groups))


PERMUTE = """
  %start = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) collective-permute-start(%x), PAIRS, BACKEND
  %f = f32[64]{0} fusion(%x), kind=kLoop, calls=%add
  %d = f32[64]{0} custom-call(%x), custom_call_target="__cublas$gemm"
  %done = bf16[8,4]{1,0} collective-permute-done(%start)"""
PAIRS = "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}"


@pytest.mark.parametrize("is_sync", ["true", "false"])
def test_permute_has_its_axis_bytes_and_concurrent_ops(is_sync):
    backend = f'backend_config={{"collective_backend_config":{{"is_sync":{is_sync}}}}}'
    (op,) = read(PERMUTE.replace("PAIRS", PAIRS).replace("BACKEND", backend))
    assert (op.kind, op.axes, op.nodes) == ("collective-permute", ("pipeline",), 2)
    assert (op.bytes, op.wire_bytes) == (64, 64)  # of one array, not of operand and result
    assert (op.overlapped, op.between) == (is_sync == "false", 2)


@pytest.mark.parametrize(
    ("concurrent", "products"),
    [
        ('%d = f32[64]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"', 1),
        ('%d = f32[64]{0} custom-call(%x), custom_call_target="SliceToDynamic"', 0),
        ("%d = f32[64]{0} fusion(%x), kind=kCustom, calls=%gemm", 1),
        ("%d = f32[64]{0} fusion(%x), kind=kLoop, calls=%add", 0),
        ("%d = f32[64]{0} while(%x), condition=%add, body=%outer", 1),
        ("%d = f32[64]{0} while(%x), condition=%add, body=%add", 0),
    ],
)
def test_products_concurrent_with_a_permute_are_counted_in_any_form(concurrent, products):
    """In a library kernel, in a fusion, or in a loop."""
    start, _, _, done = PERMUTE.replace("PAIRS", PAIRS).replace(", BACKEND", "").split("\n")[1:]
    multiplying = """%gemm (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8] parameter(0)
  ROOT %dot.1 = f32[8,8] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8] parameter(0)
  ROOT %f.1 = f32[8,8] fusion(%b), kind=kCustom, calls=%gemm
}"""
    (op,) = read(f"{start}\n  {concurrent}\n{done}", multiplying)
    assert (op.between, op.products) == (1, products)


@pytest.mark.parametrize(
    ("kind", "result", "num_bytes", "wire"),
    [
        ("all-gather", "f32[128]{0}", 512, 256),
        ("reduce-scatter", "f32[32]{0}", 256, 128),
        ("all-reduce", "f32[64]{0}", 256, 256),
        ("all-to-all", "f32[64]{0}", 256, 128),
        ("ragged-all-to-all", "f32[64]{0}", 256, 128),
        ("collective-broadcast", "f32[64]{0}", 256, 256),
        ("all-reduce", "(f32[64]{0}, bf16[64]{0}, f32[]{:T(128)})", 384, 384),
    ],
)
def test_wire_bytes_match_a_ring(kind, result, num_bytes, wire):
    (op,) = read(f"  %r = {result} {kind}(%x), replica_groups=[4,2]<=[8]")
    assert (op.bytes, op.wire_bytes, op.group_size) == (num_bytes, wire, 2)
    assert not op.overlapped
    (op,) = read(
        f"  %r-start = (f32[64]{{0}}, {result}) {kind}-start(%x), replica_groups=[4,2]<=[8]\n"
        f"  %r-done = {result} {kind}-done(%r-start)"
    )
    assert (op.bytes, op.wire_bytes, op.overlapped) == (num_bytes, wire, True)


WRAPPED = """%wrapped (p: f32[64]) -> f32[32] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[32]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8], to_apply=%add
}"""


def test_a_wrapped_collective_is_read_once_with_its_own_type():
    body = """  %s = ((f32[64]{0}), f32[32]{0}, u32[]) async-start(%x), calls=%wrapped
  %u = ((f32[64]{0}), f32[32]{0}, u32[]) async-update(%s), calls=%wrapped
  %f = f32[64]{0} fusion(%x), kind=kLoop, calls=%add
  %d = f32[32]{0} async-done(%u), calls=%wrapped"""
    (op,) = read(body, WRAPPED)
    assert (op.kind, op.bytes, op.overlapped, op.between) == (
        "reduce-scatter",
        256,
        True,
        1,
    )


LOOPS = """%inner (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %x = (s32[], f32[64]{0}) parameter(0)
  ROOT %r = f32[64]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
}
%outer (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %x = (s32[], f32[64]{0}) parameter(0)
  ROOT %w = (s32[], f32[64]{0}) while(%x), condition=%never, body=%inner, INNER
}
%never (p: (s32[], f32[64])) -> pred[] {
  %p = (s32[], f32[64]{0}) parameter(0)
  ROOT %c = pred[] constant(false)
}
%nothing (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  ROOT %p = (s32[], f32[64]{0}) parameter(0)
}"""


def trips(count: int) -> str:
    return f'backend_config={{"known_trip_count":{{"n":"{count}"}},"known_init_step":{{}}}}'


def test_trip_counts_of_nested_loops_multiply():
    loop = f"  %w = (s32[], f32[64]{{0}}) while(%x), condition=%never, body=%outer, {trips(7)}"
    (op,) = read(loop, LOOPS.replace("INNER", trips(5)))
    assert (op.count, op.in_branch) == (35, False)
    with pytest.raises(UnknownHLO, match="unknown length"):
        read(loop, LOOPS.replace("INNER", "metadata={}"))


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%outer, %nothing, %outer}",
        "true_computation=%outer, false_computation=%outer",
    ],
)
def test_collectives_in_a_branch_are_counted_as_taken_and_marked(branches):
    body = f"  %c = (s32[], f32[64]{{0}}) conditional(%x, %x, %x), {branches}"
    results = read(body, LOOPS.replace("INNER", trips(5)))
    assert [(c.count, c.in_branch) for c in results] == [(5, True)] * 2
    text = PROGRAM.replace("BODY", body).replace("COMPUTATIONS", LOOPS.replace("INNER", trips(5)))
    with refused("a conditional", error=UnknownHLO):
        traffic(text, MESH)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  %r = f32[64]{0} all-gossip(%x), replica_groups={}", "unknown collective 'all-gossip'"),
        ("  %r = f32[64]{0} send(%x), channel_id=1", "unknown collective 'send'"),
        ("  %r = f7[64]{0} all-gather(%x), replica_groups={}", "unknown array type 'f7'"),
        ("  %r = f32[<=64]{0} all-gather(%x), replica_groups={}", "dims are not numbers"),
        ("  %r = f32[64]{0} all-gather(%x)", "no replica groups"),
        ("  %r = f32[64]{0} collective-permute(%x), channel_id=1", "no source_target_pairs"),
        ("  %r = f32[64]{0} all-gather-start(%x), replica_groups={}", "never awaited"),
        ("  %r = f32[64]{0} fusion(%x", "unbalanced"),
        ("  nonsense", "no instruction"),
        ("  %r = (s32[], f32[64]) strange(%x), to_apply=%nothing", "unknown caller 'strange'"),
        ("  %r = (s32[], f32[64]) reduce(%x), to_apply=%inner", "unknown caller 'reduce'"),
    ],
)
def test_unknown_instructions_raise_instead_of_counting_as_zero(body, message):
    with pytest.raises(UnknownHLO, match=message):
        read(body, LOOPS.replace("INNER", trips(5)))


def test_text_without_an_entry_is_rejected():
    with pytest.raises(UnknownHLO, match="no entry"):
        parse("HloModule nothing")


def test_scalars_and_groups_of_one_cause_no_traffic():
    scalar = "  %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add"
    alone = "  %q = f32[64]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add"
    assert read(f"{scalar}\n{alone}") == []


def test_type_sizes_are_rounded_up_to_bytes():
    sizes = [shape.num_bytes for shape in shapes_of("(f8e4m3fn[3,5]{1,0}, s4[5], pred[], token[])")]
    assert sizes == [15, 3, 1]
