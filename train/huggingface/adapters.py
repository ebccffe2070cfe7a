"""LoRA as peft keeps it: an adapter_model.safetensors and an adapter_config.json.

Names and layouts are those of peft 0.21: `base_model.model.MODULE.lora_A.weight`, [rank, inputs],
and `lora_B.weight`, [outputs, rank], for each matrix of the Hugging Face model.
"""

import json
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np

from train import checks
from train.huggingface import folder, safetensors, settings, weights
from train.models import lora
from train.models.decoder import DecoderConfig

_MODEL, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_NEVER = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
_NEVER += ("trainable_token_indices", "lora_bias", "alora_invocation_tokens", "layer_replication")
_DRAWN = (True, False, "gaussian", "eva", "orthogonal")
"""First values of LoRA that leave the base as it is; PiSSA and others take a part out of it."""


def save(to: pathlib.Path, config: DecoderConfig, params: Any, base: pathlib.Path) -> None:
    """Writes LoRA's matrices as an adapter of the Hugging Face folder `base`.

    Where q, k and v are one matrix here and three there, all three have the same `lora_A`.

    Args:
      to: A new folder, or an empty one.
      config: The run's model, with LoRA.
      params: Its parameters.
      base: The folder that the run started from.

    Raises:
      ValueError: If `to` is not new, the model has no LoRA, or `base` is of another model.
    """
    folder.require_new(to)
    kind, there = settings.read(base)
    settings.require_same(config, there, str(base))
    if not config.lora:
        raise ValueError("the run has no LoRA to write; train it with --model.lora 8.")
    arrays = dict(_theirs(kind, config, params))
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in arrays}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": kind == "gpt2",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    with folder.whole(to) as made:
        safetensors.write(made / _MODEL, arrays)
        (made / _CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")


def is_adapter(path: str | pathlib.Path) -> bool:
    """Whether a folder is of an adapter."""
    return pathlib.Path(path, _CONFIG).is_file()


def require_none(path: str | pathlib.Path) -> None:
    """Raises a ValueError if a folder is of an adapter, which has to be added to its base first."""
    if is_adapter(path):
        about = checks.json_object(pathlib.Path(path, _CONFIG))
        base = about.get("base_model_name_or_path") or "a folder"
        command = shlex.join(
            ["python", "-m", "train.export", str(path), "FOLDER", "--like", "BASE"]
        )
        raise ValueError(
            f"{str(path)!r} is an adapter of {base}; write {command}, where BASE is the folder of "
            "that model, and take FOLDER."
        )


def merge(adapter: pathlib.Path, to: pathlib.Path, dtype: Any, base: pathlib.Path) -> None:
    """Writes the folder `base` with an adapter added to its matrices, in float32, then in `dtype`.

    Args:
      adapter: The adapter's folder, of peft or of `save`. q, k and v may differ in their `lora_A`.
      to: A new folder, or an empty one.
      dtype: Dtype of the files: float32, bfloat16 or float16.
      base: The Hugging Face folder that the adapter is of.

    Raises:
      ValueError: If `to` is not new, or the adapter is damaged, of another model, or of a kind that
        is more than a product of two matrices.
    """
    folder.require_new(to)
    file = adapter / _CONFIG
    about = checks.json_object(file, peft_type=str, r=int, lora_alpha=int | float)
    strange = [name for name in _NEVER if about.get(name)]
    if about.get("init_lora_weights", True) not in _DRAWN:
        strange.append("init_lora_weights")
    if about["peft_type"] != "LORA" or about.get("bias", "none") != "none" or strange:
        raise ValueError(
            f"{file} has {', '.join(strange) or 'another peft_type or bias'}; only plain LoRA is "
            "read: merge it with peft's merge_and_unload."
        )
    added = dict(safetensors.read(adapter / _MODEL))
    scale, kind = about["lora_alpha"] / about["r"], settings.read(base)[0]
    arrays = safetensors.read_all(base)
    modules = {key.removeprefix(_PREFIX).partition(".lora_")[0] for key in added}
    places = {folder.named(arrays, f"{module}.weight", kind): module for module in modules}

    def changed(name: str, array: np.ndarray) -> np.ndarray:
        module = places.get(name)
        parts = [added.pop(f"{_PREFIX}{module}.lora_{x}.weight", None) for x in "AB"]
        if all(part is None for part in parts):
            return array
        if any(part is None for part in parts):
            raise ValueError(f"{adapter} has one of two matrices of {module}; download it again.")
        a, b = (part.astype(np.float32) for part in parts)
        delta = scale * (b @ a)
        delta = delta.T if kind == "gpt2" else delta  # GPT-2's have inputs first
        if delta.shape != array.shape:
            raise ValueError(f"{adapter} is of another model: {module} is {array.shape} there.")
        return array.astype(np.float32) + delta

    with np.errstate(over="ignore"):  # `folder.write` looks for infinities
        made = {
            name: changed(name, array).astype(dtype)
            for name, array in arrays.items()
            if not weights.NOT_READ.search(name)  # masks, some as large as float32 can be
        }
    if added:
        raise ValueError(f"{base} has no matrix for {min(added)!r} of {adapter}; name its base.")
    about = checks.json_object(base / "config.json")
    folder.write(to, made.items(), about, np.dtype(dtype), base)


def _theirs(kind: str, config: DecoderConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, layer, array in folder.each_layer(lora.only(params), np.float32):
        module, _, which = path.rpartition("/")
        kernel = f"{module}/kernel"
        names = weights.names_of(kind, kernel, layer)
        if which == "lora_a":
            parts = [array.T] * len(names)
        else:
            parts = weights.parted(kind, kernel, config, array)
            parts = [part.T for part in parts] if kind == "gpt2" else parts
        letter = which[-1].upper()
        for name, part in zip(names, parts, strict=True):
            name = name.removesuffix(".weight")
            yield f"{_PREFIX}{name}.lora_{letter}.weight", np.ascontiguousarray(part)
