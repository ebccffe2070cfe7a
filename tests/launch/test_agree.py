"""Two real processes over loopback against two devices of one: the same parameters."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

WORKER = """
import sys

import jax

port, process, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
num_processes = 2 if port else 1
jax.config.update("jax_num_cpu_devices", 2 // num_processes)
if port:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp

mesh = Mesh(np.array(jax.devices()), ("replica",))
assert mesh.size == 2 and jax.process_count() == num_processes


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
np.savez(out, **results)
"""

SECONDS = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_workers(folder, port, count):
    """Runs `count` workers, bounded in time; returns what each wrote."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    root = str(pathlib.Path(__file__).parents[3])
    environment = os.environ | {
        "PYTHONPATH": root,
        "JAX_PLATFORMS": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    outputs = [folder / f"{bool(port)}_{i}.npz" for i in range(count)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(i), str(output)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, output in enumerate(outputs)
    ]
    try:
        logs = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    for worker, log in zip(workers, logs, strict=True):
        assert worker.returncode == 0, log
    return [dict(np.load(output)) for output in outputs]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Parameters by each of two processes, and by two devices of one."""
    folder = tmp_path_factory.mktemp("workers")
    return *run_workers(folder, free_port(), 2), *run_workers(folder, 0, 1)


def test_two_processes_hold_equal_parameters(results):
    first, second, _ = results
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("code", ["identity", "nearest", "stochastic"])
def test_two_processes_train_as_two_devices_of_one_do(results, code):
    several, _, one = results
    names = [name for name in one if name.startswith(code)]
    assert len(names) == 3
    for name in names:
        # A sum of two is the same in any order, so nothing may differ, not by a bit.
        assert several[name].tobytes() == one[name].tobytes(), name
