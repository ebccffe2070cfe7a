"""What a run will send, as told before it starts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from configs import nano_dense
from jaxcomp import schedules
from tests.helpers.replicas import everywhere, mesh_of, rows, transform
from train.models.decoder import DecoderConfig
from train.placement import build, counts
from train.placement.resolve import resolve

AXIS = "replica"


def zero_one_adam():
    rate = optax.cosine_decay_schedule(1e-2, 40)
    return jaxcomp.zero_one_adam(
        rate,
        AXIS,
        sync_at=schedules.halving(rate, 40, after=6),
        variance_at=schedules.growing(2, until=6),
    )


@pytest.mark.parametrize(
    "make",
    [
        zero_one_adam,
        lambda: jaxcomp.one_bit_adam(1e-2, AXIS, freeze_step=7),
        lambda: jaxcomp.one_bit_lamb(1e-2, AXIS, freeze_step=7),
        lambda: jaxcomp.slamb(1e-2, AXIS, sync_every=6, exact_numel=9),
        lambda: optax.chain(
            jaxcomp.cocktail_sgd(optax.sgd(1e-2), AXIS, warmup_steps=3, sync_every=4)
        ),
        lambda: jaxcomp.power_sgd(1, AXIS, warmup_steps=5),
        lambda: jaxcomp.dion(1e-2, AXIS, rank=2),
        lambda: jaxcomp.diloco(optax.sgd(1e-2), AXIS, every=4),
    ],
    ids="zero_one_adam one_bit_adam one_bit_lamb slamb cocktail_sgd power_sgd dion diloco".split(),
)
def test_the_plan_is_what_the_run_then_counts(make):
    mesh = mesh_of(2)
    params = everywhere(mesh, {"kernel": jnp.ones((8, 8))})
    init, update = transform(make(), mesh, params)
    state = init(params)
    grads = rows(mesh, {"kernel": np.ones((2, 8, 8), np.float32)})
    for _ in range(40):
        _, state = update(grads, state, params)
    counted = optax.tree_utils.tree_get(state, "rounds")
    planned = counts.rounds(make(), 40)
    assert planned == {part: int(count) for part, count in counted.items()}
    assert 0 < planned["all"] <= 40


@pytest.mark.parametrize("kind", ["matrix", "embedding", "head", "vector"])
def test_a_method_of_any_kind_of_leaves_has_its_plan(kind):
    tx = jaxcomp.by_kind(optax.sgd(1.0), **{kind: jaxcomp.diloco(optax.sgd(1.0), AXIS, every=4)})
    assert counts.rounds(tx, 10) == {"all": 2, "synchronize": 2}


def test_a_method_that_always_sends_everything_has_no_plan():
    tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), AXIS), optax.adam(1e-3))
    assert counts.rounds(tx, 10) == {}


def test_bytes_are_summed_over_parts_and_steps():
    sent, times = {"": 10.0, "synchronize": 3.0, "variance": 100.0}, {"all": 5, "synchronize": 4}
    assert counts.total_bytes(sent, times | {"variance": 1}, 7) == 10 * 7 + 3 * 4 + 100


@pytest.mark.parametrize(
    ("scan", "fragments", "around"),
    [
        (False, "2", "{}"),
        (True, "by_path(('^blocks/1', 1), ('.*', 0))", "{}"),
        (False, "2", "by_kind(sgd(learning_rate), matrix={})"),
    ],
)
def test_fragments_are_counted_by_the_parameters_of_the_run(scan, fragments, around):
    """By number, by the paths of layers that are in one array, and among leaves of one kind."""
    method = f"diloco(sgd(learning_rate), axis_name, every=4, fragments={fragments})"
    update = around.format(method)
    nano = nano_dense.get_config()
    config = dataclasses.replace(
        nano,
        model=DecoderConfig(layers=2, width=8, heads=1, context=8, scan=scan),
        optimizer=dataclasses.replace(nano.optimizer, update=update, warmup_steps=1),
        steps=10,
        replicas=2,
    )
    placement = resolve(config)
    _, state = jax.eval_shape(placement.functions(mesh_of(2)).init, build.param_shapes(config))
    # After 4 and 8 steps the first one, after 2, 6 and 10 the second one.
    assert placement.rounds(state) == {"all": 5, "synchronize_0": 2, "synchronize_1": 3}
