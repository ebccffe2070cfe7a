"""Orbax for a run: the processes of a save, their barriers, and error messages."""

import errno
import shutil
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxcomp.launch.claims import Claim
from train.checkpoints.files import latest, write_checksums


def make_manager(
    directory: Path,
    keep: int,
    seconds: int,
    failures: list[BaseException],
    claim: Claim | None,
) -> ocp.CheckpointManager:
    """Makes Orbax's manager; errors of this process's part of a save go into `failures`."""
    options = everyone()
    meet = ocp.multihost.get_barrier_sync_fn(processes=options.active_processes)

    def barrier(**kwargs):
        # Orbax calls its barriers even while an error is raised; the others would wait elsewhere.
        if (error := sys.exc_info()[1]) is not None:
            failures.append(error)
            raise error
        meet(**kwargs)

    def complete():
        # Called in process 0, after the last array is written and before the rename.
        if claim is not None:
            claim.require()
        write_checksums(directory)

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
                post_finalization_callback=complete,
            ),
            temporary_path_class=_folders_of(claim) if claim else None,
        ),
    )


def _folders_of(claim: Claim) -> type[ocp.path.atomicity.AtomicRenameTemporaryPath]:
    """The folder of a writer's incomplete saves, which no other writer shares."""
    parent = ocp.path.atomicity.AtomicRenameTemporaryPath

    class Own(parent):
        @classmethod
        def from_final(cls, final_path, **options):
            name = f"{final_path.name}.orbax-checkpoint-tmp-{claim.token[:8]}"
            return cls(final_path.parent / name, final_path, **options)

    return Own


def everyone() -> ocp.options.MultiprocessingOptions:
    """Barriers use JAX's coordination service: as collectives, Orbax's barriers never end."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)) if count > 1 else None
    )


def save_error(directory: Path, error: Exception, needed: int, seconds: int) -> OSError:
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
            f"{free:,} are free.{kept} Free some space, keep fewer, or name another directory",
        )
    reason = str(error).partition("\n")[0].rstrip(".")
    if isinstance(error, TimeoutError):
        reason = f"this process and the others did not write all of it in {seconds} s"
    return OSError(
        number or errno.EIO, f"could not save a checkpoint in {directory}: {reason}.{kept}"
    )
