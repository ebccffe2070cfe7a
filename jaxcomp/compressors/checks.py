"""Checks of arguments that several compressors share; errors name the call."""

from typing import Any

from jaxcomp.compressors.base import Compressor


def compressor(call: str, got: Any) -> None:
    """Raises a ValueError for anything but a compressor."""
    if not isinstance(got, Compressor):
        raise ValueError(f"{call} got {got!r}; needs a Compressor; write quantize(4)")


def choice(call: str, argument: str, got: Any, *choices: str) -> None:
    """Raises a ValueError for an argument that is not among the two or more choices."""
    if got not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{call} got {argument}={got!r}; write {', '.join(most)} or {last}")


def scale_dtype(call: str, name: str) -> None:
    """Raises a ValueError for a dtype that scales cannot be sent in."""
    choice(call, "scale_dtype", name, "bfloat16", "float16", "float32")


def integer(call: str, argument: str, got: Any, instead: str, most: int = 0) -> None:
    """Raises a ValueError unless the argument is an integer from 1 on, or from 1 to `most`."""
    if not isinstance(got, int) or got < 1 or (most and got > most):
        needs = f"an integer from 1 to {most}" if most else "a positive integer"
        raise ValueError(f"{call} got {argument}={got!r}; needs {needs}{instead}")
