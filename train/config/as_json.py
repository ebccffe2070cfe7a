"""A configuration as JSON text, and back: what a run records, and processes compare."""

import dataclasses
import json
from typing import Any, get_args, get_type_hints

from train.config import Config


def to_json(config: Config) -> str:
    """Writes a configuration as JSON text; `from_json` reads it back equal.

    Where a field may be of several types, its `"type"` says of which it is, unless of the first.
    """
    return json.dumps(_to_dict(config), indent=2)


def from_json(text: str) -> Config:
    """Reads what `to_json` wrote.

    Raises:
      ValueError: If the text is no JSON, or its keys are not those of this version's `Config`.
    """
    return _from_dict(Config, json.loads(text))


def _to_dict(value: Any) -> dict[str, Any]:
    values = {}
    for name, kind in get_type_hints(type(value)).items():
        part = getattr(value, name)
        if dataclasses.is_dataclass(part):
            is_first = type(part) is next(iter(_kinds(kind).values()))
            part = ({} if is_first else {"type": type(part).__name__}) | _to_dict(part)
        values[name] = part
    return values


def _from_dict(kind: Any, values: dict[str, Any]) -> Any:
    kinds = _kinds(kind)
    name = values.get("type", next(iter(kinds)))
    if name not in kinds:
        raise ValueError(f"{name!r} is no type of this version; it has {sorted(kinds)}.")
    types = get_type_hints(kinds[name])
    if unknown := values.keys() - types - {"type"}:
        raise ValueError(f"{name} has no {sorted(unknown)}; it has {sorted(types)}.")
    return kinds[name](
        **{key: _from_json(types[key], value) for key, value in values.items() if key != "type"}
    )


def _from_json(kind: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return _from_dict(kind, value)
    return tuple(value) if isinstance(value, list) else value


def _kinds(kind: Any) -> dict[str, type]:
    """The types that a value may have, by name: one, or the members of a union."""
    return {member.__name__: member for member in get_args(kind) or (kind,)}
