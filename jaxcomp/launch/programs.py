"""Compiled programs on disk, so that a restarted process need not compile again."""

import os
import socket
import types
from pathlib import Path

import jax
from jax._src import compiler


def kept(folder: Path) -> dict[str, str]:
    """Environment variables with which JAX keeps programs in a folder, small ones too."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # a start has dozens of these
    }


def keep_own(process_id: int) -> None:
    """Lets this process write its programs to JAX's compilation cache, if there is one.

    JAX lets only process 0 write. On CPUs the programs of other processes differ, so they would
    compile again at each start. Each process and each host gets its own folder, as programs for one
    CPU may not run on another.

    Args:
      process_id: Number of this process in its run.
    """
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not folder:
        return
    own = os.path.join(folder, f"{socket.gethostname()}-{process_id}")
    jax.config.update("jax_compilation_cache_dir", own)
    # The function uses this module only to ask whether it is process 0.
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    write = compiler._cache_write
    names = {**write.__globals__, "distributed": first}
    compiler._cache_write = types.FunctionType(write.__code__, names, write.__name__)
