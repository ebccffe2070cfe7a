"""All that the launcher takes from private JAX, with the reasons.

`tests/launch/test_private.py` fails where a new JAX has other names, or a public way.
"""

import functools
import types
from typing import Any

from jax._src import compiler, distributed
from jax._src.lib import _jax


def state() -> Any:
    """JAX's view of the run: `process_id`, `num_processes`, and the `client` of its text store.

    `jax.process_index` makes devices, before a program may have said which. There is no public way
    to the store, the only one that works while devices are busy or gone.
    """
    return distributed.global_state


def bind_gloo(**where: str) -> None:
    """Makes gloo listen at an `interface` or `hostname`; call it before JAX's first use.

    JAX has no option for this: gloo would listen at the address of the host's name, which may be of
    another network, or of all.
    """
    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(make, **where)


def let_all_write_programs() -> None:
    """Lets this process write to JAX's compilation cache, whatever its number.

    JAX lets only process 0 write. On CPUs the programs of the others differ, and they would compile
    again at each restart. The function that writes asks `distributed` for the number, and for
    nothing else; other functions of its module ask it, too, and must hear the true one.
    """
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    write = compiler._cache_write
    names = {**write.__globals__, "distributed": first}
    compiler._cache_write = types.FunctionType(write.__code__, names, write.__name__)
