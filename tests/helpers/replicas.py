"""Replicas for tests: meshes of CPU devices, and one value a replica in and out of shard_map."""

import functools

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp

SIZES = (1, 2, 3, 5, 8)
REPLICATED = P()
PARAMS = {"bias": np.zeros(6, np.float32), "kernel": np.zeros((6, 8), np.float32)}


def mesh_of(*sizes, second="fsdp"):
    """A mesh with the axis "replica", and `second` if two sizes are given, of type Auto."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("replica", second)[: len(sizes)])


def rows(mesh, tree):
    """Puts arrays `[num_replicas, ...]` on the mesh, one row a replica."""
    return jax.device_put(tree, NamedSharding(mesh, P("replica")))


def everywhere(mesh, tree):
    """Puts a copy of every array on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def one_value(x):
    """The value of a replicated array, after a comparison of all its copies bit for bit."""
    copies = [np.asarray(shard.data) for shard in x.addressable_shards]
    for copy in copies[1:]:
        assert copy.dtype == copies[0].dtype
        assert copy.tobytes() == copies[0].tobytes(), "the replicas hold different copies"
    return copies[0]


def division_error(num_replicas):
    """Relative error of a division by it: XLA multiplies by the rounded reciprocal instead."""
    return 0.0 if num_replicas & (num_replicas - 1) == 0 else 2.0**-23


def transform(tx, mesh, params):
    """Jits `init(params)` and `update(rows of updates, state, params) -> (updates, state)`.

    The transformation is wrapped by `per_replica`; updates that come out are replicated by type.
    The same transformation of parameters of the same types is jitted once.
    """
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda tree: tree, params))
    return _transform(tx, mesh, tree, tuple((x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=4)  # few: see `programs_of_one_module`
def _transform(tx, mesh, tree, types):
    tx = jaxcomp.per_replica(tx, "replica")
    params = tree.unflatten([jax.ShapeDtypeStruct(*of_leaf) for of_leaf in types])
    specs = jaxcomp.state_specs(tx, params, mesh, "replica")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)

    def update(updates, state, params):
        return tx.update(jax.tree.map(lambda x: x[0], updates), state, params)

    update = jax.shard_map(
        update, mesh=mesh, in_specs=(P("replica"), specs, P()), out_specs=(P(), specs)
    )
    return jax.jit(init), jax.jit(update)


def random_tree(seed, *lead, shapes, dtype=np.float32):
    """Normal numbers of the given shapes by name, each behind the axes `lead`."""
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(*lead, *shape)).astype(dtype) for k, shape in shapes.items()}


def history_of(tx, params, gradients, num_replicas):
    """Parameters and states before the first and after each step; the replicas' are equal."""
    run = Run(tx, params, num_replicas)
    history = [(run.params, run.state)]
    for grads in gradients:
        run.step(grads)
        history.append((run.params, run.state))
    return history


class Run:
    """Steps of a transformation, one after the other."""

    def __init__(self, tx, params, num_replicas=4):
        self.mesh = mesh_of(num_replicas)
        self.params = everywhere(self.mesh, params)
        init, self.update = transform(tx, self.mesh, self.params)
        self.state = init(self.params)

    def step(self, grads):
        updates, self.state = self.update(rows(self.mesh, grads), self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        for x in jax.tree.leaves(self.params):
            one_value(x)
        return updates

    def local(self, name="kernel"):
        """The replicas' own parameters of this name, one row each."""
        return np.asarray(self.params[name])[None] + np.asarray(self.state.drift[name])


def trained(loss_fn, tx, mesh, params, batches, make=jaxcomp.train_step, **options):
    """Parameters, state and the metrics of each step, after one step for each batch."""
    init, step = make(loss_fn, tx, mesh, "replica", **options)
    specs = options.get("param_specs")
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), P() if specs is None else specs)
    params = jax.device_put(jax.tree.map(np.array, params), places)  # copies: steps donate theirs
    state, seen = init(params), []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        seen.append(jax.device_get(metrics))
    return params, state, seen


def simulated(num_replicas):
    """Makes steps of replicas on one device, for `trained` on a mesh of one."""
    return lambda loss_fn, tx, mesh, axis_name, **options: jaxcomp.simulated_train_step(
        loss_fn, tx, num_replicas, axis_name, **options
    )


def state_of(state, name):
    """The field `name` of an optax state."""
    return optax.tree_utils.tree_get(state, name)


def lossy_mean(**options):
    """The mean of trees as PARAMS: the kernel at 2 bits, the bias exact."""
    code = jaxcomp.two_shot(jaxcomp.quantize(2, block=8), **options)
    return jaxcomp.compressed_mean(code, "replica", exact=lambda path, leaf: path == "bias")


def on(mesh, function, in_specs=REPLICATED, out_specs=REPLICATED, **options):
    """Jits a function inside shard_map."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    )
