"""A small network of layers, whole and in shards, and its training on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers.replicas import everywhere, mesh_of

EXACT = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity())
WIDTH, HIDDEN = 16, 67  # 67 and its multiples by 16 are odd for most numbers of shards


def make_params(num_layers=2):
    rng = np.random.default_rng(0)
    layers = [
        {
            "up": rng.normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 4,
            "bias": np.zeros(HIDDEN, np.float32),
            "gain": np.ones(3, np.float32),
            "down": rng.normal(size=(HIDDEN, WIDTH)).astype(np.float32) / 11,
        }
        for _ in range(num_layers)
    ]
    return {"first": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4, "layers": layers}


def make_pair(hidden):
    """Parameters of the two layers of `pair_loss`."""
    rng = np.random.default_rng(0)
    return {
        "bias": np.zeros(hidden, np.float32),
        "down": rng.normal(size=(hidden, WIDTH)).astype(np.float32) / 11,
        "up": rng.normal(size=(WIDTH, hidden)).astype(np.float32) / 4,
    }


def pair_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def make_batch(step=0, size=24):
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=(size, WIDTH)).astype(np.float32) for name in "xy"}


def block(p, x):
    hidden = jnp.tanh(x @ p["up"] + p["bias"][None])
    return x + jnp.sum(p["gain"]) / 3 * (hidden @ p["down"])


def loss_of(fsdp):
    """The loss of one device, or of shards where `fsdp` is given."""

    def loss_fn(params, batch):
        first = fsdp.gather(params["first"]) if fsdp else params["first"]
        x = batch["x"] @ first
        for p in params["layers"]:
            x = (fsdp.layer(block) if fsdp else block)(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss_fn


def start(fsdp, tx, *sizes, **options):
    """A step, and shards and state before the first one, on a mesh of one axis or of two."""
    mesh = mesh_of(*sizes, second="fast")
    train_step = jaxcomp.qsdp_train_step(loss_of(fsdp), tx, mesh, fsdp, **options)
    shards = fsdp.shard(everywhere(mesh, make_params()), mesh)
    return mesh, train_step, shards, train_step.init(shards)


def on(mesh, batch):
    """A batch on all devices of a mesh, in equal parts."""
    return jax.device_put(batch, NamedSharding(mesh, P(mesh.axis_names)))


def train(fsdp, tx, *sizes, num_steps=3, **options):
    """Parameters, state and metrics of all steps."""
    mesh, train_step, shards, state = start(fsdp, tx, *sizes, **options)
    history = []
    for step in range(num_steps):
        shards, state, metrics = train_step.step(shards, state, on(mesh, make_batch(step)))
        history.append(jax.tree.map(np.asarray, metrics))
    assert train_step.step._cache_size() == 1
    return fsdp.unshard(shards, mesh), state, history


def plain_training(tx, loss_fn=None, params=None):
    """The same three steps on one device, on the whole batch: parameters, losses and state."""
    loss_fn, params = loss_fn or loss_of(None), params or make_params()
    state, losses = tx.init(params), []

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(3):
        params, state, loss = step(params, state, make_batch(i))
        losses.append(float(loss))
    return params, losses, state


def assert_close(got, want, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


# Sums of gradients in another order, then three steps of rate 1/2: values up to 2.
ROUNDING = 3 * 16 * 2.0**-24 * 2


ODD = {
    "matrix": (33, 37),
    "less than the axis": (3,),
    "scalar": (),
    "nothing": (0, 4),
    "layers": (2, 5, 7),
}


def odd_tree(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in ODD.items()}


def stacked(path, leaf):
    return path == "layers"


def sharded(fsdp, params, *sizes, stacked=lambda *_: False):
    """A mesh of one axis or of two, and parameters in shards on it."""
    mesh = mesh_of(*sizes, second="fast")
    return mesh, fsdp.shard(everywhere(mesh, params), mesh, stacked)


def on_replicas(function, mesh):
    """Jits a function of a device's shards and of what is equal everywhere; its results in rows."""
    cut, rows = P(mesh.axis_names[::-1]), P(mesh.axis_names)  # a fast axis comes first in shards
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(cut, P()), out_specs=rows))


def gathered(fsdp, params, *sizes):
    """What each device computes with, one row a device."""
    mesh, shards = sharded(fsdp, params, *sizes)
    gather = lambda shards, count: jax.tree.map(
        lambda x: x[None], fsdp.gather(fsdp.local(shards, count))
    )
    return on_replicas(gather, mesh)(shards, jnp.int32(3))
