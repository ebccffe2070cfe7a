"""A Flax nnx model and its nnx.Optimizer, whose gradients cross the network at 4 bits.

JAX_NUM_CPU_DEVICES=4 python examples/with_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcomp
import jaxcomp.flax


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(128, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batches(count):
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(32, 16)).astype(np.float32)
    for _ in range(count):
        x = draw.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x @ truth)}


mesh = jax.make_mesh((jax.device_count(),), ("replica",))
tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.adamw(1e-2))
model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, jaxcomp.flax.on_mesh(tx, mesh, "replica"), wrt=nnx.Param)
step = jaxcomp.flax.train_step(loss_fn)

losses = []
for batch in batches(60):
    metrics = step(model, optimizer, batch)
    losses.append(float(metrics["loss"].mean()))
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
