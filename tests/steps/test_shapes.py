"""States of other numbers of replicas as shapes, and a checkpoint that goes on in a new process."""

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
