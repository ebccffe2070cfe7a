"""An Equinox model, whose arrays are trained and whose functions stay beside them.

JAX_NUM_CPU_DEVICES=4 python examples/with_equinox.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def batches(count):
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(32, 16)).astype(np.float32)
    for _ in range(count):
        x = draw.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x @ truth)}


mesh = jax.make_mesh((jax.device_count(),), ("replica",))
tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.adamw(1e-2))
init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")

model = eqx.nn.MLP(32, 16, width_size=128, depth=1, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)
state = init(params)
losses = []
for batch in batches(60):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"].mean()))
model = eqx.combine(params, static)
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
