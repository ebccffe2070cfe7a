"""What the processes of a run compare before they train: config, source files, package versions."""

import hashlib
import importlib.metadata
import json
import pathlib
import platform
from typing import Any


def program_facts(config_json: str) -> dict[str, str]:
    """The facts of a program for `require_same`: config fields, source files, package versions.

    Args:
      config_json: The resolved configuration, from `train.config.as_json.to_json`.

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


def by_name(config: dict[str, Any], above: str = "") -> dict[str, str]:
    """The fields of a config as JSON, by dotted names such as `model.heads`."""
    named = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        named |= by_name(value, f"{above}{key}.") if inner else {above + key: json.dumps(value)}
    return named
