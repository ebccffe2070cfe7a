"""What XLA is told of slow links: on GPUs, and by the steps that the library jits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import jaxcomp
from jaxcomp.sharded import step as sharded
from jaxcomp.steps import evaluate, train
from tests.helpers.replicas import mesh_of


class GPU:
    """A device that says that it is one."""

    platform = "gpu"


def test_only_gpus_get_options():
    assert jaxcomp.compiler_options(mesh_of(2)) == {}
    assert jaxcomp.compiler_options(AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))) == {}
    options = jaxcomp.compiler_options(Mesh(np.array([GPU(), GPU()]), ("a",)))
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is False
    of_layers = jaxcomp.compiler_options(Mesh(np.array([GPU()]), ("a",)), gathers_layers=True)
    assert of_layers == {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    early = jaxcomp.compiler_options(Mesh(np.array([GPU()]), ("a",)), early=True)
    assert early["xla_gpu_experimental_collective_start_as_early_as_possible"] is True
    assert jax.jit(lambda x: x + 1, compiler_options=early)(1.0) == 2.0  # this XLA knows them


def test_the_steps_are_compiled_with_the_options_of_their_mesh(monkeypatch):
    asked = []
    note = lambda *args, **of: asked.append((*args, of)) or {}
    for module in (sharded, train):
        monkeypatch.setattr(module, "compiler_options", note)
    monkeypatch.setattr(train, "is_of_gpus", lambda mesh: True)
    mesh = mesh_of(2)
    loss = lambda params, batch: (batch @ params).mean()
    params, batch = jnp.zeros(4), jnp.zeros((2, 4))
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    for tx in jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica"), optax.chain(mean, optax.sgd(0.1)):
        init, step = jaxcomp.train_step(loss, tx, mesh, "replica")
        step.lower(params, init(params), batch)
    fsdp = jaxcomp.qsdp("replica")
    jaxcomp.qsdp_train_step(loss, optax.sgd(0.1), mesh, fsdp)
    assert asked == [
        (mesh, {"early": False}),
        (mesh, {"early": True}),
        (mesh, {"gathers_layers": True}),
    ]


def test_the_options_reach_the_compiler(monkeypatch):
    unknown = {"xla_there_is_no_such_option": True}
    for module in (evaluate, sharded, train):
        monkeypatch.setattr(module, "compiler_options", lambda *args, **of: unknown)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_there_is_no_such_option"):
        jaxcomp.eval_step(lambda params, batch: params, mesh_of(1), "replica")(1.0, (), jnp.ones(1))
    mesh, loss = mesh_of(1), lambda params, batch: (batch @ params).mean()
    mean, fsdp = jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), jaxcomp.qsdp("replica")
    of_shards = lambda shards, batch: loss(fsdp.gather(shards), batch)
    plain = jaxcomp.train_step(loss, mean, mesh, "replica")
    in_shards = jaxcomp.qsdp_train_step(of_shards, optax.sgd(0.1), mesh, fsdp)
    params = jnp.zeros(4)
    for (init, step), own in ((plain, params), (in_shards, fsdp.shard(params, mesh))):
        lowered = step.lower(own, init(own), jnp.zeros((1, 4)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_there_is_no_such_option"):
            lowered.compile()
