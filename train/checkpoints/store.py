"""Checkpoints with Orbax: asynchronous, atomic, checked byte for byte.

A checkpoint is `state/` (the arrays, readable by any Orbax program), `metadata/metadata` (JSON)
and `checksums.json`. Saving needs `open_checkpoints`; reading needs only the directory and
changes nothing in it. `latest` and `steps` come from `train.checkpoints.files`.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxcomp.launch import agree
from jaxcomp.launch.claims import Claim
from train import checks
from train.checkpoints import files
from train.checkpoints.files import latest, write_checksums
from train.checkpoints.trees import described, path_of, require_same, without_empty

# Orbax logs a traceback in every thread for an error that it also raises to its caller.
logging.getLogger("absl").setLevel(logging.CRITICAL)

# Seconds for Orbax, which measures its own limit by the system's clock: that may jump. A watchdog
# ends a save that hangs.
_CENTURY = 100 * 365 * 24 * 3600


@dataclasses.dataclass
class Checkpoints:
    """An open directory of checkpoints, for saving. Always call `close` at the end.

    Every process of a run calls its functions in the same order. Each raises an OSError that names
    the directory if this save or the previous one could not be written, with errno ENOSPC if the
    disk is full. The failed save is removed, earlier checkpoints stay, and saving may continue once
    there is space. In a run of many processes the next `open_checkpoints` removes it, because the
    others still write.
    """

    directory: Path
    seconds: int
    manager: ocp.CheckpointManager
    failures: list[BaseException]  # of the running save
    claim: Claim | None = None  # to the folder, if there may be other writers
    needed: int = 0  # bytes of the last save

    def save(self, step: int, tree: Any, metadata: dict[str, Any]) -> None:
        """Copies the leaves, starts writing and returns; the buffers may be donated at once.

        Waits for a running save first. Raises ValueError if there is a checkpoint of this step or a
        later one, and TypeError if the metadata is not JSON.
        """
        self.wait()
        self.require()
        files.require_newest(self.directory, step)
        record = json.dumps({"leaves": described(tree), "run": metadata})
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(without_empty(tree)),
            metadata=ocp.args.JsonSave(json.loads(record)),
        )
        self.needed = sum(getattr(leaf, "nbytes", 8) for leaf in jax.tree.leaves(tree))
        with self._explained():
            if self.needed > shutil.disk_usage(self.directory).free:
                raise OSError(errno.ENOSPC, "the arrays alone are larger than the free space")
            self.manager.save(step, args=items, force=True)

    def require(self) -> None:
        """Raises `Transient` if another run has taken the folder over."""
        if self.claim is not None:
            self.claim.require()

    def check(self) -> None:
        """Raises an error of this process's part of the running save."""
        with self._explained():
            if self.failures:
                raise self.failures[0]

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        with self._explained():
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends Orbax's threads."""
        try:
            self.wait()
        except OSError:
            self.manager.close()
            raise
        self.manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self.failures.clear()
            self.require()  # before removing anything there
            if jax.process_count() == 1:
                files.remove_partial(self.directory)
                self.manager.reload()
            raise _save_error(self.directory, error, self.needed, self.seconds) from error


def open_checkpoints(
    directory: str | Path, keep: int = 3, seconds: int = 300, claim: Claim | None = None
) -> Checkpoints:
    """Makes the directory if necessary, and removes interrupted saves in it.

    Args:
      directory: Where the checkpoints are, in a local or shared file system.
      keep: Number of newest checkpoints to keep, at least 1. An old one is deleted after the new
        one is complete, so the disk holds keep + 1 for a while.
      seconds: Time limit of a wait for the other processes' parts.
      claim: Claim to the folder; without one, only one run at a time may open the directory.

    Raises:
      ValueError: If `keep` is below 1.
      OSError: If the directory cannot be made or written to.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay. Write keep=1")
    directory = Path(directory).absolute()
    files.require_writable(directory)
    agree.from_first(lambda: files.remove_partial(directory))
    failures: list[BaseException] = []

    def complete():
        # Called in process 0, after the last array is written and before the rename.
        if claim is not None:
            claim.require()
        write_checksums(directory)

    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=False,
        multiprocessing_options=_everyone(),
        async_options=ocp.AsyncOptions(
            timeout_secs=_CENTURY,
            barrier_sync_fn=_barrier(seconds, failures),
            post_finalization_callback=complete,
        ),
        temporary_path_class=_folders_of(claim) if claim else None,
    )
    manager = ocp.CheckpointManager(directory, item_names=("state", "metadata"), options=options)
    return Checkpoints(directory, seconds, manager, failures, claim)


def _barrier(seconds: int, failures: list[BaseException]) -> Callable[..., None]:
    """Orbax's barrier; errors of this process's part of a save go into `failures`."""
    meet = ocp.multihost.get_barrier_sync_fn(processes=_everyone().active_processes)

    def barrier(timeout_ms: int, **kwargs):
        # Orbax calls its barriers even while an error is raised; the others would wait elsewhere.
        if (error := sys.exc_info()[1]) is not None:
            failures.append(error)
            raise error
        meet(timeout_ms=min(timeout_ms, 1000 * seconds), **kwargs)

    return barrier


def _folders_of(claim: Claim) -> type[ocp.path.atomicity.AtomicRenameTemporaryPath]:
    """The folder of a writer's incomplete saves, which no other writer shares."""
    parent = ocp.path.atomicity.AtomicRenameTemporaryPath

    class Own(parent):
        @classmethod
        def from_final(cls, final_path, **options):
            name = f"{final_path.name}.orbax-checkpoint-tmp-{claim.token[:8]}"
            return cls(final_path.parent / name, final_path, **options)

    return Own


def _everyone() -> ocp.options.MultiprocessingOptions:
    """Barriers use JAX's coordination service: as collectives, Orbax's barriers never end."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)) if count > 1 else None
    )


def _save_error(directory: Path, error: Exception, needed: int, seconds: int) -> OSError:
    """The error to raise for an error of Orbax in a save of `needed` bytes."""
    number = error.errno if isinstance(error, OSError) else None
    good = latest(directory)
    kept = "" if good is None else f" The checkpoint of step {good} is complete."
    # Orbax raises ValueError if TensorStore could not write.
    if number in (errno.ENOSPC, errno.EDQUOT) or "RESOURCE_EXHAUSTED" in str(error):
        free = shutil.disk_usage(directory).free
        return OSError(
            errno.ENOSPC,
            f"no space for a checkpoint in {directory}: it needs about {needed:,} bytes, "
            f"{free:,} are free.{kept} Free some space there, and start the same command again",
        )
    reason = str(error).partition("\n")[0].rstrip(".")
    if isinstance(error, TimeoutError):
        reason = f"this process and the others did not write all of it in {seconds} s"
    return OSError(
        number or errno.EIO, f"could not save a checkpoint in {directory}: {reason}.{kept}"
    )


class Saved(NamedTuple):
    """A checkpoint, chosen once: all that is read of it is of the same step."""

    path: Path
    leaves: dict[str, str]  # as `trees.described` makes it
    metadata: dict[str, Any]  # given to `save`, as JSON returns it: tuples come back as lists

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return int(self.path.name)


def choose(directory: str | Path, step: int | None = None, item: str = "") -> Saved:
    """Finds a checkpoint and checks its bytes, in process 0 for all.

    Args:
      directory: Where the checkpoints are.
      step: Which one; the newest by default.
      item: With `"metadata"`, checks only the metadata.

    Returns:
      The checkpoint, for `load`, `restore_params` and `restore_leaves`.

    Raises:
      ValueError: If there is no such checkpoint, or it is damaged; the text names the newest intact
        one.
    """

    path, *record = agree.from_first(lambda: _read(files.intact(directory, step, item)))
    return Saved(Path(path), *record)


def load(saved: Saved, like: Any) -> Any:
    """Reads a checkpoint, bit for bit, onto any mesh of any number of processes.

    Shapes, dtypes and paths must match; shardings need not. For another number of replicas, change
    `like` with `trees.with_rows`. Each process reads its own part.

    Args:
      saved: The checkpoint, from `choose`.
      like: A tree of the saved structure, with leaves of `jax.ShapeDtypeStruct` with a sharding,
        arrays (their values are ignored) or Python numbers.

    Returns:
      The tree.

    Raises:
      ValueError: If it is from another model; the text lists the first leaves that differ, and
        nothing is loaded. Also if a running run removed it meanwhile.
    """
    require_same(saved.path, saved.leaves, saved.metadata, described(like))
    return _tree(saved, like)


def restore_params(saved: Saved, like: Any) -> Any:
    """Reads only the parameters, from a run with any optimizer on any number of replicas.

    Args:
      saved: The checkpoint.
      like: As for `load`, for the parameters only.

    Returns:
      The parameters.

    Raises:
      ValueError: As `load`.
    """
    like = {"params": like}
    leaves = {name: leaf for name, leaf in saved.leaves.items() if name.startswith("params/")}
    require_same(saved.path, leaves, saved.metadata, described(like))
    return _tree(saved, like)["params"]


def restore_leaves(saved: Saved, wanted: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Reads the leaves of a checkpoint that a function asks for.

    Args:
      saved: The checkpoint.
      wanted: `(path, saved) -> jax.ShapeDtypeStruct, or None`; paths as in `trees.described`.

    Returns:
      The leaves by path. Empty leaves were not saved.

    Raises:
      ValueError: If a running run removed the checkpoint meanwhile.
    """
    how = ocp.checkpoint_utils.construct_restore_args
    placed = lambda leaf: ocp.PLACEHOLDER if leaf is None else leaf
    with _reader(saved) as (reader, arrays):
        item = jax.tree_util.tree_map_with_path(
            lambda key, saved: placed(wanted(path_of(key), saved)),
            reader.metadata(arrays).item_metadata.tree,
        )
        each = jax.tree.map(lambda x: ocp.RestoreArgs() if x is ocp.PLACEHOLDER else how(x), item)
        loaded = reader.restore(arrays, args=ocp.args.PyTreeRestore(item=item, restore_args=each))
    leaves = jax.tree_util.tree_leaves_with_path(loaded)
    return {path_of(key): x for key, x in leaves if x is not ocp.PLACEHOLDER}


def _read(path: Path) -> tuple[str, dict[str, str], dict[str, Any]]:
    file = path / "metadata" / "metadata"
    try:
        record = checks.json_object(file, leaves=dict[str, str], run=dict[str, Any])
    except ValueError:
        files.require_kept(path)
        raise
    return str(path), record["leaves"], record["run"]


@contextlib.contextmanager
def _reader(saved: Saved) -> Iterator[tuple[ocp.Checkpointer, Path]]:
    """Orbax's reader, and the folder of a checkpoint's arrays, as it wants it: absolute.

    A running run removes its older checkpoints. Whatever is read of one that is half gone is not
    used, even if Orbax sees no error in it.
    """
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=_everyone())
    with ocp.Checkpointer(handler, multiprocessing_options=_everyone()) as reader:
        try:
            yield reader, saved.path.absolute() / "state"
        finally:
            files.require_kept(saved.path)


def _tree(saved: Saved, like: Any) -> Any:
    """What a checkpoint has of a tree, which may be a part of what was saved.

    By paths, since two trees with the same leaves may differ in parts without any, such as the
    state of optax's `clip`.
    """
    keyed, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {path_of(key): leaf for key, leaf in keyed}
    loaded = restore_leaves(saved, lambda name, _: wanted.get(name))
    return treedef.unflatten(
        [loaded[name] if name in loaded else _empty(leaf) for name, leaf in wanted.items()]
    )


def _empty(leaf):
    """What was not saved."""
    return jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
