"""Orbax as a run uses it: who takes part in a save, where they wait, and what an error says."""

import errno
import shutil
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from train.checkpoints.files import latest, write_checksums


def make_manager(
    directory: Path, keep: int, seconds: int, failures: list[BaseException]
) -> ocp.CheckpointManager:
    """Makes Orbax's manager; what this process's part of a save meets goes into `failures`."""
    options = everyone()
    meet = ocp.multihost.get_barrier_sync_fn(processes=options.active_processes)

    def barrier(**kwargs):
        # Orbax meets the others also while an error goes up; they wait elsewhere until the end.
        if (error := sys.exc_info()[1]) is not None:
            failures.append(error)
            raise error
        meet(**kwargs)

    return ocp.CheckpointManager(
        directory,
        item_names=("state", "metadata"),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            multiprocessing_options=options,
            async_options=ocp.AsyncOptions(
                timeout_secs=seconds,
                barrier_sync_fn=barrier,
                # Called in process 0, after the last array is written and before the rename.
                post_finalization_callback=lambda: write_checksums(directory),
            ),
        ),
    )


def everyone() -> ocp.options.MultiprocessingOptions:
    """Processes meet at JAX's coordination service: as collectives, Orbax's barriers never end."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)) if count > 1 else None
    )


def save_error(directory: Path, error: Exception, needed: int, seconds: int) -> OSError:
    """What to raise for an error of Orbax in a save of `needed` bytes."""
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
    if isinstance(error, TimeoutError):
        reason = f"not all of it was written in {seconds} s, by this process and the others"
    return OSError(
        number or errno.EIO, f"could not save a checkpoint in {directory}: {reason}.{kept}"
    )
