"""Converts config.json to a `DecoderConfig` and back; raises for unsupported models."""

import dataclasses
import math
import pathlib
import typing

from train import checks
from train.huggingface.attention import agreed, refused, rotation, window
from train.huggingface.forms import FORMS, Form, Settings
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
_MOST_LAYERS, _MOST = 10_000, 2**31 - 1
_NEVER = ("quantization_config", "num_local_experts", "num_experts", "parallel_lm_logits")
_FREE = ("context", "dtype", "scan", "remat", "lora", "lora_alpha")  # a run chooses them


def read(folder: str | pathlib.Path) -> tuple[str, DecoderConfig]:
    """The `model_type` of a folder's config.json, and its model.

    Raises:
      ValueError: If the file is missing, or has a setting that the decoder does not support.
    """
    file = pathlib.Path(folder, "config.json")
    settings = checks.json_object(file, model_type=str)
    return settings["model_type"], decoder_of(settings, str(file))


def decoder_of(settings: Settings, file: str = "config.json") -> DecoderConfig:
    """The model of these settings, with every size explicit; `context` is the maximum.

    Raises:
      ValueError: For unsupported settings, by name.
    """
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FORMS:
        raise refused(file, "model_type", kind, f"one of {', '.join(FORMS)}")
    form = FORMS[kind]
    for name in _NEVER:
        if settings.get(name):
            raise refused(file, name, settings[name], "a model without it")
    for name, needed in form.only.items():
        if settings.get(name, needed) != needed:
            raise refused(file, name, settings[name], f"{needed!r}")
    found = form.always | _sizes(form, settings, file)
    if kind == "gptj" and not found["rotary_width"]:
        raise refused(file, "rotary_dim", settings.get("rotary_dim"), "a number")
    if kind == "gpt_neox":
        parallel = agreed(file, bool, {"use_parallel_residual": settings}, True)
        found["residual"] = "parallel" if parallel else "sequential"
    if kind == "opt" and settings.get("word_embed_proj_dim", found["width"]) != found["width"]:
        raise refused(file, "word_embed_proj_dim", settings["word_embed_proj_dim"], "hidden_size")
    if found.get("rotary") == "halves":
        head = found.get("head_width") or found["width"] // found["heads"]
        found |= rotation(kind, settings, head, found["positions"], file)
    found |= window(kind, settings, found["layers"], file)
    try:
        return explicit(DecoderConfig(**found, context=found["positions"]))
    except ValueError as error:
        raise ValueError(f"{file} is of a model that cannot be: {error}") from error


def _sizes(form: Form, settings: Settings, file: str) -> Settings:
    """DecoderConfig's fields that are one field of config.json."""
    kinds, found = typing.get_type_hints(DecoderConfig), {}
    for field, (name, default) in form.sizes.items():
        kind = str if field == "activation" else kinds[field]
        spellings = {name: settings} | dict.fromkeys(form.also.get(name, ()), settings)
        # null is not what a missing field is: a head_dim of null is the width by heads.
        missing = None if name in settings and settings[name] is None else default
        value = agreed(file, kind, spellings, missing)
        if kind is int and not 0 <= (value := value or 0) <= _MOST:
            raise refused(file, name, value, f"at most {_MOST}")
        found[field] = value
    if not 1 <= found["layers"] <= _MOST_LAYERS:
        name, _ = form.sizes["layers"]
        raise refused(file, name, found["layers"], f"1 to {_MOST_LAYERS}")
    if found["activation"] not in _ACTIVATIONS:
        raise refused(file, "activation", found["activation"], f"one of {', '.join(_ACTIVATIONS)}")
    found["activation"] = _ACTIVATIONS[found["activation"]]
    if not found["heads"]:
        raise refused(file, form.sizes["heads"][0], 0, "at least 1")
    return found


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
        unlike = "; ".join(f"model.{n}={ours[n]}, there {theirs[n]}" for n in wrong)
        raise ValueError(
            f"the model does not fit start_from={folder!r}: {unlike}. Write model=Pretrained(), "
            "which takes all of them from that folder."
        )


def _as_wanted(config: DecoderConfig) -> DecoderConfig:
    defaults = {name: getattr(DecoderConfig(), name) for name in _FREE if name != "context"}
    return dataclasses.replace(config, context=1, **defaults)


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
        sliding = {"sliding_window": config.window or None, "max_window_layers": 0}
        settings |= {"use_sliding_window": bool(config.window)} | sliding
    return settings
