"""Converts config.json to a `DecoderConfig` and back; raises for unsupported models.

`FORMS` has the supported kinds of models. Rotary embeddings and windows have several spellings, of
which those of all versions of transformers are read.
"""

import dataclasses
import math
import pathlib
import typing
from typing import Any, NamedTuple

from train import checks
from train.models.decoder import DecoderConfig

Settings = dict[str, Any]  # of config.json


class Form(NamedTuple):
    """A `model_type`: the meaning of its fields, and its requirements.

    Attributes:
      architecture: The class of transformers that loads it.
      sizes: DecoderConfig's field -> config.json's field and its default.
      always: DecoderConfig's fields that all models of the kind share.
      only: Fields of config.json with the only values that the decoder supports.
      also: Other names of fields of config.json, which transformers takes as well.
    """

    architecture: str
    sizes: dict[str, tuple[str, Any]]
    always: Settings
    only: Settings
    also: dict[str, tuple[str, ...]] = {}


_GPT = {
    "layers": ("n_layer", 12),
    "width": ("n_embd", 768),
    "heads": ("n_head", 12),
    "positions": ("n_positions", 1024),
    "vocab": ("vocab_size", 50257),
    "mlp": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
}
_GPT_ALSO = {
    "n_layer": ("num_hidden_layers",),
    "n_embd": ("hidden_size",),
    "n_head": ("num_attention_heads",),
    "n_positions": ("max_position_embeddings",),
}
_OPT = {
    "layers": ("num_hidden_layers", 12),
    "width": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "positions": ("max_position_embeddings", 2048),
    "vocab": ("vocab_size", 50272),
    "mlp": ("ffn_dim", 3072),
    "activation": ("activation_function", "relu"),
    "tied": ("tie_word_embeddings", True),
}
_NEOX = {
    "layers": ("num_hidden_layers", 44),
    "width": ("hidden_size", 6144),
    "heads": ("num_attention_heads", 64),
    "positions": ("max_position_embeddings", 2048),
    "vocab": ("vocab_size", 50432),
    "mlp": ("intermediate_size", 24576),
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "tied": ("tie_word_embeddings", False),
    "qkv_bias": ("attention_bias", True),
    "out_bias": ("attention_bias", True),
}
_LLAMA = {
    "layers": ("num_hidden_layers", 32),
    "width": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", None),
    "head_width": ("head_dim", None),
    "positions": ("max_position_embeddings", 2048),
    "vocab": ("vocab_size", 32000),
    "mlp": ("intermediate_size", 11008),
    "activation": ("hidden_act", "silu"),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
}
_BIASES = {name: ("attention_bias", False) for name in ("qkv_bias", "out_bias")}
_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_LLAMA_FORM = {"norm": "rms", "gated": True, "rotary": "halves"}
_MISTRAL = {"mlp": ("intermediate_size", 14336), "kv_heads": ("num_key_value_heads", 8)}
_MISTRAL |= {"positions": ("max_position_embeddings", 131072)}
_QWEN = {"vocab": ("vocab_size", 151936), "mlp": ("intermediate_size", 22016)}
_QWEN |= {"kv_heads": ("num_key_value_heads", 32), "positions": ("max_position_embeddings", 32768)}

FORMS: dict[str, Form] = {
    "gpt2": Form(
        "GPT2LMHeadModel",
        _GPT | {"tied": ("tie_word_embeddings", True)},
        {},
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        _GPT_ALSO,
    ),
    "opt": Form(
        "OPTForCausalLM",
        _OPT,
        {"first_position": 2, "norm_eps": 1e-5},
        {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "gptj": Form(
        "GPTJForCausalLM",
        _GPT
        | {"layers": ("n_layer", 28), "width": ("n_embd", 4096), "heads": ("n_head", 16)}
        | {"vocab": ("vocab_size", 50400), "positions": ("n_positions", 2048)}
        | {"rotary_width": ("rotary_dim", 64)},
        {"residual": "shared", "rotary": "pairs", "qkv_bias": False, "out_bias": False}
        | {"tied": False, "head_bias": True},
        {"tie_word_embeddings": False},
        _GPT_ALSO,
    ),
    "gpt_neox": Form("GPTNeoXForCausalLM", _NEOX, {"rotary": "halves"}, {}),
    "llama": Form(
        "LlamaForCausalLM",
        _LLAMA | _BIASES | {"mlp_bias": ("mlp_bias", False)},
        _LLAMA_FORM,
        {},
    ),
    "mistral": Form("MistralForCausalLM", _LLAMA | _MISTRAL, _LLAMA_FORM | _NO_BIAS, {}),
    "qwen2": Form(
        "Qwen2ForCausalLM", _LLAMA | _QWEN, _LLAMA_FORM | _NO_BIAS | {"qkv_bias": True}, {}
    ),
    "qwen3": Form(
        "Qwen3ForCausalLM",
        _LLAMA | _QWEN | _BIASES | {"head_width": ("head_dim", 128)},
        _LLAMA_FORM | {"qk_norm": True, "mlp_bias": False},
        {},
    ),
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")  # of rotary embeddings
_ROPE = {"rope_type": str, "type": str} | dict.fromkeys(
    ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *_LLAMA3), float
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
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
_FREE = ("context", "dtype", "scan", "stacks", "remat", "lora", "lora_alpha")  # a run chooses them


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
            *scaling, old = config.rotary_scaling
            settings["rope_scaling"] = dict(zip(_LLAMA3, scaling, strict=True)) | {
                "rope_type": "llama3",
                "original_max_position_embeddings": math.floor(old),
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
    scaling = {name: setting(name, None) for name in _LLAMA3}
    old = setting("original_max_position_embeddings", positions, "original_max_position_embeddings")
    scaled = setting("rope_type", "default")
    if scaled == "llama3":
        for name, value in scaling.items():
            if value is None:
                raise refused(file, name, None, "a number, as rope_type is llama3")
        return found | {"rotary_scaling": (*map(float, scaling.values()), float(old))}
    if scaled != "default":
        raise refused(file, "rope_type", scaled, "default or llama3")
    if scaling["factor"] not in (None, 1):
        raise refused(file, "factor", scaling["factor"], "a rope_type that uses it")
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
    if has_window and "sliding_window" not in settings:
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
