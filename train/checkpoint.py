"""Checkpoints by Orbax: asynchronous, atomic, checked byte for byte.

A checkpoint is `state/` (the arrays, readable by any Orbax program), `metadata/metadata` (JSON)
and `checksums.json`. Saving needs `open_checkpoints`; reading needs the directory alone and
changes nothing in it. `latest` and `steps` come from `train.checkpoint_files`.
"""

import contextlib
import errno
import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from train.checkpoint_files import (
    intact,
    latest,
    remove_partial,
    require_newest,
    require_writable,
    write_checksums,
)

# Orbax logs a traceback in every thread for an error that it also raises to its caller.
logging.getLogger("absl").setLevel(logging.CRITICAL)

_SHOWN = 5  # differing leaves that an error names


class Checkpoints(NamedTuple):
    """An open directory of checkpoints, for saving. Call `close` at the end, come what may.

    Every process of a run calls each of them, in the same order.

    Attributes:
      save: `(step: int, tree, metadata: dict)`. Copies the leaves, starts writing them and
        returns; the buffers may be donated at once. A save that still runs is waited for first.
      wait: `()`. Returns when the last save is on disk.
      close: `()`. Waits, then ends Orbax's threads.

    Each raises OSError, naming the directory, if this save or the one before it could not be
    written, with errno ENOSPC where the disk is full. What the failed save left behind is
    removed, earlier checkpoints stay, and saving may go on once there is space. `save` raises
    ValueError if the directory has a checkpoint of this step or of a later one, and TypeError if
    the metadata is not JSON.
    """

    save: Callable[[int, Any, dict[str, Any]], None]
    wait: Callable[[], None]
    close: Callable[[], None]


def open_checkpoints(directory: str | Path, keep: int = 3) -> Checkpoints:
    """Makes the directory if need be, and removes what an interrupted save left in it.

    One run at a time may have a directory open.

    Args:
      directory: Where the checkpoints are, a folder of a local or shared file system.
      keep: How many checkpoints stay, the newest ones; at least 1. An old one is deleted after
        the new one is complete, so that the disk holds keep + 1 for a while.

    Returns:
      The functions that save.

    Raises:
      ValueError: If `keep` is under 1.
      OSError: If the directory cannot be made or written to.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay. Write keep=1")
    directory = Path(directory).absolute()
    require_writable(directory)
    remove_partial(directory)
    manager = _manager(directory, keep)
    needed = 0  # bytes of the last save

    @contextlib.contextmanager
    def explained():
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            remove_partial(directory)
            manager.reload()
            raise _save_error(directory, error, needed) from error

    def save(step, tree, metadata):
        nonlocal needed
        wait()
        require_newest(directory, step)
        record = json.dumps({"leaves": _described(tree), "run": metadata})
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_without_empty(tree)),
            metadata=ocp.args.JsonSave(json.loads(record)),
        )
        needed = sum(getattr(leaf, "nbytes", 8) for leaf in jax.tree.leaves(tree))
        with explained():
            if needed > shutil.disk_usage(directory).free:
                raise OSError(errno.ENOSPC, "the arrays alone are larger than the free space")
            manager.save(step, args=items, force=True)

    def wait():
        with explained():
            manager.wait_until_finished()

    def close():
        try:
            wait()
        finally:
            manager.close()

    return Checkpoints(save, wait, close)


def read_metadata(directory: str | Path, step: int | None = None) -> dict[str, Any]:
    """Reads the metadata that a checkpoint was saved with.

    Args:
      directory: Where the checkpoints are.
      step: Which one; the newest by default.

    Returns:
      The dict given to `save`, as JSON returns it: tuples come back as lists.

    Raises:
      ValueError: If there is no such checkpoint, or its metadata is damaged.
    """
    return _record(intact(directory, step, "metadata"))["run"]


def restore(
    directory: str | Path, like: Any, step: int | None = None
) -> tuple[Any, dict[str, Any], int]:
    """Reads a checkpoint, bit for bit as it was saved, onto any mesh.

    Shapes, dtypes and paths must be the saved ones; shardings need not. To read one that was
    saved with another number of replicas, pass `like_replicas(like, saved number)`.

    Args:
      directory: Where the checkpoints are.
      like: A tree of the saved structure. Its leaves are `jax.ShapeDtypeStruct` with a sharding,
        or arrays, whose values are not read, or Python numbers.
      step: Which checkpoint; the newest by default.

    Returns:
      `(tree, metadata, step)`.

    Raises:
      ValueError: If there is no such checkpoint, it is damaged (the text names the newest one
        that is not) or it is of another model (the text lists the first leaves that differ).
        Nothing is loaded then.
    """
    path = intact(directory, step)
    record = _record(path)
    _require_same(path, record, _described(like))
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(path / "state", _without_empty(like))

    def filled(wanted, got):
        if math.prod(np.shape(wanted)) > 0:
            return got
        return jnp.zeros(wanted.shape, wanted.dtype, device=getattr(wanted, "sharding", None))

    return jax.tree.map(filled, like, loaded), record["run"], int(path.name)


def like_replicas(like: Any, num_replicas: int, axis_name: str = "replica") -> Any:
    """Changes the number of replicas in the target of a restore, but not the mesh.

    Leaves sharded over the replica axis get a leading axis of `num_replicas`; where the devices
    do not divide it, every device holds all of it. Hand what `restore` returns to
    `jaxcomp.resize`.

    Args:
      like: Tree of `jax.ShapeDtypeStruct` or arrays, for the present mesh.
      num_replicas: What the checkpoint was saved with, at least 1.
      axis_name: The mesh axis that the leading axis of per-replica leaves lies on.

    Returns:
      The same tree, with `jax.ShapeDtypeStruct` for the per-replica leaves.
    """

    def changed(leaf):
        sharding = getattr(leaf, "sharding", None)
        spec = tuple(getattr(sharding, "spec", ()))
        if spec[:1] not in ((axis_name,), ((axis_name,),)):
            return leaf
        divides = num_replicas % sharding.mesh.shape[axis_name] == 0
        spec = PartitionSpec(axis_name if divides else None, *spec[1:])
        return jax.ShapeDtypeStruct(
            (num_replicas, *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(sharding.mesh, spec)
        )

    return jax.tree.map(changed, like)


def _manager(directory, keep):
    # Orbax calls back in one process, after the last array is written and before the rename.
    callback = ocp.AsyncOptions(post_finalization_callback=lambda: write_checksums(directory))
    return ocp.CheckpointManager(
        directory,
        item_names=("state", "metadata"),
        options=ocp.CheckpointManagerOptions(max_to_keep=keep, async_options=callback),
    )


def _described(tree):
    """Maps each leaf's path to its dtype and shape, as `params/mlp/kernel`: `float32[128,512]`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{','.join(map(str, np.shape(leaf)))}]"
        )
        for path, leaf in leaves
    }


def _without_empty(tree):
    """Puts None where a leaf has no entries: Orbax refuses to write such arrays."""
    return jax.tree.map(lambda leaf: None if math.prod(np.shape(leaf)) == 0 else leaf, tree)


def _record(path):
    return json.loads((path / "metadata" / "metadata").read_text())


def _save_error(directory, error, needed):
    number = error.errno if isinstance(error, OSError) else None
    good = latest(directory)
    kept = "" if good is None else f" The checkpoint of step {good} is complete."
    # Orbax raises ValueError for what TensorStore could not write.
    if number in (errno.ENOSPC, errno.EDQUOT) or "RESOURCE_EXHAUSTED" in str(error):
        free = shutil.disk_usage(directory).free
        return OSError(
            errno.ENOSPC,
            f"no space for a checkpoint in {directory}: it needs about {needed:,} bytes, "
            f"{free:,} are free.{kept} Free some space, keep fewer, or name another directory",
        )
    reason = str(error).partition("\n")[0].rstrip(".")
    return OSError(
        number or errno.EIO, f"could not save a checkpoint in {directory}: {reason}.{kept}"
    )


def _require_same(path, record, needed):
    got = record["leaves"]
    names = [name for name in got | needed if got.get(name) != needed.get(name)]
    if not names:
        return
    listed = "; ".join(
        f"{name}: got {got.get(name, 'nothing')}, needed {needed.get(name, 'nothing')}"
        for name in names[:_SHOWN]
    )
    more = "; ..." if len(names) > _SHOWN else ""
    replicas = record["run"].get("num_replicas", "an unknown number of")
    raise ValueError(
        f"the checkpoint {path} is of another model, optimizer or number of replicas (it has "
        f"{replicas}): {len(names)} leaves differ. {listed}{more}. Use the configuration that it "
        "was saved with, or another directory"
    )
