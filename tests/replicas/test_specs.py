"""Specs of states: rows where they vary, and as the parameters where those are sharded."""

import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers.replicas import PARAMS, lossy_mean, mesh_of, state_of


def test_what_is_not_wrapped_outermost_is_refused():
    mesh, mean = mesh_of(2), lossy_mean()
    wrapped = jaxcomp.per_replica(mean, "replica")
    for tx in (mean, optax.chain(wrapped, optax.sgd(1.0)), jaxcomp.per_replica(mean, "fsdp")):
        with pytest.raises(ValueError, match=r"nothing around it.*Write jaxcomp.per_replica\("):
            jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    with pytest.raises(ValueError, match=r"wrapped over \('replica',\) already.*axis 'fsdp'"):
        jaxcomp.per_replica(wrapped, "fsdp")


def test_a_local_momentum_before_the_mean_gets_rows_too():
    mesh = mesh_of(2)
    tx = jaxcomp.per_replica(optax.chain(optax.trace(0.5), lossy_mean()), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    assert specs[0].trace == {"bias": P("replica"), "kernel": P("replica")}
    tx = jaxcomp.per_replica(optax.chain(lossy_mean(), optax.trace(0.5)), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    assert specs[1].trace == {"bias": P(), "kernel": P()}


def test_an_accumulator_of_multi_steps_gets_rows():
    tx = optax.MultiSteps(optax.chain(lossy_mean(), optax.adam(1e-2)), 2)
    tx = jaxcomp.per_replica(tx.gradient_transformation(), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh_of(2), "replica")
    assert specs.acc_grads == {"bias": P("replica"), "kernel": P("replica")}
    assert state_of(specs, "mu") == {"bias": P(), "kernel": P()}


def test_specs_follow_sharded_parameters():
    mesh = mesh_of(2, 2)
    tx = jaxcomp.per_replica(optax.chain(lossy_mean(), optax.adam(1e-2)), "replica")
    param_specs = {"bias": P(), "kernel": P(None, "fsdp")}
    mean, (adam, _) = jaxcomp.state_specs(tx, PARAMS, mesh, "replica", param_specs)
    assert mean.count == P()
    assert mean.residual == {"bias": None, "kernel": P("replica", None, "fsdp")}
    assert mean.owner_residual == (None, P("replica", ("fsdp",)))
    assert adam.mu == adam.nu == param_specs
    with pytest.raises(ValueError, match="shard a parameter over the replica axis 'replica'"):
        jaxcomp.state_specs(tx, PARAMS, mesh, "replica", P("replica"))


def test_specs_follow_the_parameter_whose_whole_path_fits():
    params = {"w": np.zeros((8, 16), np.float32), "z": {"w": np.zeros((16, 8), np.float32)}}
    param_specs = {"w": P(None, "fsdp"), "z": {"w": P("fsdp", None)}}
    tx = jaxcomp.per_replica(optax.chain(lossy_mean(), optax.adam(1e-2)), "replica")
    _, (adam, _) = jaxcomp.state_specs(tx, params, mesh_of(2, 2), "replica", param_specs)
    assert adam.mu == adam.nu == param_specs


def test_a_state_of_equal_shapes_is_traced_once():
    traced = []
    inner = lossy_mean()
    tx = optax.GradientTransformationExtraArgs(
        lambda params: (traced.append(params), inner.init(params))[1], inner.update
    )
    tx = jaxcomp.per_replica(tx, "replica")
    specs = [jaxcomp.state_specs(tx, PARAMS, mesh_of(2), "replica") for _ in range(2)]
    assert specs[0] == specs[1] and len(traced) == 1
    jaxcomp.state_specs(tx, {"more": PARAMS}, mesh_of(2), "replica")
    assert len(traced) == 2
