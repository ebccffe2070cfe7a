"""Types over the replicas: the silent all-reduce, unknown axes and unchecked types are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas import types
from tests.helpers.replicas import PARAMS, everywhere, lossy_mean, mesh_of, on, rows


def test_gradients_at_replicated_parameters_are_refused_and_local_ones_are_not():
    mesh = mesh_of(2)

    def grads(at, params, x):
        return jax.grad(lambda p: jnp.sum(p["kernel"][0] * x[0]))(at(params))

    def check(at):
        def step(params, x):
            types.require_varying(grads(at, params, x), "replica")
            return x

        x = rows(mesh, np.ones((2, 8), np.float32))
        return on(mesh, step, (P(), P("replica")), P("replica"))(everywhere(mesh, PARAMS), x)

    with pytest.raises(ValueError, match=r"\['bias'\]. must vary over 'replica'.*past any comp"):
        check(lambda params: params)
    check(lambda params: jaxcomp.local_params(params, (), "replica"))


def test_gradients_that_flax_has_averaged_are_refused_with_what_to_write():
    """A step of one's own with Flax's `DynamicScale`, as its example wmt has it."""
    mesh = mesh_of(2)
    tx = jaxcomp.per_replica(lossy_mean(), "replica")

    def step(params, x):
        state = tx.init(params)
        local = jaxcomp.local_params(params, state, "replica")
        scaled = DynamicScale().value_and_grad(
            lambda p: jnp.sum(p["kernel"][0] * x[0]), axis_name="replica"
        )
        return tx.update(scaled(local)[-1], state, params)[0]

    x = rows(mesh, np.ones((2, 8), np.float32))
    with pytest.raises(ValueError, match=r"leave out jax.lax.pmean.*loss_scale in place of Flax"):
        on(mesh, step, (P(), P("replica")))(everywhere(mesh, PARAMS), x)


@pytest.mark.parametrize("use", ["local_params", "init", "update"])
def test_an_unknown_axis_is_refused(use):
    tx = jaxcomp.per_replica(lossy_mean(), "replica")
    state = lossy_mean
    calls = {
        "local_params": lambda p: jaxcomp.local_params(p, (), "replicas"),
        "init": lambda p: jaxcomp.per_replica(optax.sgd(1.0), "replicas").init(p),
        "update": lambda p: jaxcomp.per_replica(optax.sgd(1.0), "replicas").update(p, state, p),
    }
    message = r"axis 'replicas' is unknown here, where the axes are \('replica',\); give the"
    with pytest.raises(ValueError, match=message):
        on(mesh_of(2), calls[use])(PARAMS)
    with pytest.raises(ValueError, match="axis 'replica' is unknown here; run this inside"):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"no axis 'replicas'; its axes are \('replica',\)"):
        jaxcomp.state_specs(tx, PARAMS, mesh_of(2), "replicas")


def test_an_init_outside_of_shard_map_says_what_to_write_with_flax():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    message = r"nnx.Optimizer and .*give them jaxcomp.flax.on_mesh\(tx, mesh, 'replica'\), and"
    with pytest.raises(ValueError, match=message):
        nnx.Optimizer(model, lossy_mean(), wrt=nnx.Param)


def test_unchecked_types_are_refused():
    with pytest.raises(ValueError, match="leave check_vma at True"):
        init = lambda p: jaxcomp.per_replica(lossy_mean(), "replica").init(p)
        on(mesh_of(2), init, check_vma=False)(PARAMS)
