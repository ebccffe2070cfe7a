"""JAX's cache of compiled programs, for the time of a test."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def programs_in(folder, seconds):
    """Keeps programs in a folder that take as long to compile."""
    values = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": seconds,
    }
    before = {name: getattr(jax.config, name) for name in values}
    _configure(values)
    yield
    _configure(before)


def _configure(values):
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
