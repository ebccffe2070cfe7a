"""Texts of compiled programs."""

from hypothesis import strategies as st

from jaxcomp.measure import hlo
from tests.helpers.fuzzing import TEXT, fuzz, refused

HLO = """HloModule jit_f, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %r)
}

%less (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[8]{0}) tuple(%zero, %x)
  %w = (s32[], f32[8]{0}) while(%t), condition=%less, body=%body
  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1
}
"""


@st.composite
def programs(draw):
    """A program whose lines are swapped, left out, doubled, or have their words replaced."""
    lines = HLO.split("\n")
    words = sorted(set(HLO.replace("(", " ").replace(")", " ").replace(",", " ").split()))
    for _ in range(draw(st.integers(1, 4))):
        at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        how = draw(st.sampled_from(["swap", "double", "drop", "word", "text"]))
        if how == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif how == "double":
            lines.insert(at, lines[other])
        elif how == "drop":
            lines[at] = ""
        elif how == "word":
            lines[at] = lines[at].replace(
                draw(st.sampled_from(words)), draw(st.sampled_from(words))
            )
        else:
            lines[at] = lines[at][: draw(st.integers(0, 30))] + draw(TEXT) + lines[at][30:]
    return "\n".join(lines)


def read_program(text):
    module = hlo.parse(text)
    for number, execution in enumerate(hlo.executions(module)):
        if number > 1000:
            break
        hlo.num_bytes(execution.instruction.type)
        hlo.called(execution.instruction)


@fuzz(programs(), 150)
def test_programs(text):
    refused(read_program, text)
