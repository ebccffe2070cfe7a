"""What the sizes of data, models and runs are checked for."""

from typing import Any


def at_least(minimum: int, settings: Any, *fields: str, of: str = "") -> None:
    """Raises a ValueError if a field of some settings, `of` a config, is under a minimum."""
    for field in fields:
        if (value := getattr(settings, field)) < minimum:
            flag = f"{of}{field}".replace("_", "-")
            raise ValueError(
                f"{of}{field}={value} must be at least {minimum}; write --{flag} {minimum}."
            )


def divisible(model: Any, whole: str, part: str) -> None:
    """Raises a ValueError if one size of a model does not divide another."""
    size, unit = getattr(model, whole), getattr(model, part)
    if size % unit:
        raise ValueError(
            f"model.{whole}={size} must be divisible by model.{part}={unit}; write "
            f"--model.{whole} {unit * max(1, round(size / unit))}."
        )
