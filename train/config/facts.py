"""A configuration as JSON, and what the processes of a run compare before they train."""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import platform
from typing import Any, get_args, get_type_hints

from flax import traverse_util

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


def program_facts(config_json: str) -> dict[str, str]:
    """The facts of a program for `require_same`: config fields, source files, package versions.

    Args:
      config_json: The resolved configuration, from `to_json`.

    Returns:
      Values; for source files the first 12 digits of the sha256.
    """
    root = pathlib.Path(__file__).parents[2]
    sources = sorted(file for part in ("jaxcomp", "train") for file in (root / part).rglob("*.py"))
    packages = ("jax", "jaxlib", "optax", "flax")
    return (
        {f"config {key}": value for key, value in by_name(json.loads(config_json)).items()}
        | {
            f"file {file.relative_to(root).as_posix()}": hashlib.sha256(
                file.read_bytes()
            ).hexdigest()[:12]
            for file in sources
        }
        | {package: importlib.metadata.version(package) for package in packages}
        | {"python": ".".join(platform.python_version_tuple()[:2])}
    )


def by_name(config: dict[str, Any]) -> dict[str, str]:
    """The fields of a config as JSON, by dotted names such as `model.heads`."""
    fields = traverse_util.flatten_dict(config, sep=".")
    return {name: json.dumps(value) for name, value in fields.items()}
