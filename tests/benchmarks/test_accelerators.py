"""What is read from programs that were compiled for accelerators, and from small real ones.

Those are steps of a GPT for eight H100 and eight TPU v5e: compiled where the compilers are, and
run nowhere.
"""

import dataclasses
import functools

import jax
import pytest

from benchmarks import (
    accelerators,
    accelerators_figure,
    accelerators_roofline,
    accelerators_row,
)
from benchmarks.accelerators import COMPILING
from benchmarks.accelerators_devices import DEVICES, mesh_from, mesh_of, unavailable
from benchmarks.accelerators_messages import messages, overlap
from benchmarks.accelerators_program import GUESSED_ROUNDS, Cost, Program
from benchmarks.accelerators_run import time_step
from benchmarks.accelerators_step import METHODS, MODELS, batch_of, build_step

STRUCTURE = False
"""Whether no message may stand in a loop or a branch, and no loop may be of unknown length."""

# Of the `tiny` model's step: most copies of the parameters that kernels move, most kernels, and
# most messages between hosts.
TABLE = {
    ("h100", "q4"): (39, 205, 3),
    ("h100", "cocktail"): (50, 880, 2),
    ("h100", "zero_one_adam"): (53, 270, 3),
    ("v5e", "q4"): (75, 560, 3),
    ("v5e", "cocktail"): (96, 2350, 2),
    ("v5e", "zero_one_adam"): (87, 790, 3),
}

HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=4\n\n"
PRODUCT = 'dot(%x, %x), metadata={op_name="jit(step)/transpose(jvp())/dot_general"}'
PARTS = f"""%slices (a: f32[8,8]) -> f32[1,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} bitcast(%a)
  ROOT %s = f32[1,8]{{1,0}} slice(%b), slice={{[0:1], [0:8]}}
}}

%halves (a: f32[8,8]) -> f32[1,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %h = f32[8,8]{{1,0}} multiply(%a, %a)
  %s = f32[1,8]{{1,0}} slice(%h), slice={{[0:1], [0:8]}}
  %t = f32[1,8]{{1,0}} slice(%h), slice={{[1:2], [0:8]}}
  ROOT %r = f32[1,8]{{1,0}} add(%s, %t)
}}

%updates (a: f32[8,8], u: f32[1,8], i: s32[]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %u = f32[1,8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[8,8]{{1,0}} dynamic-update-slice(%a, %u, %i, %i)
}}

%multiplies (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %p = f32[8,8]{{1,0}} {PRODUCT}
}}

%codes (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %p = f32[8,8]{{1,0}} dot(%x, %x), metadata={{op_name="jit(step)/shard_map/dot_general"}}
}}

%body (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %t = f32[8,8]{{1,0}} transpose(%x), dimensions={{1,0}}
  ROOT %r = f32[8,8]{{1,0}} all-to-all(%t), replica_groups=[1,4]<=[4], dimensions={{0}}
}}

%condition (x: f32[8,8]) -> pred[] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %c = pred[] custom-call(%x), custom_call_target="some"
}}

"""
HEAD = "ENTRY %main (x: f32[8,8], u: f32[1,8], i: s32[]) -> f32[8,8] {\n"
PARAMETERS = """  %x = f32[8,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
"""
WHOLE, ROW = 256, 32  # bytes of f32[8,8] and of f32[1,8]


def program(*lines):
    body = "".join(f"  {line}\n" for line in lines)
    return Program(HEADER + PARTS + HEAD + PARAMETERS + body + "}\n")


def fusion(name, operands, kind="kLoop", result="f32[8,8]{1,0}", root=""):
    return f"{root}%{name}.1 = {result} fusion({operands}), kind={kind}, calls=%{name}"


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("ROOT %c = f32[8,8]{1,0} copy(%x)", 2 * WHOLE),
        ("ROOT %c = f32[1,8]{1,0} slice(%x), slice={[0:1], [0:8]}", 2 * ROW),
        ("ROOT %c = f32[8,8]{1,0} dynamic-update-slice(%x, %u, %i, %i)", 2 * ROW),
        (fusion("slices", "%x", result="f32[1,8]{1,0}", root="ROOT "), 2 * ROW),
        (fusion("halves", "%x", result="f32[1,8]{1,0}", root="ROOT "), 3 * ROW),
        (fusion("updates", "%x, %u, %i", root="ROOT "), 2 * ROW + 4),
        (fusion("multiplies", "%x", root="ROOT "), 2 * WHOLE),
    ],
)
def test_of_what_is_sliced_or_updated_in_place_the_slice_counts(line, moved):
    assert program(line).cost[:2] == (moved, 1)


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %c = f32[64]{0} bitcast(%x)",
        'ROOT %c = f32[8,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
        "ROOT %c = f32[8,8]{1,0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%slices",
    ],
)
def test_names_and_messages_are_no_kernels(line):
    assert program(line).cost == Cost()


@pytest.mark.parametrize(("known", "rounds"), [(True, 5), (False, GUESSED_ROUNDS)])
def test_loops_count_as_often_as_they_run_and_unknown_ones_are_told(known, rounds):
    config = ', backend_config={"known_trip_count":{"n":"5"}}' if known else ""
    loop = f"ROOT %w = f32[8,8]{{1,0}} while(%x), condition=%condition, body=%body{config}"
    cost = program(loop).cost
    # A transposition and the condition in each round; the message is no kernel.
    assert cost == Cost(rounds * 2 * WHOLE, 2 * rounds, 1, int(not known))


def test_of_a_conditional_the_dearest_branch_counts():
    branches = "branch_computations={%slices, %multiplies}"
    line = f"ROOT %c = f32[8,8]{{1,0}} conditional(%i, %x, %x), {branches}"
    assert program(line).cost == Cost(2 * WHOLE, 1, products=1)


GATHER = """%s = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4]
%d = f32[32,8]{1,0} all-gather-done(%s)""".split("\n")


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("replica",))


def test_products_beside_a_message_are_those_between_its_start_and_its_done(mesh):
    multiply = [fusion("multiplies", "%x").replace(".1", f".{n}") for n in range(4)]
    code = fusion("codes", "%x")
    start, done = GATHER
    found = program(multiply[0], start, multiply[1], code, multiply[2], done, "ROOT " + multiply[3])
    (message,) = messages(found, mesh)
    assert (message.op, message.axes, message.asynchronous) == ("all-gather", ("replica",), True)
    assert found.cost.products == 4
    assert overlap(found, [message]) == (0.5, 0.5, 0.75)
    assert overlap(found, []) == (0, 0, 0)


def test_a_pair_that_the_compiler_made_synchronous_has_nothing_beside_it(mesh):
    start, done = GATHER
    waits = f'{start}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}'
    (message,) = messages(program(waits, fusion("multiplies", "%x"), "ROOT " + done), mesh)
    assert not message.asynchronous


def test_a_message_in_a_loop_or_without_a_start_has_nothing_beside_it(mesh):
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    loop = f"%w = f32[8,8]{{1,0}} while(%x), condition=%condition, body=%body, {config}"
    found = program(loop, fusion("multiplies", "%x", root="ROOT "))
    (message,) = messages(found, mesh)
    assert message.inside and not message.asynchronous
    assert overlap(found, [message]) == (0, 0, 1)


def test_pieces_of_a_message_on_a_tpu_are_one_from_its_start_to_its_done(mesh):
    one = (
        "%g = f32[32,8]{1,0} all-gather(%x), channel_id=2, replica_groups=[1,4]<=[4], "
        'frontend_attributes={chain_id="0"}'
    )
    parts = "".join(
        f"%{name} (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8]{{1,0}} parameter(0)\n  {one}\n"
        f"  ROOT %r = f32[8,8]{{1,0}} {root}\n}}\n\n"
        for name, root in [
            ("begin", 'custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
            ("beside", PRODUCT),
            ("end", 'custom-call(%g), custom_call_target="AsyncCollectiveDone"'),
        ]
    )
    lines = [f"  %{n}.1 = f32[8,8]{{1,0}} fusion(%x), calls=%{n}" for n in ("begin", "beside")]
    last = "  ROOT %end.1 = f32[8,8]{1,0} fusion(%x), calls=%end\n}\n"
    found = Program(HEADER + parts + HEAD + PARAMETERS + "\n".join([*lines, last]))
    (message,) = messages(found, mesh)
    assert overlap(found, [message]) == (1, 1, 1)


WORK = accelerators_roofline.Work(
    flops=989e12,
    moved=3_352_320_000_000,
    kernels=250_000,
    fast_bytes=450e9,
    nic_bytes=1e9,
    beside=0,
)


def test_the_roofline_adds_products_memory_launches_and_what_no_product_hides():
    h100 = DEVICES["h100"]
    assert accelerators_roofline.local_seconds(h100, WORK) == 4
    predict = accelerators_roofline.predicted_seconds
    assert predict(h100, WORK, 1e9) == 4 + 8
    assert predict(h100, WORK._replace(beside=0.5), 1e9) == 4 + 7.5
    assert predict(h100, WORK._replace(beside=0.5), 1e12) == 4


def test_flops_are_six_a_parameter_and_token_and_those_of_attention():
    model = MODELS["124m"]
    tokens = 2048 * 1024 / 8
    flops = accelerators_roofline.gradient_flops(model, 124_000_000, 8)
    assert flops == (6 * 124_000_000 + 12 * 12 * 768 * 1024) * tokens


def row_of(method, **more):
    key = {"device": "h100", "model": "tiny", "method": method, "mesh": "8"}
    return key | more


def test_a_new_row_replaces_the_old_one_and_what_was_measured_stays():
    measured = {"seconds": 1.0, "predicted_seconds": 0.5}
    rows = accelerators.merged([row_of("q4", kernels=1), row_of("dense")], row_of("q4", kernels=2))
    assert rows == [row_of("dense"), row_of("q4", kernels=2)]
    rows = accelerators.merged(rows, row_of("q4", measured=measured))
    rows = accelerators.merged(rows, row_of("q4", error="why"))
    assert rows[1] == row_of("q4", error="why", measured=measured)
    text = accelerators_figure.table(rows[1:])
    assert "not compiled: why" in text and "measured 1000.00 ms, predicted 500.00 ms" in text


def test_an_error_of_a_process_of_its_own_is_told():
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        accelerators.apart(int, "x", environment={})


def test_a_step_runs_and_is_timed_on_the_devices_at_hand(mesh):
    built = build_step(SMALL, METHODS["q4"], mesh)
    assert built.batch == batch_of(mesh)
    assert time_step(built, built.step, repeats=1) > 0


SMALL = dataclasses.replace(MODELS["tiny"], layers=1, width=32, heads=2, vocab=256)


@pytest.mark.parametrize(
    ("method", "in_shards"),
    [("q4", False), ("qsdp", False), ("cocktail_lean", True)],
)
def test_steps_are_lowered_for_hosts_of_several_devices(method, in_shards):
    hosts = mesh_from(jax.devices(), (4, 2))
    model = dataclasses.replace(SMALL, scan=True)
    built = build_step(model, METHODS[method], hosts, in_shards)
    built.step.lower(built.params, built.state, built.batch)
    axes = {
        axis for x in jax.tree.leaves(built.params) for axis in jax.tree.leaves(x.sharding.spec)
    }
    assert ("fast" in str(axes)) == (in_shards or method == "qsdp")
    assert built.mesh.size == 8


def test_more_devices_than_a_slice_has_are_refused_before_the_compiler_ends_its_process():
    with pytest.raises(ValueError, match="got 1024 devices of v5e, need at most 256"):
        mesh_of("v5e", (128, 8))


def test_a_device_without_its_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(
        accelerators.unavailable.__globals__["PACKAGES"], "tpu", ("no_such_package.at_all",)
    )
    assert "pip install '.[accelerators]'" in unavailable("v5e")


@functools.cache
def rows_of(device):
    """The rows of the table's methods, made in one process of its own."""
    methods = [method for name, method in TABLE if name == device]
    made = accelerators.apart(
        accelerators_row.rows, device, "tiny", methods, (8,), environment=COMPILING
    )
    return {row["method"]: row for row in made}


@pytest.mark.parametrize(("device", "method"), TABLE)
def test_programs_for_accelerators_have_the_structure_that_the_page_says(device, method):
    if (reason := unavailable(device)) is not None:
        pytest.skip(reason)
    row = rows_of(device)[method]
    most_copies, most_kernels, most_messages = TABLE[device, method]
    assert row["moved_copies"] <= most_copies
    assert row["kernels"] <= most_kernels
    found = [kind["all"] for kind in row["messages"].values()]
    assert 0 < sum(found) <= most_messages
    if STRUCTURE:
        assert row["messages_inside"] == 0
        assert row["unknown_loops"] == 0
