"""Trains a small network on all devices and saves it; or goes on with what another number saved.

python -m tests.users.elastic save|resume METHODS FOLDER; a test starts it on 8 devices, then on 4.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jaxcomp
from tests.helpers.user_methods import USER_METHODS

BATCH, STEPS = 32, 30
TEACHER = np.random.default_rng(7).normal(size=(8, 2)).astype(np.float32)


def first_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)
    return {"up": normal(8, 16), "down": normal(16, 2)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def batch_of(step):
    x = np.random.default_rng(step).normal(size=(BATCH, 8)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ TEACHER)}


def trained(step, params, state, first):
    losses = []
    for number in range(first, first + STEPS):
        params, state, metrics = step(params, state, batch_of(number))
        losses.append(float(metrics["loss"].mean()))
    return params, state, losses


def save(tx, mesh, folder):
    """Trains from the beginning, and saves all of it."""
    init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    params = first_params()
    params, state, losses = trained(step, params, init(params), 0)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", {"params": params, "state": state})
    (folder / "losses.json").write_text(json.dumps([mesh.size, losses]))


def resume(tx, mesh, folder):
    """Goes on where it stopped, with the replicas that are there now."""
    size, before = json.loads((folder / "losses.json").read_text())
    everywhere = jax.NamedSharding(mesh, jax.P())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    shapes = jax.tree.map(shape, jax.eval_shape(first_params))
    states = [jaxcomp.state_shapes(tx, shapes, n, mesh, "replica") for n in (size, mesh.size)]
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(folder / "saved", {"params": shapes, "state": states[0]})
    _, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    state = jaxcomp.resize(saved["state"], states[1])
    _, _, after = trained(step, saved["params"], state, STEPS)
    print(json.dumps({"replicas": [size, mesh.size], "losses": before + after}))


if __name__ == "__main__":
    action, names, folder = sys.argv[1:]
    mesh = jax.make_mesh((jax.device_count(),), ("replica",))
    for name in names.split(","):
        own = pathlib.Path(folder, name)
        own.mkdir(exist_ok=True)
        {"save": save, "resume": resume}[action](USER_METHODS[name](1e-2), mesh, own)
