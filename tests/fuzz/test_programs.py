"""Texts of compiled programs."""

from hypothesis import strategies as st

from jaxcomp.measure import hlo
from tests.helpers.fuzzing import TEXT, fuzz, refused
from tests.helpers.hlo import loop

HLO = loop()


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
