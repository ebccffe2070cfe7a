"""What config.json says of rotary embeddings and windows, in the spellings of all versions."""

from typing import Any

from train import checks
from train.huggingface.forms import Settings

_ROPE = {"rope_type": str, "type": str}
_ROPE |= dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor"), float)
_ROPE |= dict.fromkeys(("low_freq_factor", "high_freq_factor"), float)
_ROPE |= {"original_max_position_embeddings": float}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def agreed(file: str, kind: Any, places: dict[str, Settings], default: Any = None) -> Any:
    """The value that a setting has under all its names.

    Args:
      file: For the errors.
      kind: The type of the value.
      places: The name of each spelling, its last part being the key, and the object that may have
        it.
      default: The value if no place has one, or only null.

    Raises:
      ValueError: If two places have different values, by name, or one has another type.
    """
    values = {name: place.get(name.rpartition(".")[2]) for name, place in places.items()}
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        checks.require_keys({name: value}, file, **{name: kind})
    name, value = next(iter(values.items()), ("", default))
    for other, its in values.items():
        if its != value:
            raise ValueError(
                f"{file} has {name}={value!r:.80}, but {other}={its!r:.80}: a model has one of "
                "them. Remove the other."
            )
    return value


def rotation(kind: str, settings: Settings, head: int, positions: int, file: str) -> Settings:
    """Rotary embeddings, in the format of transformers 5 and of earlier versions.

    Args:
      kind: The `model_type`.
      settings: All of config.json.
      head: Features of a head.
      positions: Tokens that the model is made for.
      file: For the errors.

    Returns:
      DecoderConfig's fields.
    """
    tables = _tables(settings, file)

    def setting(name, default, *above):
        inside = {f"{place}.{name}": table for place, table in tables.items()}
        return agreed(file, _ROPE[name], inside | dict.fromkeys(above, settings), default)

    base = setting("rope_theta", 10_000.0, "rope_theta", "rotary_emb_base")
    share = 0.25 if kind == "gpt_neox" else 1.0
    share = setting("partial_rotary_factor", share, "partial_rotary_factor", "rotary_pct")
    if not 0 < share <= 1 or not (width := int(head * share)):
        needed = "a part of a head, at most 1"
        raise refused(file, "partial_rotary_factor or rotary_pct", share, needed)
    found = {"rotary_base": float(base), "rotary_width": width}
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (setting(name, None) for name in names)
    old = setting("original_max_position_embeddings", positions, "original_max_position_embeddings")
    scaled = setting("rope_type", "default")
    if scaled == "llama3":
        for name, value in zip(names, (factor, low, high), strict=True):
            if value is None:
                raise refused(file, name, None, "a number, as rope_type is llama3")
        return found | {"rotary_scaling": (float(factor), float(low), float(high), float(old))}
    if scaled != "default":
        raise refused(file, "rope_type", scaled, "default or llama3")
    if factor not in (None, 1):
        raise refused(file, "factor", factor, "a rope_type that uses it")
    return found


def _tables(settings: Settings, file: str) -> dict[str, Settings]:
    """The objects with rotary settings by name, all with their rope_type."""
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        table = agreed(file, dict[str, Any], {name: settings}, {})
        inner = [value for value in table.values() if isinstance(value, dict)]
        if inner:  # by the kinds of layers, which are all alike here
            if table.keys() - {_FULL, _SLIDING} or any(each != inner[0] for each in inner):
                raise refused(file, name, table, "the same for all layers")
            name, table = f"{name}.{min(table)}", inner[0]
        if not table:
            continue
        if strange := [key for key in table if key not in _ROPE and table[key] is not None]:
            raise refused(file, f"{name}.{strange[0]}", table[strange[0]], "none")
        spellings = {f"{name}.rope_type": table, f"{name}.type": table}
        found[name] = table | {"rope_type": agreed(file, str, spellings, "default")}
    return found


def window(kind: str, settings: Settings, layers: int, file: str) -> Settings:
    """The sliding window, which all layers or no layers must have, as DecoderConfig's field."""
    say = lambda name, kind, default: agreed(file, kind, {name: settings}, default)
    has_window = kind in ("mistral", "qwen2", "qwen3")
    size = say("sliding_window", int, None) if has_window else None
    if kind == "mistral" and "sliding_window" not in settings:
        size = 4096
    if size is not None and size < 1:
        raise refused(file, "sliding_window", size, "at least 1, or null")
    first = 0
    if kind in ("qwen2", "qwen3"):
        # Qwen's layers have a window from max_window_layers on; earlier ones see all tokens.
        first = say("max_window_layers", int, 28)
        size = size if say("use_sliding_window", bool, False) else None
    first = min(max(first, 0), layers) if size is not None else layers
    kinds = [_FULL] * first + [_SLIDING] * (layers - first)
    listed = say("layer_types", list[str], kinds)
    if len(set(listed)) > 1 or not set(listed) <= {_FULL, _SLIDING} or len(listed) != layers:
        raise refused(file, "layer_types", listed, f"{layers} layers that are all alike")
    if listed != kinds and (kind == "mistral" or size is None):
        raise refused(file, "layer_types", listed, f"{kinds[0]}, as the other settings say")
    return {"window": size if size is not None and listed[0] == _SLIDING else 0}


def refused(file: str, name: str, got: Any, needed: str) -> ValueError:
    """The error for a setting that the decoder does not compute."""
    return ValueError(
        f"{file} has {name}={got!r:.80}, which the decoder does not compute; it needs {needed}."
    )
