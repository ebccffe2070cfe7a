"""How objects print: as the call that makes them, arrays as type and shape, rows as a table."""

import functools
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any


class Printed:
    """A function that prints as its name or as the call that made it, in `help()` too."""

    def __init__(self, function: Callable[..., Any], text: str):
        functools.update_wrapper(self, function)
        self._function, self._text = function, text

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __repr__(self) -> str:
        return self._text


def by_name(function: Callable[..., Any]) -> Printed:
    """Makes a function print as its name."""
    return Printed(function, function.__name__)


def call(factory: Callable[..., Any], **arguments: Any) -> str:
    """The call of a factory with all arguments that differ from its defaults."""
    written = []
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            written.append(text(arguments[name]))
        elif arguments[name] != parameter.default:
            written.append(f"{name}={text(arguments[name])}")
    return f"{factory.__name__}({', '.join(written)})"


def text(value: Any) -> str:
    """The text of a value; a plain function prints as its maker, like `cosine_decay_schedule`."""
    return value.__qualname__.split(".")[0] if inspect.isfunction(value) else repr(value)


def array(x: Any) -> str:
    """The text of anything with a shape and dtype, like `float32[3, 4]`; else the repr."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return repr(x)
    return f"{x.dtype}{list(x.shape)}"


def aligned(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Lines with aligned columns: right-aligned if in `numbers`, else left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
