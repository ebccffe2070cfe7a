"""What kernels and messages a program's text has, and which products run beside a message."""

import jax
import pytest

from benchmarks.accelerators_program import GUESSED_ROUNDS, Cost, Program, messages, overlap

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

%scatters (a: f32[8,8], p: s32[2,2], v: f32[2]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %p = s32[2,2]{{1,0}} parameter(1)
  %v = f32[2]{{0}} parameter(2)
  ROOT %d = f32[8,8]{{1,0}} scatter(%a, %p, %v), to_apply=%condition
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
HEAD = "ENTRY %main (x: f32[8,8], u: f32[1,8], i: s32[], p: s32[2,2], v: f32[2]) -> f32[8,8] {\n"

PARAMETERS = """  %x = f32[8,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %p = s32[2,2]{1,0} parameter(3)
  %v = f32[2]{0} parameter(4)
"""
WHOLE, ROW = 256, 32  # bytes of f32[8,8] and of f32[1,8]
SECTOR = 32  # bytes that a GPU reads and writes for each value of a scatter


def program(*lines):
    body = "".join(f"  {line}\n" for line in lines)
    return Program(HEADER + PARTS + HEAD + PARAMETERS + body + "}\n")


def fusion(name, operands, result="f32[8,8]{1,0}", root=""):
    return f"{root}%{name}.1 = {result} fusion({operands}), kind=kLoop, calls=%{name}"


# A fusion with a start and a done, as XLA writes one that copies a layer's slice.
START = "((f32[8,8]{1,0}, f32[1,8]{1,0}, s32[]), f32[8,8]{1,0}, u32[]) fusion-start(%x, %u, %i)"
APART = f"%s = {START}, kind=kLoop, calls=%updates\n  ROOT %d = f32[8,8]{{1,0}} fusion-done(%s)"


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("ROOT %c = f32[8,8]{1,0} copy(%x)", 2 * WHOLE),
        ("ROOT %c = f32[1,8]{1,0} slice(%x), slice={[0:1], [0:8]}", 2 * ROW),
        ("ROOT %c = f32[8,8]{1,0} dynamic-update-slice(%x, %u, %i, %i)", 2 * ROW),
        (fusion("slices", "%x", result="f32[1,8]{1,0}", root="ROOT "), 2 * ROW),
        (fusion("halves", "%x", result="f32[1,8]{1,0}", root="ROOT "), 3 * ROW),
        (fusion("updates", "%x, %u, %i", root="ROOT "), 2 * ROW + 4),
        (APART, 2 * ROW + 4),
        (fusion("scatters", "%x, %p, %v", root="ROOT "), 2 * 2 * SECTOR + 16 + 8),
        (fusion("multiplies", "%x", root="ROOT "), 2 * WHOLE),
    ],
)
def test_of_what_is_sliced_or_updated_in_place_the_slice_counts(line, moved):
    assert program(line).cost[:2] == (moved, 1)


CHIP = "f32[8,8]{1,0:T(8,128)S(1)}"  # an array that a TPU keeps on its chip
FETCH = f"%s = ({CHIP}, f32[8,8]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) copy-start(%x)"


@pytest.mark.parametrize(
    ("lines", "moved"),
    [
        ([FETCH, f"ROOT %d = {CHIP} copy-done(%s)"], WHOLE),
        ([f"ROOT %a = {CHIP} add(%x, %x)"], WHOLE),
        ([f"%a = {CHIP} add(%x, %x)", "ROOT %b = f32[8,8]{1,0:T(8,128)} add(%a, %x)"], 3 * WHOLE),
        ([f"%a = {CHIP} add(%x, %x)", fusion("multiplies", "%a", root="ROOT ")], 2 * WHOLE),
        ([fusion("updates", "%x, %u, %i", result=CHIP, root="ROOT ")], ROW + 4),
    ],
)
def test_only_the_main_memory_of_a_tpu_counts(lines, moved):
    assert program(*lines).cost.moved == moved


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
    assert overlap(found, [message]) == (0.5, 0.5, 0.75, 1)
    assert message.num_bytes == 32 * 8 * 4  # what comes, not what goes
    waiting = message._replace(done=message.start, num_bytes=3 * message.num_bytes)
    assert overlap(found, [message, waiting]).bytes_asynchronous == 0.25
    assert overlap(found, []) == (0, 0, 0, 0)


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
    assert overlap(found, [message]) == (0, 0, 1, 0)


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
    assert overlap(found, [message]) == (1, 1, 1, 1)
