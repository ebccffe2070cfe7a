"""A code of one's own: minus, zero or plus, at 2 bits a value.

JAX_NUM_CPU_DEVICES=4 python examples/own_compressor.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from jaxcomp import Compressor, Key, Payload
from jaxcomp.compressors import packing


def ternary() -> Compressor:
    """Sends a scale, and the sign of what is beyond 0.7 of the mean magnitude."""

    def encode(x, shared: Key, private: Key) -> Payload:
        large = jnp.abs(x) > 0.7 * jnp.mean(jnp.abs(x))
        scale = jnp.sum(jnp.where(large, jnp.abs(x), 0)) / jnp.maximum(1, jnp.sum(large))
        codes = jnp.where(large, jnp.where(x > 0, 2, 1), 0).astype(jnp.uint8)
        return Payload((packing.pack(codes, 2), scale[None]), x.size)

    def decode(payload: Payload, shared: Key) -> jax.Array:
        packed, scale = payload.data
        codes = packing.unpack(packed, 2, payload.numel)
        return jnp.array([0.0, -1.0, 1.0])[codes] * scale

    return Compressor("ternary()", encode, decode, bits_per_parameter=2.0)


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
momentum = optax.sgd(0.1, momentum=0.9)
tx = optax.chain(jaxcomp.compressed_mean(ternary(), "replica"), momentum)
init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")

up, down = jax.random.split(jax.random.key(0))
params = {
    "up": jax.random.normal(up, (32, 128)) / 6,
    "down": jax.random.normal(down, (128, 16)) / 11,
}
state = init(params)
losses = []
for batch in batches(100):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"].mean()))
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
