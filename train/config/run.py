"""The configuration of a run: dataclasses, config files, overrides from the command line."""

import dataclasses
import difflib
import importlib.util
import math
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Literal

import optax
import tyro

from jaxcomp.islands.runs import require_name
from train import checks
from train.config import expression
from train.config.optimizer import Optimizer, transformation
from train.data.sources import Data, Images
from train.huggingface.pretrained import Pretrained, tokenizer_of
from train.models import lora, objectives
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig
from train.models.swin import SwinConfig
from train.models.vit import ViTConfig

AXIS_NAME = "replica"
"""Name of the mesh axis of the replicas, which every compressed message crosses."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. A run depends only on this and on the data that it reads."""

    name: str
    """Run directory below runs_dir."""
    steps: int
    """Optimizer steps to train for."""
    optimizer: Optimizer
    seed: int = 0
    """Seed, in [0, 2^32), of the initial parameters and the order of the data."""
    objective: Literal["next_token", "masked", "classify"] = "next_token"
    """What the model learns: the next byte, as GPT; hidden bytes, as BERT (vocab 257); or an
    image's class."""
    replicas: int = 4
    """Data-parallel replicas; 0: all devices. On CPU the program makes that many devices."""
    accumulate: int = 1
    """Microbatches of one optimizer step; their mean gradient is exchanged once."""
    overlap: bool = False
    """Overlap the exchange with the gradient, for methods that can, such as cocktail_sgd; on
    CPU."""
    per_layer: bool = True
    """Whether the update sees the layers of a scanned model (`model.scan`) one by one. False
    compiles faster, and makes no difference for one code for all parameters with an optimizer that
    works entry by entry, such as cocktail_sgd with adamw."""
    trainable: str | None = None
    """Pattern of the paths of parameters that are trained and exchanged, such as `lora_[ab]$` or
    `bias$`; the others do not change. None: all parameters."""
    qsdp: str | None = None
    """Sharded parameters, such as `qsdp(axis_name, quantize(8, block=1024))`; None: not sharded."""
    fast: int = 1
    """Number of replicas with fast links between them, such as those of a host; each sends a share,
    and together they send as much as one. With qsdp write `qsdp(axis_name,
    fast_axis=fast_axis)`."""
    in_shards: bool = False
    """Whether the `fast` devices of a host are one replica: a decoder's rules shard each parameter
    over them, and XLA gathers it for each use. For large models."""
    island: str | None = None
    """URL of a run of islands that this run joins by its name, such as s3://bucket/run: programs
    that train one model over a bucket or folder, and come and go."""
    join: str = "join(every=100, delay=1)"
    """How it joins: arguments of jaxcomp.islands.join, equal on all islands but for every."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    eval_batches: int = 8
    """Validation batches of data.batch sequences in one evaluation; all targets count alike."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step is always saved."""
    emergency_every: int = 0
    """Steps between copies of the state on each process's own disk and on a neighbour's, so that a
    lost host costs few steps; 0: no copies."""
    emergency_dir: str = "/dev/shm"
    """Folder of these copies, local to each host: a disk, or memory like the default."""
    checksum_every: int = 50
    """Steps between comparisons of the replicas' parameters."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    runs_dir: str = "runs"
    """Folder of all runs."""
    start_from: str | None = None
    """Folder of another run, such as runs/nano_dense, or a Hugging Face folder, whose parameters
    this run starts from, for fine-tuning; the optimizer starts fresh, and so does the head for
    another number of classes. None: random parameters."""
    resume: bool = True
    """Continue from the run directory's last checkpoint, if there is one."""
    accept_data: bool = False
    """Whether to continue if the data has changed since the checkpoint, which is an error
    otherwise. The position in the data is kept."""
    resize: Literal["keep_mean", "reset"] = "keep_mean"
    """What replicas keep when a run resumes with another number of them: the mean of their own
    states, or the same with error feedback's residuals set to zero."""
    watchdog_seconds: int = 300
    """Seconds for one step after which a run counts as hung and ends."""
    start_seconds: int = 1800
    """The same for the start with compilation, an evaluation, or a save."""
    save_seconds: int = 300
    """Seconds to wait for the other processes' parts of a checkpoint."""
    tensorboard: bool = False
    """Also write TensorBoard events; needs pip install -e '.[tensorboard]'."""
    wandb: bool = False
    """Also log to Weights & Biases; needs pip install -e '.[wandb]'. WANDB_MODE=offline writes only
    to the run's folder, for `wandb sync`."""
    link_rate: float | None = None
    """Rate in bit/s of a replica's link, to report the time saved at the end of a run."""
    # The config file chooses one type; the command line changes its fields.
    model: DecoderConfig | ResNetConfig | ViTConfig | SwinConfig | Pretrained = dataclasses.field(
        default_factory=DecoderConfig
    )
    data: Data | Images = dataclasses.field(default_factory=Data)

    def __post_init__(self):
        checks.require_types(self)
        parts = pathlib.PurePath(self.name).parts
        if not parts or ".." in parts or pathlib.PurePath(self.name).is_absolute():
            raise ValueError(f"name={self.name!r} must be a folder below runs_dir; write run_1.")
        if not self.name.isprintable():
            raise ValueError(f"name={self.name!r} must be one printable line; write run_1.")
        if self.island is not None:  # before data and compilation
            require_name(self.name)
        sizes = "steps fast accumulate eval_batches watchdog_seconds start_seconds save_seconds"
        periods = "eval_every checkpoint_every checksum_every log_every"
        checks.at_least(1, self, *sizes.split(), *periods.split())
        checks.at_least(0, self, "replicas", "emergency_every")
        if self.link_rate is not None and not 0 < self.link_rate < math.inf:
            raise ValueError(f"link_rate={self.link_rate} must be positive; write 500e6.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in [0, 2^32); write --seed 0.")
        if isinstance(self.model, Pretrained):
            if self.start_from is None:  # the command line may still set it
                return
            object.__setattr__(self, "model", self.model.decoder_of(self.start_from))
            if isinstance(self.data, Data) and self.data.tokenizer is None:
                its = tokenizer_of(self.start_from, self.model.vocab)
                object.__setattr__(self, "data", dataclasses.replace(self.data, tokenizer=its))
        objectives.check(self.objective, self.model, self.data)
        if getattr(self.model, "lora", 0) and self.trainable is None:
            raise ValueError(
                f"model.lora={self.model.lora} adds matrices to train instead of the others; "
                f"write --trainable '{lora.TRAINED}'."
            )
        try:
            re.compile(self.trainable or "")
        except re.error as error:
            raise ValueError(
                f"trainable={self.trainable!r} is no regular expression: {error}; write a part of "
                "a parameter's path, such as 'bias$'."
            ) from error
        if self.in_shards and (self.fast < 2 or self.qsdp is not None or self.overlap):
            raise ValueError(
                "in_shards=True needs several devices per host, and neither qsdp nor overlap; got "
                f"fast={self.fast}, qsdp={self.qsdp!r}, overlap={self.overlap}. Write --fast 8."
            )
        if self.optimizer.warmup_steps >= self.steps:  # so that --steps 60 alone is a run
            fits = max(self.steps // 10, min(1, self.steps - 1))
            optimizer = dataclasses.replace(self.optimizer, warmup_steps=fits)
            object.__setattr__(self, "optimizer", optimizer)
        try:
            expression.check(self.join, dict.fromkeys(("join", "Seconds", "Tokens")))
        except ValueError as error:
            raise ValueError(f"join: {error}") from error
        if self.replicas:
            microbatch(self.data.batch, self.replicas, self.accumulate)


def microbatch(batch: int, num_replicas: int, accumulate: int) -> int:
    """The number of sequences of one replica in one microbatch.

    Raises:
      ValueError: If the batch does not divide evenly.
    """
    parts = num_replicas * accumulate
    if batch % parts:
        raise ValueError(
            f"data.batch={batch} must be divisible by {num_replicas} replicas x "
            f"accumulate={accumulate} = {parts}; write --data.batch "
            f"{parts * math.ceil(batch / parts)}."
        )
    return batch // parts


def load(path: str, args: Sequence[str] = ()) -> Config:
    """Runs `get_config()` of a Python file and applies command-line overrides to the result.

    Args:
      path: The file, such as `configs/nano_dense.py`.
      args: Overrides, such as `["--steps", "200", "--optimizer.learning-rate", "3e-4"]`.

    Returns:
      The resolved configuration.

    Raises:
      ValueError: If there is no such file, or it has no `get_config` that returns a `Config`.
      SystemExit: After `--help`, and for an unknown key or a wrong value, with a message on stderr.
    """
    file = pathlib.Path(path)
    if file.suffix != ".py" or not file.is_file():
        folders = file.parent, file.parent / "shapes"
        known = sorted(str(other) for folder in folders for other in folder.glob("[!_]*.py"))
        near = difflib.get_close_matches(str(file), known, n=3) or known
        raise ValueError(f"{path!r} is no config file; write one of {near or ['configs/NAME.py']}.")
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for the names in its annotations
    beside = str(file.parent.absolute())  # where the file finds modules, as with `python FILE`
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
        default = module.get_config() if hasattr(module, "get_config") else None
    except Exception as error:  # of any kind: the file is a user's program
        where = f"{path!r}{_line_in(spec.origin, error)}"
        known = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{where}: {known}{str(error).rstrip('.')}.") from error
    finally:
        sys.path.remove(beside)
    if not isinstance(default, Config):
        raise ValueError(
            f"{path!r} has no get_config() that returns a train.config.Config; "
            f"write def get_config(): return Config(...)."
        )
    config = tyro.cli(
        Config,
        default=default,
        args=list(args),
        prog=f"python -m train {path}",
        description=module.__doc__,
        config=(tyro.conf.AvoidSubcommands,),
    )
    if isinstance(config.model, Pretrained):
        raise ValueError(f"{path} needs a pretrained model; write --start-from FOLDER with one.")
    return config


def _line_in(file: str, error: Exception) -> str:
    """The line of a file at which it raised an error, perhaps in a function that it called."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""


def update(config: Config) -> optax.GradientTransformationExtraArgs:
    """Makes the optax transformation of `optimizer.update`.

    Raises:
      ValueError: If a call in it does not accept its arguments, or it is not a transformation.
    """
    return transformation(config.optimizer, AXIS_NAME, config.steps)
