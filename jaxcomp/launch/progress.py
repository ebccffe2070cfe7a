"""Lines of progress that a program prints, and the bar that a launcher makes of them."""

import re
from typing import Any, NamedTuple

# Without tqdm's own rate, which includes compilation, evaluations and saves.
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_LINE = re.compile(r"(.{1,200}?): step (\d{1,15})/(\d{1,15})(?:, (.*?))?(?:, ([\d:?]+) left)?")


class Line(NamedTuple):
    """A line of progress, printed if there is no terminal."""

    name: str  # of the run
    step: int
    steps: int  # of the whole run
    rates: str = ""  # such as loss, seconds per step, bytes per second
    left: str = ""  # time, such as 01:29

    def __str__(self) -> str:
        parts = [f"{self.name}: step {self.step}/{self.steps}", self.rates]
        return ", ".join(filter(None, [*parts, self.left and f"{self.left} left"]))


def read(text: str) -> Line | None:
    """Reads such a line; None for any other text.

    Examples:
      >>> read("tiny: step 20/100, loss 2.5, 00:08 left")
      Line(name='tiny', step=20, steps=100, rates='loss 2.5', left='00:08')
    """
    found = _LINE.fullmatch(text.strip())
    return found and Line(found[1], int(found[2]), int(found[3]), found[4] or "", found[5] or "")


def bar(name: str, first: int, steps: int, from_lines: bool = False) -> Any:
    """Makes the bar of a run on stderr; with `from_lines`, the lines give the time left.

    Returns:
      A bar of tqdm; None if that is not installed.
    """
    try:
        import tqdm
    except ImportError:
        return None
    form = _BAR.replace("<{remaining}", "") if from_lines else _BAR
    return tqdm.tqdm(total=steps, initial=first, desc=name, bar_format=form)
