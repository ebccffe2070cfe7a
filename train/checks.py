"""Checks of settings, and of files that a user can change."""

import collections
import importlib.util
import json
import math
import os
import pathlib
import types
import typing
from typing import Any, Literal, Union

from jaxcomp.launch.regular import open_file

MOST_TEXT = 10**8
"""Bytes of the longest file that is read as one text, such as a JSON object."""

_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "True or False",
    types.NoneType: "None",
}


def require_types(settings: Any, prefix: str = "") -> None:
    """Raises a ValueError if a field of a dataclass does not have its type.

    In a config, the dataclass is at `prefix`, such as `model.`. An integer is a number, but True,
    NaN and infinities are not.
    """
    for field, kind in typing.get_type_hints(type(settings)).items():
        if not has_type(value := getattr(settings, field), kind):
            raise ValueError(f"{prefix}{field}={value!r:.80} must be {_words(kind)}.")


def has_type(value: Any, kind: Any) -> bool:
    """Whether a value has a type, as in dataclass fields and in JSON."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin in (Union, types.UnionType):
        return any(has_type(value, arg) for arg in args)
    if origin is dict:
        key, item = args
        return isinstance(value, dict) and all(
            has_type(name, key) and has_type(x, item) for name, x in value.items()
        )
    if origin is list:
        return isinstance(value, list) and all(has_type(x, args[0]) for x in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[1:] == (...,) else args
        return len(kinds) == len(value) and all(map(has_type, value, kinds))
    if kind in (int, float) and isinstance(value, int):
        return type(value) is not bool and abs(value) < 2**63  # the range of an int64
    return isinstance(value, kind) and (kind is not float or math.isfinite(value))


def at_least(minimum: int, settings: Any, *fields: str, prefix: str = "") -> None:
    """Raises a ValueError if a field of some settings, at `prefix`, is below a minimum."""
    for field in fields:
        if (value := getattr(settings, field)) < minimum:
            flag = f"{prefix}{field}".replace("_", "-")
            raise ValueError(
                f"{prefix}{field}={value} must be at least {minimum}; write --{flag} {minimum}."
            )


def divisible(model: Any, whole: str, part: str) -> None:
    """Raises a ValueError if one size of a model does not divide another."""
    size, unit = getattr(model, whole), getattr(model, part)
    if size % unit:
        raise ValueError(
            f"model.{whole}={size} must be divisible by model.{part}={unit}; write "
            f"--model.{whole} {unit * max(1, round(size / unit))}."
        )


def require_package(what: str, package: str, *, extra: str, module: str = "") -> None:
    """Raises a ValueError that says what to install if a package is missing.

    Args:
      what: What needs it.
      package: Its name.
      extra: The extra of the checkout that has it.
      module: The module to look for, if it has another name than the package.
    """
    if importlib.util.find_spec(module or package) is None:
        raise ValueError(
            f"{what} needs the package {package}; run pip install -e '.[{extra}]' in the checkout."
        )


def read_file(path: str | pathlib.Path, most: int = MOST_TEXT) -> bytes:
    """The bytes of a regular file.

    Args:
      path: The file.
      most: A longer one is refused before memory is taken for it.

    Raises:
      ValueError: If it is longer, or no regular file.
      OSError: If it cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path} has {size} bytes; needs at most {most}.")
        return file.read(size)  # which takes memory for as much as it is asked for


def json_object(file: pathlib.Path, **kinds: Any) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
      file: The file.
      **kinds: Types of the values, by required key.

    Raises:
      ValueError: If it cannot be read, or holds anything else.
    """
    try:
        found = json_value(read_file(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {found!r:.80}; needs a JSON object.")
    require_keys(found, str(file), **kinds)
    return found


def require_keys(found: dict[str, Any], where: str, **kinds: Any) -> None:
    """Raises a ValueError if a key of an object is missing, or its value has another type."""
    for key, kind in kinds.items():
        if key not in found or not has_type(found[key], kind):
            got = f"{found[key]!r:.80}" if key in found else "nothing"
            raise ValueError(f"{where}: {key} is {got}; needs {_words(kind)}.")


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: If it is no JSON, nests too deeply, or an object has a key twice, of which Python
        would take the last one without a word.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {twin!r:.80} twice")
    return found


def _words(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, args))
    if origin is dict:
        return f"an object of values that are {_words(args[1])}"
    if origin in (list, tuple):
        return f"a {origin.__name__} of {_words(args[0])} each"
    return _NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")
