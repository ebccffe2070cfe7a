"""Eight replicas go on as four in another process, with Orbax between them."""

import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax

import jaxcomp
from tests.helpers.user_methods import KINDS
from tests.users import elastic
from tests.users.elastic import STEPS


def run(action, devices, folder):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [action, ",".join(KINDS), str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.users.elastic", *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def dense():
    """The last losses of as many undisturbed steps of Adam."""
    mesh = jax.make_mesh((4,), ("replica",))
    exact = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.adam(1e-2))
    init, step = jaxcomp.train_step(elastic.loss_fn, exact, mesh, "replica")
    params = elastic.first_params()
    params, state, _ = elastic.trained(step, params, init(params), 0)
    _, _, losses = elastic.trained(step, params, state, STEPS)
    return np.mean(losses[-5:])


def test_every_kind_of_state_goes_on_with_half_of_the_replicas(tmp_path):
    run("save", 8, tmp_path)
    for name, row in zip(KINDS, run("resume", 4, tmp_path), strict=True):
        assert row["replicas"] == [8, 4]
        losses = np.asarray(row["losses"])
        before, at, last = (losses[i : i + 5].mean() for i in (STEPS - 5, STEPS, 2 * STEPS - 5))
        assert at < 1.1 * before, f"{name} lost what it had learned"
        assert last < dense() + 0.05 < 0.15 * losses[0], name
