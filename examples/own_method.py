"""A method of one's own: momentum SGD that sends the signs of momenta, with error feedback.

JAX_NUM_CPU_DEVICES=4 python examples/own_method.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import transport_of
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.replicas.finite import not_finite, poisoned


@jaxcomp.MethodState.register
class MeanMomentumState(NamedTuple):
    count: jax.Array  # i32[]
    momentum: dict  # equal on all replicas
    residual: dict  # this replica's own, not sent yet
    owner_residual: tuple  # this owner's own, not passed on yet
    rounds: dict  # {"all", "momentum"}: i32[]


def mean_momentum(learning_rate, axis_name, compressor, decay=0.9):
    transport = transport_of(compressor, axis_name)

    def init_fn(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        residual, owner_residual = averaging.nothing_sent(transport, zeros)
        rounds = no_rounds("momentum")
        return MeanMomentumState(jnp.int32(0), zeros, residual, owner_residual, rounds)

    def update_fn(grads, state, params, **extra_args):
        grads = poisoned(not_finite(grads, axis_name), grads)
        local = jax.tree.map(lambda m, g: decay * m + g, state.momentum, grads)
        kept = averaging.feedback(state)
        got = averaging.average(transport, local, state.count, "momentum", **kept)
        rounds = counted(state.rounds, all=True, momentum=True)
        new = MeanMomentumState(state.count + 1, got.mean, got.residual, got.owner_residual, rounds)
        return jax.tree.map(lambda m: -learning_rate * m, got.mean), new

    return method("mean_momentum", axis_name, init_fn, update_fn)


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batches(count):
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(32, 16)).astype(np.float32)
    for _ in range(count):
        x = draw.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x @ truth)}


mesh = jax.make_mesh((jax.device_count(),), ("replica",))
tx = mean_momentum(0.1, "replica", jaxcomp.sign(block=128))
init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")

up, down = jax.random.split(jax.random.key(0))
params = {
    "up": jax.random.normal(up, (32, 128)) / 6,
    "down": jax.random.normal(down, (128, 16)) / 11,
}
state = init(params)
losses = []
for batch in batches(60):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"].mean()))
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
