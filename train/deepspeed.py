"""Turns a DeepSpeed configuration with a 1-bit optimizer into a config file of this program.

    python -m train.deepspeed ds_config.json --steps 125000 > configs/mine.py

What has no counterpart is named in comments of that file; docs/from_deepspeed.md has all keys.
"""

import argparse
import json
import pathlib
import sys
from typing import Any, NamedTuple

from train.processes.exits import clean_exits

OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam")
DROPPED = {
    # key: why it has no counterpart
    "amsgrad": "DeepSpeed refuses it too",
    "bias_correction": "DeepSpeed reads it and never uses it; write bias_correction=True for it",
    "comm_backend_name": "XLA takes gloo between CPUs and NCCL between GPUs",
    "communication_data_type": "the compressor says what travels",
    "cuda_aware": "XLA takes care of it",
    "eps_inside_sqrt": "eps is outside, as in DeepSpeed's default",
    "exp_avg_mask": "not needed: rows without a gradient stay where they are",
    "fp16": 'bfloat16 needs no loss scale; model.dtype="bfloat16" is set',
    "max_grad_norm": "DeepSpeed refuses it too; gradient_clipping is the one that counts",
    "prescale_gradients": "gradients are averaged in float32",
    "total_num_steps": "it is --steps",
    "torch_autocast": 'see model.dtype="bfloat16"',
    "train_micro_batch_size_per_gpu": "data.batch is of all replicas: it times their number",
    "wall_clock_breakdown": "every row of metrics.jsonl has step_seconds",
    "warmup_min_lr": "the warm-up begins at 0",
    "warmup_type": "the warm-up is linear",
    "zero_allow_untrusted_optimizer": "there is no ZeRO to allow it for",
}


class Translation(NamedTuple):
    """What a DeepSpeed configuration says, in the words of `train.config.Config`."""

    optimizer: dict[str, Any]  # fields of Optimizer
    data: dict[str, Any]  # of Data
    model: dict[str, Any]  # of GPTConfig
    run: dict[str, Any]  # of Config
    notes: list[str]  # a line for each key that has no counterpart


def translate(config: dict[str, Any], steps: int) -> Translation:
    """Translates a configuration key by key.

    Args:
      config: What the JSON file holds.
      steps: Of the whole run, which DeepSpeed's file does not say.

    Returns:
      The fields to set, and a note for every key that is not among them, or means less here.

    Raises:
      ValueError: For an optimizer that is not one of `OPTIMIZERS`, a schedule that is not of the
        learning rate's warm-up, ZeRO, batch sizes that contradict each other, or "auto".
    """
    _check(config)
    config = {key: value for key, value in config.items() if value is not None}
    config.pop("zero_optimization", None)
    optimizer = config.pop("optimizer")
    kind, params = optimizer["type"], dict(optimizer.get("params", {}))
    scheduled, unused = _schedule(config.pop("scheduler", {}))
    rate = scheduled.pop("rate", params.get("lr", 1e-3))  # as DeepSpeed: the schedule's wins
    params.pop("lr", None)
    decays = kind == "ZeroOneAdam" and params.get("weight_decay", 0.0) > 0
    update = _update(kind, params)
    if clipping := config.pop("gradient_clipping", 0.0):
        update = f"chain(jaxcomp.clip_by_global_norm({clipping!r}), {update})"
    run, data = _sizes(config)
    half = any(config.pop(name, {}).get("enabled") for name in ("bf16", "bfloat16"))
    if config.get("fp16", {}).get("enabled"):
        half = True
    else:
        config.pop("fp16", None)
    if "steps_per_print" in config:
        run["log_every"] = int(config.pop("steps_per_print"))
    left = {**config, **params, **unused}
    notes = [f"{key}: {DROPPED.get(key, 'not known, left out')}" for key in sorted(left)]
    if decays:
        notes.append(
            "what weight_decay does by way of DeepSpeed's momentum, which multiplies it: see "
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
    """Refuses what is not translated."""
    if not isinstance(config, dict):
        raise ValueError(f"the file holds {config!r:.40}; needs an object, as DeepSpeed's have.")
    if '"auto"' in json.dumps(config):
        raise ValueError('"auto" stands for what Hugging Face fills in; write the values.')
    kind = (config.get("optimizer") or {}).get("type")
    if kind not in OPTIMIZERS:
        raise ValueError(
            f"optimizer.type is {kind!r}; needs one of {', '.join(OPTIMIZERS)}. OneBitLamb is "
            "jaxcomp.one_bit_lamb, whose page has its keys; any other is optax's, behind "
            "jaxcomp.compressed_mean or as it is."
        )
    if stage := (config.get("zero_optimization") or {}).get("stage", 0):
        raise ValueError(
            f"zero_optimization.stage is {stage}; 1-bit optimizers keep whole parameters on every "
            "replica, in DeepSpeed as here. Write stage 0."
        )


def _update(kind: str, params: dict[str, Any]) -> str:
    """The optimizer as an expression; takes out of `params` what it has used."""
    b1, b2 = params.pop("betas", (0.9, 0.999))
    common = f"b1={b1!r}, b2={b2!r}, eps={params.pop('eps', 1e-8)!r}, bias_correction=False"
    common += f", weight_decay={params.pop('weight_decay', 0.0)!r}"
    if kind == "OneBitAdam":
        freeze = params.pop("freeze_step", 100_000)
        return f"one_bit_adam(learning_rate, axis_name, freeze_step={freeze}, {common})"
    freeze = params.pop("var_freeze_step", 100_000)
    kappa = params.pop("var_update_scaler", 16)
    every, longest = params.pop("local_step_scaler", 32_678), params.pop("local_step_clipper", 16)
    # Intervals double by counts of steps there: as if the rate halved then.
    halves = f"exponential_decay(1.0, {every}, 0.5, {freeze})"
    return (
        f"zero_one_adam(learning_rate, axis_name, variance_at=schedules.growing({kappa}, "
        f"until={freeze}), sync_at=schedules.halving({halves}, steps, longest={longest}, "
        f"after={freeze}), {common})"
    )


def _schedule(scheduler: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of Optimizer, `rate` among them if the schedule has one; and what it does not use."""
    kind, params = scheduler.get("type"), dict(scheduler.get("params", {}))
    if kind is None:
        return {"schedule": "constant"}, {}
    if kind not in ("WarmupLR", "WarmupDecayLR"):
        raise ValueError(
            f"scheduler.type is {kind!r}; what is translated is WarmupLR and WarmupDecayLR. Leave "
            "it out, and write optimizer.schedule by hand."
        )
    decays = {"schedule": "linear", "final_fraction": 0.0}
    rate = {"rate": params.pop("warmup_max_lr")} if "warmup_max_lr" in params else {}
    form = decays if kind == "WarmupDecayLR" else {"schedule": "constant"}
    return {"warmup_steps": params.pop("warmup_num_steps", 1000), **form, **rate}, params


def _sizes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of Config and Data; takes out of `config` what it has used."""
    batch = config.pop("train_batch_size", None)
    micro = config.pop("train_micro_batch_size_per_gpu", None)
    accumulate = config.pop("gradient_accumulation_steps", 1)
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
    return run, {} if batch is None else {"batch": batch}


def to_python(found: Translation, name: str) -> str:
    """Writes a translation as a config file."""
    kinds = {"optimizer": "Optimizer", "data": "Data", "model": "GPTConfig"}
    fields = [f"{field}={kind}(**{getattr(found, field)!r})," for field, kind in kinds.items()]
    lines = [
        '"""Translated from a DeepSpeed configuration."""',
        "",
        *(f"# left out: {note}" for note in found.notes),
        "from train.config import Config, Data, Optimizer",
        "from train.models.gpt import GPTConfig",
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=pathlib.Path, help="DeepSpeed's JSON")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of the run")
    options = parser.parse_args(args)
    found = translate(json.loads(options.file.read_text()), options.steps)
    print(to_python(found, options.file.stem), end="")


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
