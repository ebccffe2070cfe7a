"""One model on two hosts: each has its own part of every batch.

python -m jaxcomp.launch --local 2 -- python examples/two_hosts.py              # two processes here
python -m jaxcomp.launch --hosts hosts.txt -- python examples/two_hosts.py      # by ssh
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import launch


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batches(count, place):
    """Batches of which each process makes its own rows."""
    truth = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    draw = np.random.default_rng((1, jax.process_index()))
    for _ in range(count):
        x = draw.normal(size=(32, 32)).astype(np.float32)
        mine = {"x": x, "y": np.tanh(x @ truth)}
        yield {
            name: jax.make_array_from_process_local_data(place, own) for name, own in mine.items()
        }


launch.connect()  # before JAX's first use
mesh = jax.make_mesh((jax.device_count(),), ("replica",))
tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.adamw(1e-2))
init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")

up, down = jax.random.split(jax.random.key(0))
params = {
    "up": jax.random.normal(up, (32, 128)) / 6,
    "down": jax.random.normal(down, (128, 16)) / 11,
}
params = jax.device_put(params, NamedSharding(mesh, P()))
state = init(params)
losses = []
for batch in batches(60, NamedSharding(mesh, P("replica"))):
    params, state, metrics = step(params, state, batch)
    losses.append(float(jnp.mean(metrics["loss"])))
if launch.is_first():
    print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
