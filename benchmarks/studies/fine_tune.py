"""Memory, bytes and predicted step times of fine-tuning existing models.

    python -m benchmarks.studies.fine_tune hosts configs/shapes/opt_1_3b_cocktail.py ...
    python -m benchmarks.studies.fine_tune lora
    python -m benchmarks.studies.fine_tune texts FOLDER

`hosts` compiles each config's step for four hosts of eight H100, without needing them, with Python
3.12 and `pip install '.[train,accelerators]'`. `lora` compiles steps for CPUs, and reports their
bytes. Rows are written to results/fine_tune.json; nothing runs.

`texts` makes the inputs of fine_tune_network. FOLDER/tokenizer becomes a byte-pair code of 2,048
tokens, of the source of Python's standard library, tests included; FOLDER/man the machine's English
manual pages of sections 5, 7 and 8.
"""

import argparse
import dataclasses
import gzip
import json
import pathlib
import sysconfig
import time
from collections.abc import Iterator

import jax

from benchmarks import accelerators_devices as roofline
from benchmarks import rows as rows_file
from benchmarks.accelerators_devices import DEVICES, mesh_of
from benchmarks.accelerators_program import Program, overlap
from benchmarks.accelerators_step import abstract_step, between_hosts, compile_step, memory
from benchmarks.scale_sizes import write_tokenizer
from jaxcomp import report
from train.config import run as configs
from train.config.run import AXIS_NAME
from train.models import lora
from train.placement import build
from train.placement.devices import FAST_AXIS

RESULTS = rows_file.RESULTS / "fine_tune.json"
DEVICE, HOSTS = "h100", (4, 8)
RATES = {name: roofline.RATES[name] for name in ("100mbit", "500mbit", "1gbit", "10gbit")}
_AGAIN = 8 / 6
"""Matrix products of a gradient with rematerialized blocks, relative to a plain one."""

VOCAB = 2048
MANUALS, SECTIONS = pathlib.Path("/usr/share/man"), "578"
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
    tokens = config.data.batch * config.model.context
    of_token = 6 * numel + 12 * config.model.layers * config.model.width * config.model.context
    sent = {axis: report.sent_bytes(compiled, mesh, axis) for axis in mesh.axis_names}
    hidden = overlap(program, between_hosts(program, mesh))
    work = roofline.Work(
        flops=of_token * tokens / mesh.size * (_AGAIN if config.model.remat else 1),
        moved=program.cost.moved,
        kernels=program.cost.kernels,
        fast_bytes=sent[FAST_AXIS],
        nic_bytes=sent[AXIS_NAME] * HOSTS[1],
        beside=hidden.beside,
        asynchronous=hidden.bytes_asynchronous,
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
        "memory": memory(compiled),
        "work": work._asdict(),
        "predicted": seconds | {"unlimited": roofline.local_seconds(kind, work)},
        "predicted_dense_float16": of_dense,
        "compile_seconds": time.perf_counter() - began,
        "jax": jax.__version__,
    }


def of_lora(path: str) -> list[dict]:
    """The rows of `lora`: the bytes that one replica sends per step, for a config's model."""
    config, replicas = configs.load(path), 4
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


def python_texts() -> Iterator[str]:
    """The files of Python's standard library that are UTF-8."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            yield file.read_text("utf-8")
        except UnicodeDecodeError:
            continue


def write_manuals(folder: pathlib.Path) -> int:
    """Unpacks manual pages, except references to other pages; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for file in sorted(MANUALS.glob(f"man[{SECTIONS}]/*")):
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        if not content.startswith(b".so "):
            (folder / f"{file.name.removesuffix('.gz')}.txt").write_bytes(content)
            total += len(content)
    return total


def write_texts(folder: pathlib.Path) -> None:
    """Makes a tokenizer of one text, and another text in a folder."""
    write_tokenizer(folder / "tokenizer", python_texts(), VOCAB)
    print(f"{write_manuals(folder / 'man'):,} bytes of manual pages in {folder / 'man'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["hosts", "lora", "texts"])
    default = ["configs/shapes/opt_1_3b_cocktail.py"]
    parser.add_argument("paths", nargs="*", default=default, help="configs, or a folder for texts")
    args = parser.parse_args()
    if args.what == "texts":
        return write_texts(pathlib.Path(*args.paths))
    if args.what == "lora":
        jax.config.update("jax_num_cpu_devices", 4)
    kept = rows_file.read(RESULTS)
    for path in args.paths:
        made = of_lora(path) if args.what == "lora" else [on_hosts(path)]
        keys = [(row["config"], row.get("method")) for row in made]
        kept = [row for row in kept if (row["config"], row.get("method")) not in keys] + made
        rows_file.write(RESULTS, kept)
        print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
