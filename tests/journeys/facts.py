"""What a reader of each page has, puts in the place of its placeholders, and cannot run here."""

import atexit
import contextlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.studies import islands
from tests.helpers import page_inputs
from tests.helpers.snippets import ROOT
from tests.journeys import engine


class Page(NamedTuple):
    """A page whose commands are typed one after the other."""

    inputs: tuple[Callable[[pathlib.Path], object], ...] = ()  # what makes them in the checkout
    instead: dict[str, str] = {}  # placeholder -> what a reader writes
    harm: dict[str, engine.Harm] = {}  # comment or last words of a command -> what happens to it
    environ: dict[str, str] = {}  # last words of a command -> variables of the hosts
    quickly: bool = True  # whether its programs are compiled as those of tests


# Of this process alone: two of them may type commands with one port.
_NETWORK = "127.{}.{}".format(*divmod(os.getpid() % 60_000, 250))


def is_named(command: engine.Command, end: str) -> bool:
    """Whether `harm` or `environ` means a command."""
    return command.comment == end or command.text.endswith(end)


def written(page: str, text: str) -> str:
    """A command with what a reader writes in the place of the page's placeholders."""
    for word, typed in PAGES[page].instead.items():
        text = text.replace(word, typed)
    return text


def hosts(folder: pathlib.Path) -> None:
    """Writes a list of two hosts, which are this machine."""
    (folder / "hosts.txt").write_text(f"{_NETWORK}.1\n{_NETWORK}.2\n")


def nnx_loop(folder: pathlib.Path) -> None:
    """Writes the program of a page, which begins with its name."""
    page = (ROOT / "docs" / "many_hosts.md").read_text()
    (folder / "nnx_loop.py").write_text(
        re.search(r'```python\n("""nnx_loop\.py""".*?)```', page, re.S)[1]
    )


def bucket(folder: pathlib.Path) -> None:
    """Serves the bucket `runs`, until this process ends."""
    served = contextlib.ExitStack()
    atexit.register(served.close)
    (folder / "bucket").mkdir()
    served.enter_context(islands.served(islands.WEED, f"{_NETWORK}.3", folder / "bucket"))


_KEYS = islands.KEYS | {"AWS_ENDPOINT_URL": f"http://{_NETWORK}.3:{islands.PORT}"}
_IN_BUCKET = " ".join(f"{name}={value}" for name, value in _KEYS.items())


def deepspeed(folder: pathlib.Path) -> None:
    """Writes a configuration of DeepSpeed, for four processes."""
    params = {"lr": 1e-3, "weight_decay": 0.01, "var_freeze_step": 1000}
    optimizer = {"type": "ZeroOneAdam", "params": params}
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16}
    (folder / "ds_config.json").write_text(json.dumps(batch | {"optimizer": optimizer}))


_CONFIG = {" CONFIG": " configs/nano_4bit.py"}
_WHERE = f"--coordinator {_NETWORK}.1:29411 --num-processes 2 --process-id $i"
_EACH = {
    "--coordinator 10.0.0.1:29411 --num-processes 4 --process-id 0": _WHERE,
    "--coordinator ...": _WHERE,
}
_STOPPED = "Ctrl-C or SIGTERM saves and ends"

PAGES = {
    "README.md": Page((hosts,), quickly=False),
    "docs/quick_start.md": Page((page_inputs.text,), {"FOLDER": "text"}),
    "docs/checkpoints.md": Page(
        (hosts,), _CONFIG, {_STOPPED: engine.ctrl_c, "--emergency-every 5": engine.kill_one}
    ),
    "docs/many_hosts.md": Page(
        (hosts, nnx_loop), _EACH | _CONFIG, {"--checkpoint-every 50": engine.kill_one}
    ),
    "docs/fine_tune.md": Page(
        (hosts, page_inputs.text, page_inputs.pythia),
        environ={"--fast 8": "JAX_NUM_CPU_DEVICES=8"},
    ),
    "docs/islands.md": Page(  # tests/islands has a run in a folder
        (bucket,),
        {"file:///tmp/islands/run": "s3://runs/run"},
        environ={f"--name {name}": _IN_BUCKET for name in ("garage", "attic", "club")},
    ),
    "docs/data.md": Page((page_inputs.every_form,)),
    "docs/from_deepspeed.md": Page((deepspeed,)),
}
"""In the order in which they are read."""

_PLAN = "times all methods for minutes: tests/train/plan/test_planning.py"
_SCHEDULER = "needs a scheduler: tests/launch/test_scripts.py runs the script with a stand-in"
_WANDB = "needs wandb and its server: tests/train/output/test_trackers.py has a stand-in"
_ADAPTER = "needs a run with LoRA: tests/train/huggingface/test_adapters.py writes and merges one"

ELSEWHERE = {
    "make test": "these tests are a part of it",
    "make demo": "docs/quick_start.md types it with a link",
    "tensorboard --logdir runs": "needs tensorboard, a server that never ends",
    "pip install -e '.[wandb]'": _WANDB,
    "python -m train configs/nano_4bit.py --wandb": _WANDB,
    "WANDB_MODE=offline python -m train configs/nano_4bit.py --wandb": _WANDB,
    "python -m train configs/nano_dense.py --plan --measure": _PLAN,
    "python -m train.launch --hosts hosts.txt -- configs/nano_dense.py --plan --measure": _PLAN,
    "sbatch jaxcomp/launch/slurm.sbatch -- python -m train configs/nano_4bit.py": _SCHEDULER,
    'MPIRUN="mpirun -np 4 --hostfile hosts" bash jaxcomp/launch/mpirun.sh --coordinator '
    "node1:29411 -- python -m train configs/nano_4bit.py": _SCHEDULER,
    "kubectl apply -f jaxcomp/launch/jobset.yaml": _SCHEDULER,
    "python -m train configs/nano_dense.py --plan --link-rate 500e6 --link-latency 1e-3 "
    "--compute-seconds 0.5 --codec-rate 2e9": _PLAN,
    "python -m train.launch --local 8 --restarts 99 -- CONFIG --checkpoint-every 50 "
    "--emergency-every 5": "make soak types it",
    "python -m train.export runs/lora adapter --adapter": _ADAPTER,
    "python -m train.export adapter merged --like FOLDER": _ADAPTER,
    "hf download EleutherAI/pythia-160m --local-dir pythia-160m": (
        "downloads a model: the journey has a smaller one of its kind there"
    ),
}
"""Commands of any page that its journey does not type, each with the reason."""
