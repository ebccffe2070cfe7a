"""A step whose exchange and gradient are programs of their own is the step of one program."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.faults import ended, metrics_of, said, started, write_config
from tests.helpers.replicas import everywhere, mesh_of, rows

PARAMS = {"kernel": np.full((40, 20), 0.1, np.float32), "bias": np.zeros(20, np.float32)}
# By Adam all entries would take steps of one length at first, and the last bit choose the largest.
METHOD = functools.partial(jaxcomp.cocktail_sgd, optax.sgd(0.1, momentum=0.9), "replica")
CODE = jaxcomp.cocktail(1 / 2, 0.25, block=16)


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["kernel"] + params["bias"][None]) - 0.5) ** 2)


def batches(mesh, count, bad=None):
    """Batches of four rows a replica; one row of number `bad` is not finite."""
    for number in range(count):
        batch = np.random.default_rng(number).normal(size=(4 * mesh.size, 40)).astype(np.float32)
        if number == bad:
            batch[1] = np.inf
        yield rows(mesh, batch)


def trained(make, tx, mesh, steps=6, **options):
    """Trains some steps; returns what came of it and the compiled step."""
    functions = make(loss, tx, mesh, "replica", **options)
    params = everywhere(mesh, PARAMS)
    state, seen, step = functions.init(params), [], None
    for batch in batches(mesh, steps, bad=3):
        if step is None:
            lower = getattr(functions.step, "lower", None)
            lowered = lower(params, state, batch) if lower else None
            step = lowered.compile() if lowered else functions.step.compile(params, state, batch)
        params, state, metrics = step(params, state, batch)
        seen.append(jax.device_get(metrics))
    return jax.device_get((params, state, seen)), step


@pytest.mark.parametrize(
    ("tx", "options"),
    [
        (METHOD(compressor=CODE), {}),
        (METHOD(compressor=CODE, warmup_steps=2, sync_every=2), {"accumulate": 2}),
        (optax.chain(optax.clip(0.1), METHOD(compressor=CODE)), {}),
    ],
    ids=["every step", "warm-up and local steps", "in a chain"],
)
def test_it_trains_and_sends_as_one_program_does(tx, options):
    mesh = mesh_of(4)
    whole, program = trained(jaxcomp.train_step, tx, mesh, **options)
    split, step = trained(jaxcomp.overlapped_train_step, tx, mesh, **options)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), whole, split)
    sent = functools.partial(jaxcomp.report.sent_bytes_by_part, mesh=mesh)
    assert sent(step.programs) == sent(program)
    jaxcomp.assert_no_dense(step.programs, mesh, "replica", parts={"warmup": PARAMS})
    assert sent(step.programs)["synchronize"] == sent(step.exchange)["synchronize"] > 0
    assert jaxcomp.report.collectives(step.gradient, mesh) == []
    kinds = {row.part for row in jaxcomp.report.collectives(step.exchange, mesh)}
    assert kinds == {"synchronize"}


def test_only_the_gradient_is_dispatched_by_another_thread():
    mesh, seen = mesh_of(2), {}
    step = jaxcomp.overlapped_train_step(loss, METHOD(compressor=CODE), mesh, "replica").step

    def noted(name):
        def call(*args, **options):
            seen[name] = threading.current_thread()
            return getattr(step, name)(*args, **options)

        call.placed = step.finish.placed
        return call

    names = ("exchange", "gradient", "finish")
    watched = step._replace(**{name: noted(name) for name in names})
    params = everywhere(mesh, PARAMS)
    state = jaxcomp.train_step(loss, METHOD(compressor=CODE), mesh, "replica").init(params)
    watched(params, state, next(batches(mesh, 1)))
    assert seen["exchange"] is seen["finish"] is threading.current_thread()
    assert seen["gradient"] is not threading.current_thread()


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.sgd(0.1)),
        METHOD(delayed=False),
    ],
    ids=["compressed_mean", "not delayed"],
)
def test_a_method_that_needs_the_gradient_is_refused(tx):
    mesh = mesh_of(2)
    functions = jaxcomp.overlapped_train_step(loss, tx, mesh, "replica")
    params = everywhere(mesh, PARAMS)
    state = functions.init(params)
    with pytest.raises(ValueError, match="nothing in the transformation exchanges ahead"):
        functions.step(params, state, next(batches(mesh, 1)))


def test_a_mesh_of_more_axes_is_refused():
    with pytest.raises(ValueError, match=r"axes \('replica', 'fsdp'\), needs one of 'replica'"):
        jaxcomp.overlapped_train_step(loss, METHOD(), mesh_of(2, 2), "replica")


def test_processes_that_overlap_train_as_one_program_does(tmp_path):
    update = "cocktail_sgd(sgd(learning_rate), axis_name, compressor=quantize(8))"
    found = []
    for count, overlap in ((1, "--no-overlap"), (2, "--overlap")):
        config = write_config(tmp_path / str(count), steps=12)
        options = (overlap, "--optimizer.update", update, "--optimizer.learning-rate")
        with started(config, count, *options, 0.1) as run:
            assert ended(run) == [0] * count, said(run)
        found.append(metrics_of(run.folder)[1:])  # before the first step there is no loss
    for whole, split in zip(*found, strict=True):
        assert split.keys() == whole.keys()
        assert split == pytest.approx(whole, rel=1e-4, nan_ok=True)
    assert found[1][-1]["sent_bytes"] > 0 and found[1][-1]["loss"] < found[1][0]["loss"]
