"""Compiles steps: for links that are slower than XLA assumes, and with donated arguments."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes
from jax.sharding import AbstractMesh, Mesh

from jaxcomp._checks import is_array, require_kept
from jaxcomp.steps.placing import movable

# XLA:GPU's latency hiding scheduler assumes that a message takes microseconds, and overlaps little
# with it. The plain scheduler starts each message as early and ends it as late as it can. Combined
# gathers would wait for the last of them, and are not asynchronous.
_LATE_AS_CAN_BE = {
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}
# Where barriers hold the end of a message back, only its start is left to the scheduler. The plain
# one starts a sum late. The other one can be told not to, and has one message under way by default.
_EARLY_AS_CAN_BE = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 16,  # two hops of eight buckets
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}
# With several gathers in a row, the plain scheduler makes them synchronous. The other one keeps
# only one message in flight, and sends a gradient before the weights that are needed first.
_TWO_UNDER_WAY = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


def compiler_options(
    mesh: Mesh | AbstractMesh, *, gathers_layers: bool = False, early: bool = False
) -> dict[str, Any]:
    """The options of `jax.jit` with which XLA overlaps messages with as much work as it can.

    `train_step` and `qsdp_train_step` use them. If you jit your own step, write `jax.jit(step,
    compiler_options=jaxcomp.compiler_options(mesh))`.

    Args:
      mesh: Where the program runs.
      gathers_layers: Whether it gathers layer after layer, as `qsdp` does.
      early: Whether barriers in it keep the backward pass beside messages, as in the `train_step`
        of a mean of gradients.

    Returns:
      Names and values on GPUs; empty for other devices, or an abstract mesh.
    """
    if not is_of_gpus(mesh):
        return {}
    if early:
        return dict(_EARLY_AS_CAN_BE)
    return dict(_TWO_UNDER_WAY if gathers_layers else _LATE_AS_CAN_BE)


def is_of_gpus(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has devices, and these are GPUs."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"


class Kept:
    """A jitted function, which refuses arrays that a step has donated.

    It takes arrays of other devices than those of the mesh, if it knows one.
    """

    def __init__(self, program: Any, mesh: Mesh | AbstractMesh | None = None):
        self._program, self._mesh = program, mesh

    def __call__(self, *args: Any, **options: Any) -> Any:
        require_kept(*args, *options.values())
        args, options = movable(self._mesh, (args, options))
        return self._program(*args, **options)

    def lower(self, *args: Any, **options: Any) -> Any:
        """The lowered program."""
        args, options = movable(self._mesh, (args, options))
        return self._program.lower(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


class Initial(Kept):
    """A jitted `params -> state`, which says what parameters are if it gets something else.

    JAX says only that it cannot interpret it, of a module of Equinox with its functions.
    """

    def __call__(self, params: Any) -> Any:
        for path, leaf in jax.tree.leaves_with_path(params):
            if callable(leaf) or isinstance(leaf, str):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {leaf!r:.60}; parameters are a tree of "
                    "arrays alone. With an Equinox module write params, static = "
                    "eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static) "
                    "in the loss."
                )
        return super().__call__(params)


_OWN = ("params", "state")  # the first two arguments, if they are named
_NAMES = (*_OWN, "shards")


class ByState:
    """A jitted function `(params, state, ...)`, made when it first gets a state, which decides how.

    Args:
      make: `state -> jitted function`.
    """

    def __init__(self, make: Callable[[Any], Any]):
        self._make, self._made = make, None

    def __call__(self, params: Any, state: Any, *args: Any, **options: Any) -> Any:
        return self._program(state)(params, state, *args, **options)

    def lower(self, params: Any, state: Any, *args: Any, **options: Any) -> Any:
        """The lowered program."""
        return self._program(state).lower(params, state, *args, **options)

    def trace(self, params: Any, state: Any, *args: Any, **options: Any) -> Any:
        """The traced program."""
        return self._program(state).trace(params, state, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def _program(self, state):
        self._made = self._made or self._make(state)
        return self._made


class Donating:
    """A jitted function that donates its first two arguments, or its lowered or compiled program.

    XLA ends the process, or refuses, if it gets a buffer twice and one of them is donated: two
    layers whose biases begin as the same zeros, tied weights, a batch that is a parameter. So what
    is donated and is elsewhere, too, is copied before. All else is as of what `jax.jit` returns.

    Args:
      program: The jitted function, or its lowered or compiled program.
      mesh: Where it runs, as for `Kept`.
      shardings: `params, state -> (shardings of both)`, where the function returns them. Arrays
        that are elsewhere, of a model's `init` or in NumPy, are put there first. The function is
        then compiled once, and not again for what it has returned.
    """

    def __init__(
        self,
        program: Any,
        mesh: Mesh | AbstractMesh | None = None,
        shardings: Callable[..., Any] | None = None,
    ):
        self._program, self._mesh, self._shardings = program, mesh, shardings
        self._homes: dict[Any, list[Any]] = {}  # shardings by tree and shapes
        self._made: dict[int, weakref.ref] = {}

    def __call__(self, *args: Any, spared: Any = None, **options: Any) -> Any:
        """Runs the program; `spared` has the caller's arrays that it does not get but must keep."""
        require_kept(*args, *options.values())
        args, options = self._placed(_put, args, options)
        named = {name: options.pop(name) for name in _NAMES if name in options}
        donated, named = self._apart((args[:2], named), (args[2:], options, spared))
        made = self._program(*donated, *args[2:], **named, **options)
        self._made = {id(x): weakref.ref(x) for x in jax.tree.leaves(made) if is_array(x)}
        return made

    def lower(self, *args: Any, **options: Any) -> "Donating":
        """The lowered program. What it compiles to copies, too."""
        args, options = self._placed(shapes_at, args, options)
        return Donating(self._program.lower(*args, **options), self._mesh, self._shardings)

    def compile(self, *args: Any, **options: Any) -> "Donating":
        """The program that a lowered one compiles to."""
        return Donating(self._program.compile(*args, **options), self._mesh, self._shardings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def placed(self, params: Any, state: Any, put: Callable[..., Any] | None = None) -> Any:
        """Parameters and state where the function returns them; with `shapes_at`, their shapes."""
        leaves, treedef = jax.tree.flatten((params, state))
        is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        if self._shardings is None or is_traced or all(map(self._is_own, leaves)):
            return params, state
        form = treedef, tuple(map(jnp.shape, leaves))
        if form not in self._homes:
            self._homes[form] = treedef.flatten_up_to(self._shardings(params, state))
        shardings = self._homes[form]
        away = [i for i, x in enumerate(leaves) if not _is_at(x, shardings[i])]
        moved = movable(self._mesh, [leaves[i] for i in away])
        moved = (put or _put)(moved, [shardings[i] for i in away])
        for i, x in zip(away, moved, strict=True):
            leaves[i] = x
        return treedef.unflatten(leaves)

    def _placed(self, put, args, options):
        """The arguments of a call, with `placed` parameters and state."""
        own = dict(zip(_OWN, args, strict=False))
        # What is given twice, or not at all, is for the program to refuse.
        if own.keys() & options.keys() or not {*_OWN} <= {*own, *options}:
            return args, options
        named = own | options
        rest = {name: value for name, value in options.items() if name not in _OWN}
        others, rest = movable(self._mesh, (args[2:], rest))
        return (*self.placed(named["params"], named["state"], put), *others), rest

    def _apart(self, donated, others):
        """The donated trees, with copies of arrays that are there twice or among the others."""
        leaves, treedef = jax.tree.flatten(donated)
        others = list(filter(is_array, jax.tree.leaves(others)))
        # To look at buffers takes microseconds each. Different arrays share them only if they have
        # a shape in common, and one of them is not what this step has made.
        shapes = {x.shape for x in filter(is_array, (*leaves, *others)) if not self._is_own(x)}
        places = lambda x: {id(x)} | (_buffers(x) if shapes and x.shape in shapes else set())
        taken = set().union(*map(places, others))
        for i, x in enumerate(leaves):
            if not is_array(x):
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


def _put(leaves, shardings):
    """The arrays at their shardings. Unlike `jax.device_put`, no process asks others for theirs."""
    return _mover(tuple(shardings))(leaves) if leaves else []


@functools.lru_cache(maxsize=64)
def _mover(shardings):
    return jax.jit(lambda leaves: leaves, out_shardings=list(shardings))


def shapes_at(leaves: list[Any], shardings: list[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of arrays at their shardings."""
    at = lambda x, place: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=place)
    return list(map(at, leaves, shardings))


def _is_at(x, sharding):
    """Whether a value is an array that lies so; JAX returns empty arrays anywhere."""
    own = getattr(x, "sharding", None)
    return 0 in jnp.shape(x) or (own is not None and own.is_equivalent_to(sharding, x.ndim))


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
