"""Two real processes over loopback against two devices of one: the same parameters."""

import sys

import numpy as np

from tests.helpers.launching import environment, run

WORKER = """
import jax

from jaxcomp import launch

count = launch.connect()
jax.config.update("jax_num_cpu_devices", 2 // count)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp

mesh = Mesh(np.array(jax.devices()), ("replica",))
assert mesh.size == 2 and jax.process_count() == count


def place(tree, spec):
    put = lambda x: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )
    return jax.tree.map(put, tree)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def train(tx):
    rng = np.random.default_rng(0)
    shapes = {"bias": (64,), "down": (64, 32), "up": (32, 64)}
    params = {k: rng.normal(size=v).astype(np.float32) / 8 for k, v in shapes.items()}
    params = place(params, P())
    step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    state = step.init(params)
    for _ in range(5):
        batch = {k: rng.normal(size=(16, 32)).astype(np.float32) for k in "xy"}
        params, state, metrics = step.step(params, state, place(batch, P("replica")))
    assert not metrics["skipped"] and int(jaxcomp.replica_spread(params, mesh, "replica")) == 0
    return {name: np.asarray(x.addressable_data(0)) for name, x in params.items()}


codes = {
    "identity": jaxcomp.identity(),
    "nearest": jaxcomp.quantize(4),
    "stochastic": jaxcomp.quantize(4, rounding="stochastic"),
}
results = {}
for name, code in codes.items():
    tx = optax.chain(jaxcomp.compressed_mean(code, "replica"), optax.adam(1e-2))
    results |= {f"{name} {leaf}": value for leaf, value in train(tx).items()}
np.savez(f"{count}_{jax.process_index()}.npz", **results)
"""


def test_two_processes_train_as_two_devices_of_one_and_hold_equal_parameters(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    launched = [sys.executable, "-m", "jaxcomp.launch", "--local", "2", "--", "python", "worker.py"]
    for command in (launched, [sys.executable, "worker.py"]):
        done = run(command, cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stdout
    first, second, one = (np.load(tmp_path / f"{name}.npz") for name in ("2_0", "2_1", "1_0"))
    assert len(one) == 9
    for name, value in one.items():
        # A sum of two is the same in any order, so nothing may differ, not by a bit.
        assert first[name].tobytes() == second[name].tobytes() == value.tobytes(), name
