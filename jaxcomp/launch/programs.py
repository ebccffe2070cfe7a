"""Compiled programs on disk, so that a restarted process need not compile again."""

import os
import socket
from pathlib import Path

import jax

from jaxcomp.launch import private


def kept(folder: Path) -> dict[str, str]:
    """Environment variables with which JAX keeps programs in a folder, small ones too."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # a start has dozens of these
    }


def keep_own(process_id: int) -> None:
    """Lets this process write its programs to JAX's compilation cache, if there is one.

    Each process and each host gets its own folder, as programs for one CPU may not run on another.

    Args:
      process_id: Number of this process in its run.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        return
    own = os.path.join(folder, f"{socket.gethostname()}-{process_id}")
    jax.config.update("jax_compilation_cache_dir", own)
    private.let_all_write_programs()
