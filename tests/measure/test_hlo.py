"""The byte report on HLO text, in the dialects of every version and of GPUs."""

import pytest

from jaxcomp import report
from tests.helpers.hlo import BOTH, loop, mesh_of_shape, program


def one_reduction(groups, num_devices=4, operand="%p"):
    body = f"""ROOT %r = f32[8]{{0}} all-reduce({operand}), channel_id=1, replica_groups={groups}, \
use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(f)/psum(x)"}}"""
    return program(body, num_partitions=num_devices, p="f32[8]{0}")


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3}}", ("fsdp",)),
        ("{{2,0},{3,1}}", ("data",)),
        ("{{0,1,2,3}}", BOTH),
        ("{}", BOTH),
        ("{{0},{1},{2},{3}}", ()),
        ("{{0,3},{1,2}}", ("?",)),
        ("{{0,1}}", ("?",)),
        ("[2,2]<=[4]", ("fsdp",)),
        ("[2,2]<=[2,2]T(1,0)", ("data",)),
        ("[1,4]<=[4]", BOTH),
        ("[4,1]<=[4]", ()),
        ("mesh['data'=2,'fsdp'=2] {'data'}", ("data",)),
        ("mesh['data'=2,'fsdp'=2] {'fsdp','data'}", BOTH),
        ("mesh['data'=2,'fsdp'=2] {}", ()),
        ("mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_0'}", ("fsdp",)),
        ("mesh['axis_0'=2,'axis_1'=2], device_ids=(0,2,1,3) {'axis_1'}", ("data",)),
        ("mesh['replica'=4] {'replica':(1)2}", ("data",)),
        ("mesh['replica'=4] {'replica':(2)2}", ("fsdp",)),
    ],
)
def test_replica_groups_are_read_in_every_dialect(groups, axes):
    [found] = report.collectives(one_reduction(groups), mesh_of_shape(2, 2))
    assert (found.op, found.axes, found.operand_bytes) == ("all-reduce", axes, 32)
    assert found.sent_bytes == {0: 0, 1: 32, 2: 48}[len(axes)]


def test_iota_groups_with_three_dimensions_are_transposed():
    mesh = mesh_of_shape(2, 2, 2, names=("a", "b", "c"))
    [found] = report.collectives(one_reduction("[2,4]<=[2,2,2]T(1,0,2)", 8), mesh)
    assert found.axes == ("a", "c")


def test_types_printed_with_the_operands_change_nothing():
    text = one_reduction("{{0,1},{2,3}}", operand="f32[8]{0} %p")
    assert report.sent_bytes(text, mesh_of_shape(2, 2)) == 32


WRAPPED = """%wrapped (q: u8[16]) -> u8[16] {
  %q = u8[16]{0} parameter(0)
  ROOT %a2a = u8[16]{0} all-to-all(%q), channel_id=5, replica_groups={{0,1},{2,3}}, dimensions={0}
}, execution_thread="parallel"
"""
PAIRS = """
  %ars = (f32[8]{0}, bf16[4]{0}) all-reduce-start(%p, %h), channel_id=1, \
replica_groups=[2,2]<=[4], use_global_device_ids=true, to_apply=%add
  %ard = (f32[8]{0}, /*index=1*/bf16[4]{0}) all-reduce-done(%ars)
  %ags = (u8[16]{0}, u8[64]{0}) all-gather-start(%q), channel_id=2, replica_groups={{0,1,2,3}}, \
dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %agd = u8[64]{0} all-gather-done(%ags)
  %rss = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%p), channel_id=3, \
replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
  %rsd = f32[4]{0} reduce-scatter-done(%rss)
  %cps = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p), channel_id=4, \
source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  %cpd = f32[8]{0} collective-permute-done(%cps)
  %as = ((u8[16]{0}), u8[16]{0}, s32[]) async-start(%q), calls=%wrapped
  %au = ((u8[16]{0}), u8[16]{0}, s32[]) async-update(%as), calls=%wrapped
  %ad = u8[16]{0} async-done(%au), calls=%wrapped
  ROOT %g = f32[8]{0} get-tuple-element(%ard), index=0
"""


def test_asynchronous_pairs_count_once():
    text = program(PAIRS, WRAPPED, p="f32[8]{0}", q="u8[16]{0}", h="bf16[4]{0}")
    mesh = mesh_of_shape(2, 2)
    found = [
        (row.op, row.axes, row.operand_bytes, row.sent_bytes, row.count)
        for row in report.collectives(text, mesh)
    ]
    assert found == [
        ("all-reduce", ("fsdp",), 40, 40, 1),
        ("all-gather", BOTH, 16, 48, 1),
        ("reduce-scatter", ("data",), 32, 16, 1),
        ("collective-permute", ("data",), 32, 32, 1),
        ("all-to-all", ("fsdp",), 16, 8, 1),
    ]


PIECES = """%begin (s: u8[16]) -> (u8[16], u8[64]) {
  %s = u8[16]{0:T(1024)(128)(4,1)} parameter(0)
  %g = u8[64]{0:T(1024)(128)(4,1)} all-gather(%s), channel_id=2, replica_groups=[1,4]<=[4], \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = (u8[16]{0}, u8[64]{0}, u32[]{:S(2)}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%beside (s: u8[16], w: f32[8]) -> f32[8] {
  %s = u8[16]{0} parameter(0)
  %w = f32[8]{0} parameter(1)
  %g = u8[64]{0} all-gather(%s), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %m = f32[8]{0} multiply(%w, %w)
}

%end (s: u8[16]) -> u8[64] {
  %s = u8[16]{0} parameter(0)
  %g = u8[64]{0} all-gather(%s), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %c = u8[64]{0} custom-call(%s, %g), custom_call_target="AsyncCollectiveDone"
}

"""


def test_the_pieces_of_an_asynchronous_collective_on_a_tpu_count_once():
    body = """
  %start = (u8[16]{0}, u8[64]{0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%begin
  %one = f32[8]{0} fusion(%p, %w), kind=kOutput, calls=%beside
  %done = u8[64]{0} fusion(%p), kind=kCustom, calls=%end
  ROOT %alone = u8[64]{0} all-gather(%p), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
"""
    text = program(body, PIECES, p="u8[16]{0}", w="f32[8]{0}")
    mesh = mesh_of_shape(2, 2)
    found = [(row.op, row.sent_bytes) for row in report.collectives(text, mesh)]
    assert found == [("all-gather", 48), ("all-gather", 48)]
    another = text.replace('chain_id="0"', 'chain_id="1"', 1)
    assert report.sent_bytes(another, mesh) == 144


def test_rarer_collectives_are_not_missed():
    body = """
  %t = token[] after-all()
  %cb = f32[8]{0} collective-broadcast(%p), replica_groups={{0,1},{2,3}}
  %ra = f32[8]{0} ragged-all-to-all(%p, %cb, %i, %i, %i, %i), replica_groups={{0,2},{1,3}}
  %s1 = (f32[8]{0}, u32[], token[]) send(%ra, %t), channel_id=2, frontend_attributes=\
{_xla_send_recv_source_target_pairs="{{0,1},{2,3}}"}
  %s2 = (f32[8]{0}, u32[], token[]) send(%ra, %t), channel_id=3, is_host_transfer=true
  %a2a = (f32[8]{0}, f32[8]{0}) all-to-all(%p, %ra), replica_groups={{0,1},{2,3}}
  %n = s4[8]{0:E(4)} convert(%p)
  %w = s4[8]{0} convert(%p)
  %g = (s4[16]{0:E(4)}, s4[16]{0}) all-gather(%n, %w), replica_groups={{0,1},{2,3}}, dimensions={0}
  %self = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1},{2,2},{3,3}}
  ROOT %x = f32[8]{0} add(%ra, %cb)
"""
    text = program(body, p="f32[8]{0}", i="s32[2]{0}")
    mesh = mesh_of_shape(2, 2)
    assert [row[:4] for row in report.collectives(text, mesh)] == [
        ("collective-broadcast", ("fsdp",), 32, 32),
        ("ragged-all-to-all", ("data",), 32, 32),
        ("send", ("fsdp",), 32, 32),
        ("all-to-all", ("fsdp",), 64, 32),
        ("all-gather", ("fsdp",), 12, 12),  # 4 bytes packed, 8 bytes not
        ("collective-permute", (), 32, 0),
    ]


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop(), 5),  # 3 5 7 9 11
        (loop(init=0, step=1, bound=7), 7),
        (loop(init=0, step=1, bound=7, direction="LE"), 8),
        (loop(init=9, step=-1, bound=0, direction="GT"), 9),
        (loop(init=12), 0),
        (loop(step=0), None),
        (loop(config=', backend_config={"known_trip_count":{"n":"4"}}'), 4),
        (loop(config=', backend_config={"known_trip_count": {"n": "4"}}'), 4),
        (loop().replace("copy(%init)", "copy(%n)"), None),
    ],
)
def test_trip_counts_are_read_or_derived_or_unknown(text, trips):
    in_body, in_condition = sorted(
        report.collectives(text, mesh_of_shape(2, 2)), key=lambda row: row.axes, reverse=True
    )
    assert (in_body.axes, in_body.count) == (("fsdp",), trips)
    # The condition is asked once more than the body runs.
    assert in_condition.count == (None if trips is None else trips + 1)


def test_what_sends_nothing_may_have_an_unknown_count():
    text = loop(step=0)
    for groups in ("{{0,1},{2,3}}", "{{0,2},{1,3}}"):
        text = text.replace(groups, "{{0},{1},{2},{3}}")
    assert report.sent_bytes(text, mesh_of_shape(2, 2)) == 0


BRANCHES = """%yes (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%y), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%no (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  ROOT %ag = f32[16]{0} all-gather(%s), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%mystery (m: f32[8]) -> f32[8] {
  %m = f32[8]{0} parameter(0)
  ROOT %mr = f32[8]{0} all-reduce(%m), replica_groups={{0,2},{1,3}}, to_apply=%add
}
"""


def test_predicated_conditionals_and_calls_are_followed():
    body = """
  %twice = f32[8]{0} call(%z), to_apply=%yes
  %custom = f32[8]{0} custom-call(%z), custom_call_target="f", called_computations={%mystery}
  ROOT %if = f32[8]{0} conditional(%flag, %twice, %z), true_computation=%yes, \
false_computation=%no
"""
    text = program(body, BRANCHES, z="f32[8]{0}", flag="pred[]")
    mesh = mesh_of_shape(2, 2)
    assert [(row.op, row.count, row.branch) for row in report.collectives(text, mesh)] == [
        ("all-reduce", 1, ()),
        ("all-reduce", None, ()),  # who knows how often a custom call does it
        ("all-reduce", 1, ("if true",)),
        ("all-gather", 1, ("if false",)),
    ]
    assert report.sent_bytes(text, mesh, "fsdp") == 32 + 32
    with pytest.raises(ValueError, match="unknown"):
        report.sent_bytes(text, mesh, "data")


def test_text_that_does_not_fit_raises():
    with pytest.raises(ValueError, match="4 partitions, need .* 8 devices"):
        report.collectives(one_reduction("{}"), mesh_of_shape(8))
    with pytest.raises(ValueError, match="ENTRY"):
        report.table("not a program", mesh_of_shape(2, 2))
    with pytest.raises(ValueError, match="dialect"):
        report.collectives(one_reduction("planes(0,1)"), mesh_of_shape(2, 2))
