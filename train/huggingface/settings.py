"""Converts config.json to a `DecoderConfig` and back; raises for unsupported models."""

import dataclasses
import math
import pathlib
from typing import Any

from train import checks
from train.huggingface.forms import FORMS, Settings
from train.models.decoder import DecoderConfig

_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_MOST_LAYERS = 10_000
_NEVER = ("quantization_config", "num_local_experts", "num_experts", "parallel_lm_logits")
_FREE = ("context", "dtype", "scan", "remat", "lora", "lora_alpha")  # a run chooses them


def read(folder: str | pathlib.Path) -> tuple[str, DecoderConfig]:
    """The `model_type` of a folder's config.json, and its model.

    Raises:
      ValueError: If the file is missing, or has a setting that the decoder does not support.
    """
    file = pathlib.Path(folder, "config.json")
    settings = checks.json_object(file, model_type=str)
    try:
        return settings["model_type"], decoder_of(settings, str(file))
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{file} has a value that no such model has: {error!r:.200}.") from error


def decoder_of(settings: Settings, file: str = "config.json") -> DecoderConfig:
    """The model of these settings, with every size explicit; `context` is the maximum.

    Raises:
      ValueError: For unsupported settings, by name.
    """
    kind = settings.get("model_type")
    if kind not in FORMS:
        raise _refused(file, "model_type", kind, f"one of {', '.join(FORMS)}")
    form = FORMS[kind]
    for name in _NEVER:
        if settings.get(name):
            raise _refused(file, name, settings[name], "a model without it")
    for name, needed in form.only.items():
        if settings.get(name, needed) != needed:
            raise _refused(file, name, settings[name], f"{needed!r}")
    found = dict(form.always)
    for field, (name, default) in form.sizes.items():
        value = settings.get(name, default)
        found[field] = 0 if value is None else value
    if not checks.is_of(found["layers"], int) or found["layers"] > _MOST_LAYERS:
        raise _refused(file, form.sizes["layers"][0], found["layers"], f"at most {_MOST_LAYERS}")
    if found["activation"] not in _ACTIVATIONS:
        raise _refused(file, "activation", found["activation"], f"one of {', '.join(_ACTIVATIONS)}")
    found["activation"] = _ACTIVATIONS[found["activation"]]
    if kind == "gptj" and not found["rotary_width"]:
        raise _refused(file, "rotary_dim", settings.get("rotary_dim"), "a number")
    if kind == "gpt_neox":
        parallel = settings.get("use_parallel_residual", True)
        found["residual"] = "parallel" if parallel else "sequential"
    if kind == "opt" and settings.get("word_embed_proj_dim", found["width"]) != found["width"]:
        raise _refused(file, "word_embed_proj_dim", settings["word_embed_proj_dim"], "hidden_size")
    if found.get("rotary") == "halves":
        found |= _rotation(kind, settings, found, file)
    found |= _window(kind, settings, found["layers"], file)
    return explicit(DecoderConfig(**found, context=found["positions"]))


def settings_of(config: DecoderConfig) -> Settings:
    """Settings of a model, for the first `model_type` that fits.

    Raises:
      ValueError: If none fits.
    """
    wanted = dataclasses.replace(explicit(config), context=explicit(config).positions)
    for kind in FORMS:
        settings = _written(kind, wanted)
        try:
            if _as_wanted(decoder_of(settings)) == _as_wanted(wanted):
                return settings
        except ValueError:
            continue
    raise ValueError(
        f"no model_type of {', '.join(FORMS)} computes {config}; it has no Hugging Face form."
    )


def explicit(config: DecoderConfig) -> DecoderConfig:
    """The same model with explicit sizes in place of 0."""
    return dataclasses.replace(
        config,
        mlp=config.mlp or 4 * config.width,
        kv_heads=config.kv_heads or config.heads,
        head_width=config.head_size,
        positions=config.positions or config.context,
        rotary_width=0 if config.rotary == "none" else config.rotated,
    )


def require_same(config: DecoderConfig, other: DecoderConfig, folder: str) -> None:
    """Raises a ValueError that names the fields in which a run's model and the folder's differ."""
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"start_from={folder!r} is a Hugging Face folder, and the model a "
            f"{type(config).__name__}; write model=Pretrained()."
        )
    ours, theirs = (dataclasses.asdict(_as_wanted(explicit(c))) for c in (config, other))
    wrong = [name for name in ours if ours[name] != theirs[name]]
    if wrong:
        told = "; ".join(f"model.{n}={ours[n]}, there {theirs[n]}" for n in wrong)
        raise ValueError(
            f"the model does not fit start_from={folder!r}: {told}. Write model=Pretrained(), "
            "which takes all of them from that folder."
        )


def _as_wanted(config: DecoderConfig) -> DecoderConfig:
    defaults = {name: getattr(DecoderConfig(), name) for name in _FREE if name != "context"}
    return dataclasses.replace(config, context=1, **defaults)


def _rotation(kind: str, settings: Settings, found: Settings, file: str) -> Settings:
    """Rotary embeddings, in the format of transformers 5 and of earlier versions."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    base = rope.get("rope_theta", settings.get("rope_theta", settings.get("rotary_emb_base", 1e4)))
    share = 0.25 if kind == "gpt_neox" else 1.0
    for place in (settings.get("rotary_pct"), settings.get("partial_rotary_factor")):
        share = share if place is None else place
    share = rope.get("partial_rotary_factor", share)
    head = found.get("head_width") or found["width"] // found["heads"]
    rotation = {"rotary_base": float(base), "rotary_width": int(head * share)}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    if scaled == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        old = rope.get("original_max_position_embeddings", found["positions"])
        values = (*(rope[name] for name in names), old)
        return rotation | {"rotary_scaling": tuple(map(float, values))}
    if scaled != "default":
        raise _refused(file, "rope_type", scaled, "default or llama3")
    return rotation


def _window(kind: str, settings: Settings, layers: int, file: str) -> Settings:
    """The sliding window, which all layers or no layers must have."""
    window = settings.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind in ("qwen2", "qwen3"):
        # Qwen's layers have a window from max_window_layers on; earlier ones see all tokens.
        first = settings.get("max_window_layers", 28)
        used = settings.get("use_sliding_window", False) and window is not None
        kinds = ["full_attention"] * (min(first, layers) if used else layers)
        kinds += ["sliding_attention"] * (layers - len(kinds))
    else:
        kinds = [f"{'full' if window is None else 'sliding'}_attention"] * layers
        used = window is not None and kind == "mistral"
    kinds = settings.get("layer_types") or kinds
    if len(set(kinds)) > 1 or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise _refused(file, "layer_types", sorted(set(kinds)), "layers that are all alike")
    return {"window": window if used and kinds[0] == "sliding_attention" else 0}


def _written(kind: str, config: DecoderConfig) -> Settings:
    """The settings of a model, as far as the kind's fields can express it."""
    form, theirs = FORMS[kind], {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    settings = {"model_type": kind, "architectures": [form.architecture]} | form.only
    settings |= {name: getattr(config, field) for field, (name, _) in form.sizes.items()}
    name, _ = form.sizes["activation"]
    settings[name] = theirs[config.activation]
    if form.always.get("rotary") == "halves":
        share = config.rotated / config.head_size
        settings |= {"rope_theta": config.rotary_base, "rope_scaling": None}
        if config.rotary_scaling is not None:
            names = ("factor", "low_freq_factor", "high_freq_factor")
            scaling = dict(zip(names, config.rotary_scaling, strict=False))
            old = math.floor(config.rotary_scaling[3])
            settings["rope_scaling"] = scaling | {
                "rope_type": "llama3",
                "original_max_position_embeddings": old,
            }
        if kind == "gpt_neox":
            settings |= {"rotary_pct": share, "rotary_emb_base": config.rotary_base}
    if kind == "opt":
        settings["word_embed_proj_dim"] = config.width
    if kind == "gpt_neox":
        settings["use_parallel_residual"] = config.residual == "parallel"
    if kind == "mistral":
        settings["sliding_window"] = config.window or None
    if kind in ("qwen2", "qwen3"):
        of_window = {"sliding_window": config.window or None, "max_window_layers": 0}
        settings |= {"use_sliding_window": bool(config.window)} | of_window
    return settings


def _refused(file: str, name: str, got: Any, needed: str) -> ValueError:
    return ValueError(
        f"{file} has {name}={got!r}, which the decoder does not compute; it needs {needed}."
    )
