"""Meshes as `jax.make_mesh` makes them, of Explicit axes and of Auto ones, and batches anywhere."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from tests.helpers.layered import assert_close

REPLICAS, OTHERS = 2, 2
MEAN = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
TX = optax.chain(MEAN, optax.sgd(0.5))
COPIES = optax.contrib.schedule_free(TX, 0.5)
TENSOR = {"up": P(None, "other"), "down": P("other", None)}
FSDP = {"up": P("other"), "down": P("other")}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"up": (4, 8), "down": (8, 4)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


BATCH = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)


def dense():
    grads = jax.grad(loss_fn)(make_params(), BATCH)
    return jax.tree.map(lambda p, g: p - 0.5 * g, make_params(), grads)


def mesh_of(kind, *sizes):
    names = ("replica", "other")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("specs", [None, FSDP, TENSOR], ids=["replicas", "fsdp", "tensor"])
def test_a_step_runs_on_axes_of_any_type_with_any_batch(kind, specs):
    mesh = mesh_of(kind, REPLICAS, *([OTHERS] if specs else []))
    rows = P(("replica", "other")) if specs is FSDP else None
    init, step = jaxcomp.train_step(
        loss_fn, TX, mesh, "replica", param_specs=specs, batch_specs=rows, accumulate=2
    )
    params = make_params()
    state = init(params)  # of NumPy's arrays, too
    if specs:  # else JAX 0.12 warns that whole arrays are donated for shards
        params = jax.device_put(params, {n: NamedSharding(mesh, s) for n, s in specs.items()})
    with jax.set_mesh(mesh) if specs is TENSOR else contextlib.nullcontext():
        params, state, _ = step(params, state, BATCH)
    assert_close(params, dense(), 1e-6)
    for name, x in params.items():
        spec = specs[name] if specs else P()
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize("lowered", [False, True], ids=["called", "lowered"])
@pytest.mark.parametrize("where", [jnp.asarray, np.asarray], ids=["one device", "numpy"])
def test_a_step_is_compiled_once_for_parameters_that_are_not_on_the_mesh(where, lowered, caplog):
    """What a model's `init` or a file gives: XLA had aliased arrays of unlike shards."""
    specs = {"up": P("other"), "down": P(None, "other")}
    shapes = {"up": (64, 32), "down": (32, 32)}
    loss_fn = lambda params, batch: jnp.mean(batch @ params["up"] @ params["down"])
    mesh = mesh_of(AxisType.Auto, REPLICAS, OTHERS)
    init, step = jaxcomp.train_step(loss_fn, TX, mesh, "replica", param_specs=specs)
    params = {name: where(np.ones(shape, np.float32)) for name, shape in shapes.items()}
    state, batch = init(params), np.ones((4, 64), np.float32)
    with jax.log_compiles():
        if lowered:
            step = step.lower(params, state, batch).compile()
        for _ in range(2):
            params, state, metrics = step(params, state, batch)
    compiled = [r for r in caplog.records if "Finished XLA compilation of jit(_step)" in r.message]
    assert len(compiled) == 1 and not metrics["skipped"]
    assert all(x.sharding.spec == specs[name] for name, x in params.items())


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
def test_so_are_the_programs_of_an_overlapped_step(compiled, caplog):
    tx = jaxcomp.cocktail_sgd(optax.sgd(0.5), "replica")
    mesh = mesh_of(AxisType.Explicit, REPLICAS)
    init, step = jaxcomp.overlapped_train_step(loss_fn, tx, mesh, "replica")
    params = make_params()
    state = jax.device_get(init(params))
    with jax.log_compiles():
        if compiled:
            step = step.compile(params, state, BATCH)
        for _ in range(2):
            params, state, metrics = step(params, state, BATCH)
    said = [record.message for record in caplog.records]
    for name in ("_exchange", "_finish"):  # the gradient's thread notes nothing here
        assert sum(f"XLA compilation of jit({name})" in line for line in said) == 1
    assert not metrics["skipped"]


def on_one_device(tree):
    """As `jax.device_put(x, device)` and readers of checkpoints commit arrays."""
    return jax.device_put(tree, jax.devices()[0])


def in_another_order(tree):
    """On all devices, by a mesh with another order of them."""
    mesh = Mesh(jax.devices()[:REPLICAS][::-1], ("all",))
    return jax.device_put(tree, NamedSharding(mesh, P()))


@pytest.mark.parametrize("overlaps", [False, True], ids=["one program", "overlapped"])
def test_steps_take_arrays_that_are_committed_elsewhere(overlaps):
    mesh = mesh_of(AxisType.Explicit if overlaps else AxisType.Auto, REPLICAS)
    make = jaxcomp.overlapped_train_step if overlaps else jaxcomp.train_step
    tx = jaxcomp.cocktail_sgd(optax.sgd(0.5), "replica")
    changed = lambda params, batch, *, model_state: (loss_fn(params, batch), model_state)

    def trained(where):
        init, step = make(changed, tx, mesh, "replica")
        params, batch, own = where((make_params(), BATCH, np.ones(3, np.float32)))
        state = where(jax.device_get(init(params)))
        params, state, metrics = step(params, state, batch, model_state=own)
        params, state = where(jax.device_get((params, state)))
        measured = jaxcomp.eval_step(loss_fn, mesh, "replica")(params, state, batch)
        return measured, jaxcomp.mean_params(params, state, mesh, "replica"), metrics

    wanted = trained(lambda tree: tree)
    for where in (on_one_device, in_another_order):
        jax.tree.map(np.testing.assert_array_equal, trained(where), wanted)


def test_an_initial_state_may_hold_such_parameters():
    init, _ = jaxcomp.train_step(loss_fn, COPIES, mesh_of(AxisType.Auto, REPLICAS), "replica")
    state = init(on_one_device(make_params()))
    jax.tree.map(np.testing.assert_array_equal, state.z, make_params())


def test_a_lowered_and_a_compiled_step_take_them_too():
    mesh = mesh_of(AxisType.Explicit, REPLICAS)
    init, step = jaxcomp.train_step(loss_fn, TX, mesh, "replica")
    params, batch = on_one_device((make_params(), BATCH))
    state = init(params)
    program = step.lower(params, state, batch).compile()
    params, _, _ = program(params, state, batch)
    assert_close(params, dense(), 1e-6)


@pytest.mark.parametrize("where", [on_one_device, lambda tree: tree], ids=["one device", "numpy"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shards_of_a_checkpoint_may_lie_anywhere(kind, where, caplog):
    mesh = mesh_of(kind, REPLICAS)
    fsdp = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity())
    of_shards = lambda params, batch: loss_fn(fsdp.gather(params), batch)
    init, step = jaxcomp.qsdp_train_step(of_shards, optax.sgd(0.5, momentum=0.9), mesh, fsdp)
    shards = where(jax.device_get(fsdp.shard(where(make_params()), mesh)))
    state = where(jax.device_get(init(shards)))
    with jax.log_compiles():
        for number in range(2):
            shards, state, _ = step(shards, state, where(BATCH))
            if not number:
                once = fsdp.unshard(where(jax.device_get(shards)), mesh)
    compiled = [r for r in caplog.records if "Finished XLA compilation of jit(_step)" in r.message]
    assert len(compiled) == 1
    assert_close(once, dense(), 1e-6)


def test_an_fsdp_axis_shares_the_batch_where_its_spec_says_so():
    mesh = mesh_of(AxisType.Auto, REPLICAS, OTHERS)

    def program(rows):
        made = jaxcomp.train_step(loss_fn, TX, mesh, "replica", param_specs=FSDP, batch_specs=rows)
        params = jax.device_put(make_params(), {n: NamedSharding(mesh, s) for n, s in FSDP.items()})
        return made.step.lower(params, made.init(params), BATCH).compile()

    shared, repeated = program(P(("replica", "other"))), program(None)
    flops = lambda compiled: compiled.cost_analysis()["flops"]
    assert flops(shared) < flops(repeated)
    of_replicas = lambda compiled: [
        row for row in report.collectives(compiled, mesh) if "replica" in row.axes
    ]
    assert of_replicas(shared) == of_replicas(repeated)


@pytest.mark.parametrize("spec", [P(None, "replica"), P(("other", "replica"))], ids=str)
def test_a_spec_that_does_not_begin_with_the_replicas_is_refused(spec):
    mesh = mesh_of(AxisType.Auto, REPLICAS, OTHERS)
    init, step = jaxcomp.train_step(loss_fn, TX, mesh, "replica", batch_specs=spec)
    params = make_params()
    with pytest.raises(ValueError, match="must be without the axes .*, or begin with them"):
        step.trace(params, jax.eval_shape(init, params), BATCH)
