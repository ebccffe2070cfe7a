"""A Flax linen model and its TrainState, whose momenta cross the network at 1 bit.

JAX_NUM_CPU_DEVICES=4 python examples/with_linen.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState

import jaxcomp
import jaxcomp.flax


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.relu(nn.Dense(128)(x)))


def loss_fn(params, batch):
    return jnp.mean((network.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def batches(count):
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(32, 16)).astype(np.float32)
    for _ in range(count):
        x = draw.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x @ truth)}


mesh = jax.make_mesh((jax.device_count(),), ("replica",))
network = Network()
variables = network.init(jax.random.key(0), jnp.zeros((1, 32)))
tx = jaxcomp.flax.on_mesh(jaxcomp.zero_one_adam(1e-2, "replica"), mesh, "replica")
state = TrainState.create(apply_fn=network.apply, tx=tx, params=variables["params"])
step = jaxcomp.flax.train_state_step(loss_fn)

losses = []
for batch in batches(60):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"].mean()))
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
