"""Islands: programs that share a folder or a bucket, and train one model.

python examples/islands.py file:///tmp/islands garage-1 &
python examples/islands.py file:///tmp/islands garage-2
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp import islands


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batches(count, seed):
    truth = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    draw = np.random.default_rng(seed)
    for _ in range(count):
        x = draw.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x @ truth)}


@jax.jit
def step(params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


url, name = sys.argv[1:] or ("memory://alone", "garage-1")
tx = optax.adamw(1e-2)
up, down = jax.random.split(jax.random.key(0))
params = {
    "up": jax.random.normal(up, (32, 128)) / 6,
    "down": jax.random.normal(down, (128, 16)) / 11,
}
island = islands.join(url, params, name=name, every=10, deadline=10)
params, state = island.params, tx.init(params)
losses = []
for batch in batches(60, seed=[*name.encode()]):
    params, state, loss = step(params, state, batch)
    params = island.step(params)
    losses.append(float(loss))
params = island.leave(params)
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}, {island.rounds} rounds")
