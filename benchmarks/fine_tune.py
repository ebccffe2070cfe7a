"""Memory, bytes and predicted step times of fine-tuning existing models.

    python -m benchmarks.fine_tune hosts configs/shapes/opt_1_3b_cocktail.py ...
    python -m benchmarks.fine_tune lora

`hosts` compiles each config's step for four hosts of eight H100, without needing them, with Python
3.12 and `pip install '.[train,accelerators]'`. `lora` compiles steps for CPUs, and reports their
bytes. Rows are written to results/fine_tune.json; nothing runs.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import jax

from benchmarks import accelerators_messages, accelerators_row
from benchmarks import accelerators_roofline as roofline
from benchmarks import rows as rows_file
from benchmarks.accelerators_devices import DEVICES, mesh_of
from benchmarks.accelerators_program import Program
from benchmarks.accelerators_row import compile_step
from benchmarks.accelerators_step import abstract_step
from jaxcomp import report
from train.config import run as configs
from train.config.run import AXIS_NAME
from train.models import lora
from train.placement import build
from train.placement.devices import FAST_AXIS

RESULTS = pathlib.Path(__file__).parent / "results" / "fine_tune.json"
DEVICE, HOSTS = "h100", (4, 8)
RATES = {name: roofline.RATES[name] for name in ("100mbit", "500mbit", "1gbit", "10gbit")}
_AGAIN = 8 / 6
"""Matrix products of a gradient with rematerialized blocks, relative to a plain one."""

LORA_RANK = 8
LORA = {
    # all parameters, or LoRA's: the update
    "all, CocktailSGD": "cocktail_sgd(adamw(learning_rate), axis_name)",
    "LoRA, dense": "chain(compressed_mean(identity(), axis_name), adamw(learning_rate))",
    "LoRA, 4 bits": "chain(compressed_mean(quantize(4), axis_name), adamw(learning_rate))",
    "LoRA, CocktailSGD": "cocktail_sgd(adamw(learning_rate), axis_name)",
}


def on_hosts(path: str) -> dict:
    """A row of `hosts`: what one step of a config needs on an H100, and its predicted seconds."""
    began, config, mesh = time.perf_counter(), configs.load(path), mesh_of(DEVICE, HOSTS)
    built = abstract_step(config, mesh)
    compiled, numel = compile_step(built), built.numel
    program = Program(compiled.as_text())
    crossing = [
        m
        for m in accelerators_messages.messages(program, mesh)
        if m.axes == ("?",) or AXIS_NAME in m.axes
    ]
    tokens = config.data.batch * config.model.context
    of_token = 6 * numel + 12 * config.model.layers * config.model.width * config.model.context
    sent = {axis: report.sent_bytes(compiled, mesh, axis) for axis in mesh.axis_names}
    overlap = accelerators_messages.overlap(program, crossing)
    work = roofline.Work(
        flops=of_token * tokens / mesh.size * (_AGAIN if config.model.remat else 1),
        moved=program.cost.moved,
        kernels=program.cost.kernels,
        fast_bytes=sent[FAST_AXIS],
        nic_bytes=sent[AXIS_NAME] * HOSTS[1],
        beside=overlap.beside,
        asynchronous=overlap.bytes_asynchronous,
    )
    kind = DEVICES[DEVICE]
    seconds = {name: roofline.predicted_seconds(kind, work, rate) for name, rate in RATES.items()}
    dense = work._replace(nic_bytes=2 * 2 * numel * (HOSTS[0] - 1) / HOSTS[0])
    dense = dense._replace(beside=1.0, asynchronous=1.0)
    of_dense = {n: roofline.predicted_seconds(kind, dense, rate) for n, rate in RATES.items()}
    return {
        "config": config.name,
        "device": DEVICE,
        "hosts": "x".join(map(str, HOSTS)),
        "parameters": numel,
        "tokens": tokens,
        "memory": accelerators_row.memory(compiled),
        "work": work._asdict(),
        "predicted": seconds | {"unlimited": roofline.local_seconds(kind, work)},
        "predicted_dense_float16": of_dense,
        "compile_seconds": time.perf_counter() - began,
        "jax": jax.__version__,
    }


def of_lora(path: str, replicas: int = 4) -> list[dict]:
    """The rows of `lora`: the bytes that one replica sends per step, for a config's model."""
    config = configs.load(path)
    found = []
    for name, update in LORA.items():
        thin = name.startswith("LoRA")
        one = dataclasses.replace(
            config,
            replicas=replicas,
            fast=1,
            in_shards=False,
            accumulate=1,
            data=dataclasses.replace(config.data, batch=replicas),
            optimizer=dataclasses.replace(config.optimizer, update=update),
            model=dataclasses.replace(config.model, lora=LORA_RANK if thin else 0),
            trainable=lora.TRAINED if thin else None,
        )
        mesh = jax.make_mesh((replicas,), (AXIS_NAME,), axis_types=(jax.sharding.AxisType.Auto,))
        compiled = compile_step(abstract_step(one, mesh))
        shapes = build.param_shapes(one)
        trained = lora.only(shapes) if thin else shapes
        numel = sum(x.size for x in jax.tree.leaves(trained))
        sent = report.sent_bytes(compiled, mesh, AXIS_NAME)
        row = {"config": config.name, "method": name, "replicas": replicas, "trained": numel}
        found.append(row | {"sent_bytes": sent, "jax": jax.__version__})
        print(json.dumps(found[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["hosts", "lora"])
    parser.add_argument("configs", nargs="*", default=["configs/shapes/opt_1_3b_cocktail.py"])
    args = parser.parse_args()
    if args.what == "lora":
        jax.config.update("jax_num_cpu_devices", 4)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for path in args.configs:
        made = of_lora(path) if args.what == "lora" else [on_hosts(path)]
        keys = [(row["config"], row.get("method")) for row in made]
        kept = [row for row in kept if (row["config"], row.get("method")) not in keys] + made
        rows_file.write(RESULTS, kept)
        print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
