"""A configuration as JSON text, which a run records and processes compare."""

import dataclasses
import json
from typing import Any, get_args, get_type_hints

from train.config import Config


def to_json(config: Config) -> str:
    """Writes a configuration as JSON text.

    If a field may have several types, `"type"` names its type, unless it is the first of them.
    """
    return json.dumps(_to_dict(config), indent=2)


def _to_dict(value: Any) -> dict[str, Any]:
    values = {}
    for name, kind in get_type_hints(type(value)).items():
        part = getattr(value, name)
        if dataclasses.is_dataclass(part):
            first, *_ = get_args(kind) or (kind,)
            tag = {} if type(part) is first else {"type": type(part).__name__}
            part = tag | _to_dict(part)
        values[name] = part
    return values
