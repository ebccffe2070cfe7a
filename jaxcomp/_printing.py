"""How what a user makes prints: as the call that makes it, and arrays by type and shape."""

import functools
import inspect
from collections.abc import Callable
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
    """The call of a factory by all its arguments, without those that are its defaults."""
    written = []
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            written.append(_text(arguments[name]))
        elif arguments[name] != parameter.default:
            written.append(f"{name}={_text(arguments[name])}")
    return f"{factory.__name__}({', '.join(written)})"


def _text(value: Any) -> str:
    """A plain function by the name of what has made it, as `cosine_decay_schedule`."""
    return value.__qualname__.split(".")[0] if inspect.isfunction(value) else repr(value)


def array(x: Any) -> str:
    """An array, or what has its shape and dtype, as `float32[3, 4]`; anything else as it is."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return repr(x)
    return f"{x.dtype}{list(x.shape)}"
