"""States of other numbers of replicas as shapes, and a checkpoint that goes on in a new process."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers.every_method import METHODS
from tests.helpers.replicas import everywhere, mesh_of

PARAMS = {"kernel": np.ones((40, 32), np.float32), "bias": np.ones(7, np.float32)}


def forms(state, place=lambda x: x.sharding):
    return jax.tree.map(lambda x: (x.shape, x.dtype.name, place(x)), state)


def init_on(mesh, tx, **options):
    init, _ = jaxcomp.train_step(lambda p, b: jnp.mean(b), tx, mesh, "replica", **options)
    return init(everywhere(mesh, PARAMS))


@pytest.mark.parametrize("method", ["zero_one_adam", "sharded_optimizer"])
def test_they_are_those_of_as_many_devices(method):
    """Of 4 replicas: as their init has them, and on meshes of 2 and 3 devices."""
    tx, wanted = METHODS[method].tx, init_on(mesh_of(4), METHODS[method].tx)
    for size in (4, 2, 3):
        mesh = mesh_of(size)
        shapes = jaxcomp.state_shapes(tx, PARAMS, 4, mesh, "replica")
        nowhere = lambda x: None
        assert forms(shapes, nowhere) == forms(wanted, nowhere)
        for x, old in zip(jax.tree.leaves(shapes), jax.tree.leaves(wanted), strict=True):
            spec = old.sharding.spec if size != 3 else P(*[None] * bool(old.sharding.spec))
            assert (x.sharding.mesh, x.sharding.spec) == (mesh, spec)


@pytest.mark.parametrize("options", [{"param_specs": P("fsdp")}, {"fast_axis": "fsdp"}])
def test_other_axes_stay(options):
    params = {"kernel": PARAMS["kernel"]}
    tx = METHODS["compressed_mean"].tx
    init, _ = jaxcomp.train_step(lambda p, b: jnp.mean(b), tx, mesh_of(4, 2), "replica", **options)
    shapes = jaxcomp.state_shapes(tx, params, 4, mesh_of(2, 2), "replica", **options)
    wanted = init(everywhere(mesh_of(4, 2), params))
    assert forms(shapes, lambda x: x.sharding.spec) == forms(wanted, lambda x: x.sharding.spec)
    assert {x.sharding.mesh for x in jax.tree.leaves(shapes)} == {mesh_of(2, 2)}


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="num_replicas=0; write at least 1"):
        jaxcomp.state_shapes(optax.sgd(1.0), PARAMS, 0, mesh_of(2), "replica")
    with pytest.raises(ValueError, match="no axis 'slow'; its axes are"):
        jaxcomp.state_shapes(METHODS["compressed_mean"].tx, PARAMS, 4, mesh_of(2), "slow")


PROGRAM = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxcomp

mesh = jax.make_mesh((int(sys.argv[1]),), ("replica",))
tx = jaxcomp.zero_one_adam(1e-2, "replica")
loss_fn = lambda params, batch: jnp.mean((batch @ params["kernel"]) ** 2)
init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
everywhere = NamedSharding(mesh, P())
batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
batch = jax.device_put(batch, NamedSharding(mesh, P("replica")))
if sys.argv[2] == "save":
    params = jax.device_put({"kernel": jnp.ones((8, 4))}, everywhere)
    params, state, _ = step(params, init(params), batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(sys.argv[3], {"params": params, "state": state})
else:
    params = {"kernel": jax.ShapeDtypeStruct((8, 4), "float32", sharding=everywhere)}
    saved = jaxcomp.state_shapes(tx, params, 8, mesh, "replica")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(sys.argv[3], {"params": params, "state": saved})
    own = jaxcomp.state_shapes(tx, params, mesh.size, mesh, "replica")
    params, state = restored["params"], jaxcomp.resize(restored["state"], own)
before = np.asarray(params["kernel"]).tolist()
residual = np.mean(state.residual["kernel"], 0).tolist()
_, _, metrics = step(params, state, batch)
print(json.dumps([before, residual, float(np.mean(metrics["loss"])), bool(metrics["skipped"])]))
"""


def test_a_new_process_of_half_the_devices_goes_on(tmp_path):
    found = []
    for devices, what in ((8, "save"), (4, "go on")):
        command = [sys.executable, "-c", PROGRAM, str(devices), what, str(tmp_path / "saved")]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (params, residual, loss, _), (params_4, residual_4, loss_4, skipped) = found
    assert params == params_4 and np.any(np.asarray(params) != 1) and not skipped
    np.testing.assert_allclose(residual_4, residual, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(loss_4, loss, rtol=1e-5)
