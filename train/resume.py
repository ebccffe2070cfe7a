"""Where a run begins: at its first step, or at a checkpoint, on any number of replicas."""

import dataclasses
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

import jaxcomp
from jaxcomp.launch import agree, distributed
from jaxcomp.launch.copies import Copies
from jaxcomp.launch.exits import say
from jaxcomp.launch.holders import Found
from jaxcomp.replicas.resize import reset_residuals
from train import checks
from train.checkpoints import emergency, files, mean, store, trees
from train.config import Config
from train.config.facts import by_name, to_json
from train.config.run import AXIS_NAME
from train.huggingface import adapters, folder, safetensors
from train.models import lora
from train.placement import build
from train.task import Task

_METADATA: dict[str, Any] = {  # needed to resume
    "progress": dict[str, Any],
    "num_replicas": int,
    "data_sha256": str,
    "config": dict[str, Any],
}
_PRINTED_ELSEWHERE = {"replicas", "resize", "accept_data"}
_READ_WITH = "model.", "objective", "data.tokenizer"  # settings that give parameters their meaning

_COUNTS = "step examples sent_bytes dense_bytes rounds skipped left_out"  # never below 0


@dataclasses.dataclass
class Progress:
    """The counts of a run so far; saved in the checkpoint's metadata."""

    step: int = 0  # optimizer steps done, skipped ones included
    examples: int = 0  # read by these steps: the position in the data
    sent_bytes: float = 0.0  # by one replica, since the first step
    dense_bytes: float = 0.0  # that it would have sent without codes
    rounds: int = 0  # steps in which anything was sent
    # How often each part of the exchange was sent, if steps differ.
    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped: int = 0  # steps whose update was not finite
    left_out: int = 0  # steps that single replicas skipped, because their update was not
    # Losses since the last row, so that a stop between two rows does not change the next.
    losses: list = dataclasses.field(default_factory=list)  # f32, also NaN

    def __post_init__(self):
        checks.require_types(self, "progress.")
        checks.at_least(0, self, *_COUNTS.split(), prefix="progress.")
        if not all(isinstance(loss, float) for loss in self.losses):
            raise ValueError(f"progress.losses={self.losses!r:.80} must be a list of numbers.")


def begin(task: Task, directory: Path, copies: Copies | None = None) -> tuple[Any, Any, Progress]:
    """Finds where a run begins: at its first step, or at its last checkpoint.

    Process 0 looks for the checkpoint; all processes get the same answer.

    Args:
      task: The run.
      directory: Directory of its checkpoints.
      copies: Emergency copies; preferred unless a checkpoint is newer.

    Returns:
      Parameters, state and counts.

    Raises:
      ValueError: If a checkpoint does not fit the run or must not be resumed, or if all are
        damaged. Damaged ones are skipped.
    """
    step = agree.from_first(lambda: files.latest(directory))
    found = None
    if copies is not None and task.config.resume:
        found = _from_copies(task, directory, step, copies)
    if found is None:
        found = _begin(task, directory, step)
        if copies is not None:
            copies.begin(found[2].step, None)
    _require_equal(task, found[0])
    return found


def _require_equal(task: Task, params: Any) -> None:
    """Raises a ValueError if processes begin with parameters of different bits."""
    if jax.process_count() > 1 and task.placement.replica_spread is not None:
        if difference := int(task.placement.replica_spread(params, task.mesh)):
            raise ValueError(
                f"the processes begin with different parameters (their checksums differ by "
                f"{difference}): start_from={task.config.start_from!r} or the last checkpoint is "
                "not the same on all hosts. Copy the same files to all."
            )


def _begin(task: Task, directory: Path, step: int | None) -> tuple[Any, Any, Progress]:
    if step is None:
        return *_first(task), Progress()
    if not task.config.resume:
        raise ValueError(
            f"{directory} has a checkpoint of step {step}, which --no-resume would overwrite; "
            "write --resume, give another --name, or remove that folder."
        )
    if damages := agree.from_first(lambda: files.pass_over_damaged(directory)):
        step = agree.from_first(lambda: files.latest(directory))
        _say(task.config.name, step, f"since {'; '.join(damages)}; it is kept as damaged-STEP")
    saved = store.choose(directory, step, "metadata")  # all of it is known to be intact
    load = lambda like: store.load(saved, like)
    return _restore(task, directory, step, saved.metadata, load)


def _from_copies(
    task: Task, directory: Path, step: int | None, copies: Copies
) -> tuple[Any, Any, Progress] | None:
    """The start from the newest emergency copies; None, with a message, if they are unusable."""
    found = copies.newest(step or 0)
    if not isinstance(found, Found):
        if found:
            _say(task.config.name, step or 0, f"without emergency copies: {found}")
        return None
    try:
        held = copies.fetch(found)
    except OSError as error:
        _say(task.config.name, step or 0, f"without emergency copies of step {found.step}: {error}")
        return None
    load = lambda like: emergency.load(held, like, f"{copies.folder}, copied at step {found.step}")
    began = _restore(task, directory, found.step, emergency.record_of(held), load)
    copies.begin(found.step, found)
    last = "there is no checkpoint" if step is None else f"the last checkpoint is step {step}"
    _say(task.config.name, found.step, f"with emergency copies; {last}")
    return began


def metadata(task: Task, done: Progress) -> dict[str, Any]:
    """The metadata of a checkpoint, for `begin`."""
    return {
        "progress": dataclasses.asdict(done),
        "num_replicas": task.mesh.size,
        "drifts": mean.drifts(task.like["state"]),
        "data_sha256": task.examples.record["sha256"],
        "config": json.loads(to_json(task.config)),
    }


def _first(task: Task) -> tuple[Any, Any]:
    """Parameters and state before the first step."""
    if task.config.start_from is None:
        return task.init()
    start_from = task.config.start_from
    agree.from_first(lambda: require_source(start_from))
    weights = lambda digest: distributed.require_same({f"weights in {start_from}": digest[:12]})
    if agree.from_first(lambda: folder.is_folder(start_from)):
        weights(safetensors.sampled(start_from))
        return task.init(_pretrained(task, start_from))
    saved = store.choose(Path(start_from, "checkpoints"))
    weights(files.digest(saved.path))
    rank = getattr(task.config.model, "lora", 0)
    if rank and not any(name.endswith("lora_a") for name in saved.leaves):
        command = shlex.join(["python", "-m", "train.export", start_from, "FOLDER"])
        raise ValueError(
            f"model.lora={rank} is added to a Hugging Face folder, but start_from={start_from!r} "
            f"is a run without LoRA; write {command}, and --start-from FOLDER."
        )
    params = _with_own_head(task, saved)
    changes = _changes(saved.metadata.get("config"), json.loads(to_json(task.config)))
    if changes := [change for change in changes if change.startswith(_READ_WITH)]:
        what = f"with the parameters of {start_from}, which had other settings"
        _say(task.config.name, 0, f"{what}: {'; '.join(changes)}")
    return task.init(jax.device_put(params, task.places))


def require_source(start_from: str) -> None:
    """Raises a ValueError unless a path is a Hugging Face folder, or a run with a checkpoint."""
    adapters.require_none(start_from)
    source = Path(start_from, "checkpoints")
    if not folder.is_folder(start_from) and files.latest(source) is None:
        raise ValueError(
            f"start_from is {start_from!r}, but there is no checkpoint in {source}, and it is no "
            "Hugging Face folder; train that run first, or write --start-from None."
        )


def _with_own_head(task: Task, saved: store.Saved) -> Any:
    """The parameters of another run, with a new head if that run had other classes, as in timm."""
    config, old = task.config, saved.metadata.get("config")
    model = old.get("model") if isinstance(old, dict) else None
    had = model.get("classes") if isinstance(model, dict) else None
    classes = getattr(config.model, "classes", None)
    if None in (had, classes) or had == classes:
        return mean.restore_whole(saved, task.natural, task.mesh)
    as_saved = dataclasses.replace(config, model=dataclasses.replace(config.model, classes=had))
    params = mean.restore_whole(saved, build.param_shapes(as_saved), task.mesh)
    drawn = jax.jit(lambda: build.random_params(config), out_shardings=task.places)()
    _say(config.name, 0, f"with a new head for {classes} classes: {config.start_from} has {had}")
    return jax.tree.map(lambda x, new: x if x.shape == new.shape else new, params, drawn)


def _pretrained(task: Task, path: str) -> Any:
    """The parameters of a Hugging Face folder, with new ones for LoRA."""
    config = task.config
    like = build.placed(task.natural, task.places)
    params = folder.load(path, config.model, lora.without(like))
    if not config.model.lora:
        return params
    places = lora.only(task.places)
    drawn = jax.jit(lambda: lora.only(build.random_params(config)), out_shardings=places)
    return lora.combined(params, drawn())


def _restore(
    task: Task, directory: Path, step: int, saved: dict[str, Any], load: Callable[[Any], Any]
) -> tuple[Any, Any, Progress]:
    """Reads parameters, state and counts of a checkpoint onto this run's replicas."""
    if missing := _METADATA.keys() - saved.keys():
        raise ValueError(
            f"the checkpoint {directory}/{step} is not of a run of this program: its metadata "
            f"lack {', '.join(sorted(missing))}. Give another --name or --runs-dir."
        )
    progress = _progress(f"{directory}/{step}", saved)
    name, old_data, data = task.config.name, saved["data_sha256"], task.examples.record["sha256"]
    if old_data != data:
        other = f"other data (sha256 {old_data[:12]}...) than this run reads ({data[:12]}...)"
        if not task.config.accept_data:
            raise ValueError(
                f"{directory} was trained on {other}; give the old data, or write --accept-data to "
                "go on with these, or another --name."
            )
        _say(name, step, f"accepts data that changed: it was trained on {other}")
    if step > task.config.steps:
        raise ValueError(
            f"{directory} was trained to step {step}, but steps={task.config.steps}; write more "
            "--steps, or give another --name."
        )
    settings = saved["config"]
    if task.config.qsdp is None:
        _require_same_cut(task.config, settings, directory)
    if changes := _changes(settings, json.loads(to_json(task.config))):
        is_done = step == task.config.steps
        how = "no step is left for other settings" if is_done else "with other settings"
        instead = "; write another --name, or more --steps" if is_done else ""
        _say(name, step, f"{how}: {'; '.join(changes)}{instead}")
    like, num_replicas = task.like, saved["num_replicas"]
    if num_replicas != task.mesh.size:
        like = _like_saved(task, num_replicas)
    tree = jaxcomp.resize(load(like), task.like)
    state, policy = tree["state"], task.config.resize
    if num_replicas != task.mesh.size:
        _say(name, step, f"{task.mesh.size} replicas instead of {num_replicas}, resize={policy}")
        state = reset_residuals(state) if policy == "reset" else state
    return tree["params"], state, progress


def _progress(path: str, saved: dict[str, Any]) -> Progress:
    """The counts in a checkpoint's metadata; also checks the rest of it."""
    checks.require_keys(saved, f"the checkpoint {path}, metadata", **_METADATA)
    done, names = saved["progress"], {field.name for field in dataclasses.fields(Progress)}
    if strange := done.keys() ^ names:
        raise ValueError(
            f"the checkpoint {path} and this version do not both count "
            f"{', '.join(sorted(strange))}; go on with the version that made it."
        )
    try:
        return Progress(**done)
    except ValueError as error:
        raise ValueError(f"the checkpoint {path} has metadata with {error}") from error


def _require_same_cut(config: Config, settings: dict[str, Any], directory: Path) -> None:
    """Raises a ValueError if the devices of a replica would have other shares than before."""
    shards = "--in-shards" if settings.get("in_shards") else "--no-in-shards"
    for name, write in ("fast", "--fast {}"), ("in_shards", shards):
        old, new = settings.get(name), getattr(config, name)
        if old != new:
            raise ValueError(
                f"{directory} was trained with {name}={old}, which cuts its states, but {name}="
                f"{new}; write {write.format(old)}; or give another --name, and --start-from with "
                "this run's folder to begin with its parameters."
            )


def _changes(old: Any, new: dict[str, Any]) -> list[str]:
    """The settings that have changed since the checkpoint, as text; none if it has no record."""
    old, new = by_name(old if isinstance(old, dict) else {}), by_name(new)
    return [
        f"{name} {json.loads(old[name])!r} -> {json.loads(value)!r}"
        for name, value in new.items()
        if name not in _PRINTED_ELSEWHERE and name in old and old[name] != value
    ]


def _say(name: str, step: int, what: str) -> None:
    if agree.is_first():
        say(f"{name}: from step {step} on {what}")


def _like_saved(task: Task, num_replicas: int) -> Any:
    """Parameters and state of another number of replicas, on this run's mesh."""
    row_axes, mesh = task.placement.row_axes, task.mesh
    devices = mesh.size // math.prod(mesh.shape[name] for name in row_axes)
    sizes = dict(mesh.shape) | dict.fromkeys(row_axes, 1) | {AXIS_NAME: num_replicas // devices}
    types = (AxisType.Auto,) * len(sizes)
    as_saved = AbstractMesh(tuple(sizes.values()), tuple(sizes), types)
    params, state = jax.eval_shape(task.placement.functions(as_saved).init, task.natural)
    return trees.with_rows(task.like, {"params": params, "state": state}, mesh, row_axes)
