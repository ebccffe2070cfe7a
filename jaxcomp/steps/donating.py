"""Steps that donate parameters and state, though one array may be there several times."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes
from jax.sharding import AbstractMesh, Mesh

from jaxcomp.steps import compiling

_NAMES = ("params", "shards", "state")  # of the first two arguments, if they are named


def donating(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh | None = None, **of_mesh: Any
) -> "Donating":
    """`jax.jit` of a function that gets parameters and state first, and donates both.

    Args:
      function: The step.
      mesh: Its mesh, for `compiler_options`; None: without them.
      **of_mesh: Further arguments of `compiler_options`.
    """
    options = None if mesh is None else compiling.compiler_options(mesh, **of_mesh)
    return Donating(jax.jit(function, donate_argnums=(0, 1), compiler_options=options))


class Donating:
    """A jitted function that donates its first two arguments, or its lowered or compiled program.

    XLA ends the process, or refuses, if it gets a buffer twice and one of them is donated: two
    layers whose biases begin as the same zeros, tied weights, a batch that is a parameter. So what
    is donated and is elsewhere, too, is copied before. All else is as of what `jax.jit` returns.
    """

    def __init__(self, program: Any):
        self._program = program
        self._made: dict[int, weakref.ref] = {}

    def __call__(self, *args: Any, spared: Any = None, **options: Any) -> Any:
        """Runs the program; `spared` has the caller's arrays that it does not get but must keep."""
        named = {name: options.pop(name) for name in _NAMES if name in options}
        donated, named = self._apart((args[:2], named), (args[2:], options, spared))
        made = self._program(*donated, *args[2:], **named, **options)
        self._made = {id(x): weakref.ref(x) for x in jax.tree.leaves(made) if _is_array(x)}
        return made

    def lower(self, *args: Any, **options: Any) -> "Donating":
        """The lowered program. What it compiles to copies, too."""
        return Donating(self._program.lower(*args, **options))

    def compile(self, *args: Any, **options: Any) -> "Donating":
        """The program that a lowered one compiles to."""
        return Donating(self._program.compile(*args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def _apart(self, donated, others):
        """The donated trees, with copies of arrays that are there twice or among the others."""
        leaves, treedef = jax.tree.flatten(donated)
        others = list(filter(_is_array, jax.tree.leaves(others)))
        # To look at buffers takes microseconds each. Different arrays share them only if they have
        # a shape in common, and one of them is not what this step has made.
        shapes = {x.shape for x in filter(_is_array, (*leaves, *others)) if not self._is_own(x)}
        places = lambda x: {id(x)} | (_buffers(x) if shapes and x.shape in shapes else set())
        taken = set().union(*map(places, others))
        for i, x in enumerate(leaves):
            if not _is_array(x):
                continue
            own = places(x)
            if taken.isdisjoint(own):
                taken |= own
            else:
                leaves[i] = jnp.copy(x)
        return treedef.unflatten(leaves)

    def _is_own(self, x):
        made = self._made.get(id(x))
        return made is not None and made() is x


def _is_array(x):
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _buffers(x):
    """Where this process's parts of an array are; `device_put` to more devices shares one."""
    if x.is_deleted() or not x.size or jnp.issubdtype(x.dtype, dtypes.extended):
        return set()
    try:
        # JAX cannot tell the shards of an array that is whole on one device of each process.
        is_alone = x.is_fully_replicated and len(x.sharding.addressable_devices) == 1
        parts = [x.addressable_data(0)] if is_alone else [it.data for it in x.addressable_shards]
        return {(part.device.id, part.unsafe_buffer_pointer()) for part in parts}
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # a device that does not tell
        return set()
