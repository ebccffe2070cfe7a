"""What the launcher takes from private JAX is there, and there is no public way yet."""

import inspect
import pathlib

import jax
from jax._src import compiler, xla_bridge
from jax._src.lib import _jax

from jaxcomp.launch import private

ROOT = pathlib.Path(private.__file__).parent


def test_one_module_alone_knows_private_jax():
    knowing = [path.name for path in ROOT.rglob("*.py") if "jax._src" in path.read_text()]
    assert knowing == ["private.py"]


def test_the_state_of_a_run_has_its_numbers_and_a_store_of_texts():
    state = private.state()
    assert (state.process_id, state.num_processes, state.client) == (0, 1, None)
    for name in ("key_value_set", "key_value_dir_get"):
        assert callable(getattr(_jax.DistributedRuntimeClient, name))


def test_jax_makes_gloo_s_collectives_by_the_name_that_is_bound():
    source = inspect.getsource(xla_bridge)
    assert source.count("= _jax.make_gloo_tcp_collectives(") == 1


def test_who_writes_programs_asks_only_whether_it_is_process_0():
    source = inspect.getsource(compiler._cache_write)
    assert source.count("distributed.") == source.count("distributed.global_state.process_id != 0")
    assert source.count("distributed.") == 1


def test_there_is_no_public_way_yet():
    """Where one of these fails, a function of `private` or `aborts` may go."""
    names = inspect.signature(jax.distributed.initialize).parameters
    assert not [name for name in names if "callback" in name]  # when another process is gone
    assert not [name for name in dir(jax.distributed) if "client" in name or "key_value" in name]
    options = [name for name in jax.config.values if "collectives" in name or "gloo" in name]
    assert [name for name in options if "cpu" in name or "gloo" in name] == [
        "jax_cpu_collectives_implementation"
    ]
    assert not [name for name in jax.config.values if "cache" in name and "process" in name]
