"""One JAX host of benchmarks.fine_tune_network: fine-tunes on request, and measures the time.

One process with several devices acts as all hosts at once, without a network.
"""

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxcomp
from benchmarks import commands, slow_network_worker
from jaxcomp.launch import distributed
from train import resume
from train.config import Config, Data, Optimizer
from train.config.run import AXIS_NAME
from train.huggingface.pretrained import Pretrained
from train.models import lora as loras
from train.placement import devices
from train.task import make_task

RANK = 8
"""The rank of LoRA's matrices, if these are trained."""


def config_of(
    update: str,
    learning_rate: float,
    *,
    model: str,
    text: str,
    cache: str,
    steps: int,
    seed: int,
    replicas: int,
    sequences: int,
    context: int = 128,
    lora: bool = False,
) -> Config:
    """The run that is timed.

    Args:
      update: The optimizer, as `optimizer.update` of a config.
      learning_rate: Its peak, after a tenth of the steps.
      model: The Hugging Face folder that it begins with.
      text: The text that it learns.
      cache: Folder for the text's tokens.
      steps: Of the whole run.
      seed: Of the order of the data.
      replicas: Hosts.
      sequences: Of one host and step.
      context: Tokens of a sequence.
      lora: Whether LoRA's matrices are trained, and nothing else.
    """
    return Config(
        name="fine_tune_network",
        steps=steps,
        seed=seed,
        replicas=replicas,
        eval_batches=8,
        start_from=model,
        trainable=loras.TRAINED if lora else None,
        optimizer=Optimizer(
            update=update,
            learning_rate=learning_rate,
            warmup_steps=steps // 10,
            schedule="linear",
            final_fraction=0.0,
        ),
        model=Pretrained(context, "float32", scan=False, remat=False, lora=RANK if lora else 0),
        data=Data(path=text, cache=cache, batch=replicas * sequences),
    )


def functions(replicas: int) -> dict[str, Callable[..., Any]]:
    """What the benchmark calls: `build` a run, `begin` it, `train` some steps, `evaluate`."""
    built: dict[str, Any] = {}

    def build(**run: Any) -> dict:
        built.clear()
        built["task"] = task = make_task(config_of(replicas=replicas, **run))
        parts = jaxcomp.report.sent_bytes_by_part(task.programs, task.mesh, AXIS_NAME)
        built["parts"] = parts
        return {"trained": _trained(task), "sent_bytes_per_step": task.sent_bytes}

    def begin() -> None:
        nothing = pathlib.Path(tempfile.gettempdir(), "no", "checkpoints")
        built["params"], built["state"], _ = resume.begin(built["task"], nothing)
        built["step"] = 0

    def train(steps: int) -> dict:
        """The seconds of each step, without making its batch, and the bytes it sent."""
        task, seconds, sent = built["task"], [], []
        for _ in range(steps):
            before = slow_network_worker.rounds(built["state"])
            batch = jax.block_until_ready(task.batch(built["step"]))
            start = time.perf_counter()
            result = task.step(built["params"], built["state"], batch)
            built["params"], built["state"], _ = jax.block_until_ready(result)
            seconds.append(time.perf_counter() - start)
            built["step"] += 1
            after = slow_network_worker.rounds(built["state"])
            sent.append(slow_network_worker.report_bytes(built["parts"], 1, before, after))
        return {"seconds": seconds, "sent_bytes": sent}

    def evaluate() -> float:
        """The loss on held-out text, as of a run; after the last step of what is deployed."""
        task, given = built["task"], (built["params"], built["state"])
        if built["step"] == task.config.steps:
            given = task.deployed(*given)[:1]
        return task.evaluate(*given)["loss"]

    return {"build": build, "begin": begin, "train": train, "evaluate": evaluate}


def _trained(task) -> int:
    leaves = jax.tree.leaves(loras.only(task.natural) if task.config.trainable else task.natural)
    return sum(leaf.size for leaf in leaves)


def main() -> None:
    """Connects to the other hosts, then answers calls from standard input."""
    args = commands.place(__doc__)
    cluster = distributed.Cluster(args.coordinator, args.num_processes, args.process_id, "")
    distributed.connect(cluster, args.interface)
    slow_network_worker.share_compilations()
    devices.start(args.num_processes, args.num_processes)
    jax.devices()  # Waits for all hosts.
    commands.serve(**functions(args.num_processes))


if __name__ == "__main__":
    main()
