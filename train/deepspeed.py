"""Turns a DeepSpeed configuration with a 1-bit optimizer into a config file of this program.

    python -m train.deepspeed ds_config.json --steps 125000 > configs/mine.py

Comments in that file name the keys without a counterpart; docs/from_deepspeed.md has all keys.
"""

import argparse
import json
import math
import pathlib
import sys
from typing import Any, NamedTuple

from jaxcomp.launch.exits import clean_exits
from train import checks

OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam")
DROPPED = {
    # key: why it has no counterpart
    "amsgrad": "DeepSpeed refuses it too",
    "bias_correction": "DeepSpeed reads it and never uses it; leave out deviations=... for it",
    "comm_backend_name": "XLA takes gloo between CPUs and NCCL between GPUs",
    "communication_data_type": "the compressor decides what is sent",
    "cuda_aware": "XLA takes care of it",
    "eps_inside_sqrt": "eps is outside, as in DeepSpeed's default",
    "exp_avg_mask": "not needed: rows without a gradient stay where they are",
    "fp16": 'bfloat16 needs no loss scale; model.dtype="bfloat16" is set',
    "max_grad_norm": "DeepSpeed refuses it too; gradient_clipping is the one that counts",
    "prescale_gradients": "gradients are averaged in float32",
    "total_num_steps": "it is --steps",
    "torch_autocast": 'see model.dtype="bfloat16"',
    "train_micro_batch_size_per_gpu": "data.batch is that of all replicas together",
    "wall_clock_breakdown": "every row of metrics.jsonl has step_seconds",
    "warmup_min_lr": "the warm-up begins at 0",
    "warmup_type": "the warm-up is linear, and DeepSpeed's is logarithmic unless told otherwise",
    "zero_allow_untrusted_optimizer": "there is no ZeRO to allow it for",
}


class Translation(NamedTuple):
    """A DeepSpeed configuration as fields of `train.config.Config`."""

    optimizer: dict[str, Any]  # fields of Optimizer
    data: dict[str, Any]  # of Data
    model: dict[str, Any]  # of DecoderConfig
    run: dict[str, Any]  # of Config
    notes: list[str]  # a line for each key that has no counterpart


def translate(config: dict[str, Any], steps: int) -> Translation:
    """Translates a configuration key by key.

    Args:
      config: The contents of the JSON file.
      steps: Steps of the whole run, which DeepSpeed's file does not have.

    Returns:
      The fields to set, and a note for every key that is dropped or means less here. Only numbers
      of the file get into the fields, and only quoted key names into the notes.

    Raises:
      ValueError: For an optimizer that is not one of `OPTIMIZERS`, a schedule that is not a warm-up
        of the learning rate, ZeRO, batch sizes that contradict each other, "auto", or a value that
        should be a number and is not.
    """
    _check(config)
    config = {key: value for key, value in config.items() if value is not None}
    config.pop("zero_optimization", None)
    optimizer = config.pop("optimizer")
    kind, params = optimizer["type"], _object(optimizer, "params")
    scheduled, unused = _schedule(_object(config, "scheduler"))
    config.pop("scheduler", None)
    own_rate = _number(params, "lr", 1e-3)
    rate = scheduled.pop("rate", own_rate)  # as in DeepSpeed, the schedule's wins
    decay = _number(params, "weight_decay", 0.0)
    update = _update(kind, params, decay)
    if clipping := _number(config, "gradient_clipping", 0.0):
        update = f"chain(jaxcomp.clip_by_global_norm({clipping!r}), {update})"
    run, data = _sizes(config)
    half = any(_object(config, name).get("enabled") for name in ("bf16", "bfloat16", "fp16"))
    if not _object(config, "fp16").get("enabled"):
        config.pop("fp16", None)
    for name in ("bf16", "bfloat16"):
        config.pop(name, None)
    if "steps_per_print" in config:
        run["log_every"] = _whole(config, "steps_per_print", 1)
    left = {**config, **params, **unused}
    notes = [f"{_quoted(key)}: {DROPPED.get(key, 'not known, left out')}" for key in sorted(left)]
    if kind == "ZeroOneAdam" and decay > 0:
        notes.append(
            "the effect of weight_decay through DeepSpeed's momentum, which multiplies it: see "
            "docs/methods/zero_one_adam.md"
        )
    return Translation(
        {"update": update, "learning_rate": rate, **scheduled},
        data,
        {"dtype": "bfloat16"} if half else {},
        {"steps": steps, **run},
        notes,
    )


def _check(config: Any) -> None:
    """Raises a ValueError for what cannot be translated."""
    if not isinstance(config, dict):
        raise ValueError(f"the file holds {config!r:.40}; needs an object, as DeepSpeed's have.")
    if '"auto"' in json.dumps(config):
        raise ValueError('"auto" stands for what Hugging Face fills in; write the values.')
    kind = _object(config, "optimizer").get("type")
    if kind not in OPTIMIZERS:
        raise ValueError(
            f"optimizer.type is {kind!r:.40}; needs one of {', '.join(OPTIMIZERS)}. OneBitLamb is "
            "jaxcomp.one_bit_lamb, whose page has its keys; any other is optax's, after "
            "jaxcomp.compressed_mean or as it is."
        )
    if stage := _object(config, "zero_optimization").get("stage", 0):
        raise ValueError(
            f"zero_optimization.stage is {stage!r:.40}; 1-bit optimizers keep whole parameters on "
            "every replica, in DeepSpeed as here. Write stage 0."
        )


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object of a key; an empty one if there is none."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{_quoted(key)} is {value!r:.40}; needs an object.")
    return dict(value or {})


def _number(config: dict[str, Any], key: str, default: float) -> float:
    """Takes a number out of an object, or `default`; nothing else may reach the config's code."""
    value = config.pop(key, None)
    value = default if value is None else value
    # No comparison with NaN is true.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"{_quoted(key)} is {value!r:.40}; needs a finite number.")
    return value


def _whole(config: dict[str, Any], key: str, default: int) -> int:
    """Takes a whole number, which may be written as 1e5, out of an object."""
    value = _number(config, key, default)
    if value != math.floor(value):
        raise ValueError(f"{_quoted(key)} is {value!r:.40}; needs a whole number.")
    return int(value)


def _quoted(key: str) -> str:
    """A key as one line of text."""
    return key if key.isidentifier() and key.isascii() else json.dumps(key)


def _update(kind: str, params: dict[str, Any], decay: float) -> str:
    """The optimizer as an expression; removes what it uses from `params`."""
    betas = params.pop("betas", None) or (0.9, 0.999)
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r:.40}; needs two numbers.")
    b1, b2 = (_number({"betas": beta}, "betas", 0.9) for beta in betas)
    common = f"b1={b1!r}, b2={b2!r}, eps={_number(params, 'eps', 1e-8)!r}, "
    common += f"deviations=Deviations(bias_correction=False), weight_decay={decay!r}"
    if kind == "OneBitAdam":
        freeze = _whole(params, "freeze_step", 100_000)
        return f"one_bit_adam(learning_rate, axis_name, freeze_step={freeze}, {common})"
    freeze = _whole(params, "var_freeze_step", 100_000)
    kappa = _whole(params, "var_update_scaler", 16)
    every = _whole(params, "local_step_scaler", 32_678)
    longest = _whole(params, "local_step_clipper", 16)
    # DeepSpeed doubles intervals after a number of steps: as if the rate halved then.
    halves = f"exponential_decay(1.0, {every}, 0.5, {freeze})"
    return (
        f"zero_one_adam(learning_rate, axis_name, variance_at=schedules.growing({kappa}, "
        f"until={freeze}), sync_at=schedules.halving({halves}, steps, longest={longest}, "
        f"after={freeze}), {common})"
    )


def _schedule(scheduler: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of Optimizer, with `rate` if the schedule has one; and the unused rest."""
    kind, params = scheduler.get("type"), _object(scheduler, "params")
    if kind is None:
        return {"schedule": "constant"}, {}
    if kind not in ("WarmupLR", "WarmupDecayLR"):
        raise ValueError(
            f"scheduler.type is {kind!r:.40}; what is translated is WarmupLR and WarmupDecayLR. "
            "Leave it out, and write optimizer.schedule by hand."
        )
    decays = {"schedule": "linear", "final_fraction": 0.0}
    if kind == "WarmupDecayLR":  # whose default replaces the optimizer's rate
        params.setdefault("warmup_max_lr", 1e-3)
    if params.setdefault("warmup_type", "log") == "linear":
        del params["warmup_type"]  # nothing to note
    rate = {"rate": _number(params, "warmup_max_lr", 1e-3)} if "warmup_max_lr" in params else {}
    form = decays if kind == "WarmupDecayLR" else {"schedule": "constant"}
    return {"warmup_steps": _whole(params, "warmup_num_steps", 1000), **form, **rate}, params


def _sizes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of Config and Data; removes what it uses from `config`."""
    batch = _whole(config, "train_batch_size", 0)
    micro = _whole(config, "train_micro_batch_size_per_gpu", 0)
    accumulate = _whole(config, "gradient_accumulation_steps", 1)
    if min(batch, micro) < 0 or accumulate < 1:
        raise ValueError("batch sizes and gradient_accumulation_steps need to be at least 1.")
    run = {"accumulate": accumulate}
    if batch and micro:
        if batch % (micro * accumulate):
            raise ValueError(
                f"train_batch_size is {batch}, no multiple of {micro} x {accumulate} sequences of "
                "one GPU's step; DeepSpeed refuses it too."
            )
        run["replicas"] = batch // (micro * accumulate)
    elif micro:
        config["train_micro_batch_size_per_gpu"] = micro  # for a note
    return run, {"batch": batch} if batch else {}


def to_python(found: Translation, name: str) -> str:
    """Writes a translation as a config file."""
    kinds = {"optimizer": "Optimizer", "data": "Data", "model": "DecoderConfig"}
    fields = [f"{field}={kind}(**{getattr(found, field)!r})," for field, kind in kinds.items()]
    lines = [
        '"""Translated from a DeepSpeed configuration."""',
        "",
        *(f"# left out: {note}" for note in found.notes),
        "from train.config import Config, Data, Optimizer",
        "from train.models.decoder import DecoderConfig",
        "",
        "",
        "def get_config() -> Config:",
        "    return Config(",
        *(f"        {field}" for field in [f"name={name!r},", f"**{found.run!r},", *fields]),
        "    )",
    ]
    return "\n".join(lines) + "\n"


def main(args: list[str]) -> None:
    """Prints the config file."""
    parser = argparse.ArgumentParser(
        prog="python -m train.deepspeed",
        description="Turns a DeepSpeed configuration into a config file.",
    )
    parser.add_argument("file", type=pathlib.Path, help="DeepSpeed's JSON")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of the run")
    options = parser.parse_args(args)
    try:
        config = checks.json_value(checks.read_file(options.file))
    except ValueError as error:
        raise ValueError(f"{options.file} is no configuration: {error}.") from error
    found = translate(config, options.steps)
    print(to_python(found, options.file.stem), end="")


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
