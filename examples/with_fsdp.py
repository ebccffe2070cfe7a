"""Parameters in shards inside each replica, and 4 bits between the replicas.

JAX_NUM_CPU_DEVICES=4 python examples/with_fsdp.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batches(count):
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(32, 16)).astype(np.float32)
    for _ in range(count):
        x = draw.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x @ truth)}


# The slow axis is between hosts, and the other one inside a host.
replicas = min(2, jax.device_count())
mesh = jax.make_mesh((replicas, jax.device_count() // replicas), ("replica", "fsdp"))
specs = {"up": P("fsdp", None), "down": P("fsdp", None)}
tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.adamw(1e-2))
rows = P(("replica", "fsdp"))  # the devices of a replica share its batch
init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica", param_specs=specs, batch_specs=rows)

up, down = jax.random.split(jax.random.key(0))
params = {
    "up": jax.random.normal(up, (32, 128)) / 6,
    "down": jax.random.normal(down, (128, 16)) / 11,
}
params = jax.device_put(params, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
state = init(params)
losses = []
for batch in batches(60):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"].mean()))
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
