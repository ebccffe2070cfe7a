"""A process that starts again finds what it has compiled before."""

import socket

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler, distributed

from jaxcomp.launch import programs
from tests.helpers.compiling import programs_in


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """JAX's cache in a folder, for one test."""
    jax.devices()  # else they come to be while a test says that this is another process
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    with programs_in(tmp_path, 0.0):
        yield tmp_path


def test_every_process_keeps_its_programs_in_a_folder_of_its_own(cache, monkeypatch):
    monkeypatch.setattr(distributed.global_state, "process_id", 3)
    programs.keep_own(3)
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
    assert [path.name for path in cache.iterdir()] == [f"{socket.gethostname()}-3"]
    assert any(path.name.startswith("jit_") for path in cache.rglob("*"))


def test_without_a_folder_nothing_is_kept(cache):
    jax.config.update("jax_compilation_cache_dir", None)
    write = compiler._cache_write
    programs.keep_own(1)
    assert compiler._cache_write is write and not [*cache.iterdir()]
