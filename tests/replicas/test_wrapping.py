"""What a first user writes wrong is told in words, before anything runs."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import jaxcomp
from tests.helpers.replicas import PARAMS, mesh_of

TX = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.sgd(0.1))
FIRST = {"bias": True, "kernel": False}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def loss_fn(params, batch):
    return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * jnp.mean(batch)


def init(tx, params=PARAMS, axis_name="replica"):
    return jax.eval_shape(jaxcomp.train_step(loss_fn, tx, mesh_of(2), axis_name).init, params)


@pytest.mark.parametrize("params", [PARAMS, optax.LookaheadParams(PARAMS, PARAMS)])
def test_lookahead(params):
    with pytest.raises(ValueError, match="lookahead has two sets .* jaxcomp.local_steps"):
        init(optax.lookahead(TX, sync_period=2, slow_step_size=0.5), params)


@pytest.mark.parametrize(
    "behind",
    [
        lambda method: optax.chain(method, optax.scale_by_learning_rate(0.1)),
        lambda method: optax.chain(optax.trace(0.9), optax.chain(method, optax.identity())),
        lambda method: optax.MultiSteps(optax.chain(method, optax.scale(0.5)), 2),
        lambda method: optax.named_chain(("method", method), ("after", optax.scale(0.5))),
        lambda method: optax.chain(method, optax.masked(optax.scale(0.5), FIRST)),
        lambda method: optax.chain(method, optax.add_decayed_weights(0.1, mask=FIRST)),
    ],
)
@pytest.mark.parametrize(
    "method",
    [jaxcomp.cocktail_sgd(optax.scale_by_adam(), "replica"), jaxcomp.slamb(1e-3, "replica")],
)
def test_what_stands_behind_a_drift(method, behind):
    """The consensus would move by what it makes of updates, and the drift lose what it got."""
    with pytest.raises(ValueError, match=r"behind a method .* jaxcomp.cocktail_sgd\(optax.chain\("):
        init(behind(method))
    init(optax.chain(optax.trace(0.9), method))
    init(optax.named_chain(("before", optax.trace(0.9)), ("method", method)))
    init(optax.chain(jaxcomp.demo(1e-3, "replica"), optax.scale(0.5)))


@pytest.mark.parametrize(
    "method",
    [
        jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica"),
        jaxcomp.local_steps(optax.sgd(0.1), "replica", every=4),
    ],
)
def test_a_drift_in_a_schedule_free_average(method):
    """Between exchanges the replicas trained as without it, and an exchange undid a part."""
    with pytest.raises(ValueError, match="schedule_free is around a method whose replicas drift"):
        init(optax.contrib.schedule_free(method, 0.1))
    average = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
    init(optax.contrib.schedule_free(TX, 0.1))
    init(jaxcomp.local_steps(average, "replica", every=4))
    init(jaxcomp.local_steps(optax.sgd(0.1), "replica", every=4, outer=average))


@pytest.mark.parametrize("method", [TX, jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica")])
def test_a_factor_that_each_replica_would_find_by_itself(method):
    with pytest.raises(ValueError, match=r"mechanize is around a method that exchanges.*chain\("):
        init(optax.contrib.mechanize(method))
    mechanic = optax.contrib.mechanize(optax.sgd(0.1))
    init(optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), mechanic))
    init(jaxcomp.cocktail_sgd(mechanic, "replica"))


def test_a_drift_of_complex_parameters_that_are_split():
    """After a mean they are split as on one device."""
    split = optax.contrib.split_real_and_imaginary
    params = {"real": jnp.ones(3), "both": jnp.ones(3, jnp.complex64)}
    drifting = split(jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica"))
    with pytest.raises(ValueError, match="split_real_and_imaginary is around .*jax.lax.complex"):
        init(drifting, params)
    init(drifting)
    init(split(TX), params)
    with pytest.raises(ValueError, match="dtype complex64.*write jax.lax.complex"):
        init(TX, params)


@pytest.mark.parametrize("name", [None, 1e-3, [None]])
def test_what_is_no_axis(name):
    with pytest.raises(ValueError, match="mesh axis belongs; write 'replica'.* swapped"):
        jaxcomp.per_replica(TX, name)
    with pytest.raises(ValueError, match="mesh axis belongs"):
        init(jaxcomp.slamb(1e-3, name))


def test_two_axes_of_a_mesh_are_no_axis_of_replicas():
    with pytest.raises(ValueError, match="Replicas are along one: write its name"):
        jaxcomp.train_step(loss_fn, TX, mesh_of(1, 2), ("replica", "fsdp"))


def test_a_method_whose_parameters_are_flattened():
    tx = optax.flatten(jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica"))
    init, step = jaxcomp.train_step(loss_fn, tx, mesh_of(2), "replica")
    state = jax.eval_shape(init, PARAMS)
    with pytest.raises(ValueError, match=r"shape \(54,\).* leave out optax.flatten"):
        jax.eval_shape(step, PARAMS, state, jnp.zeros(2))


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda: jaxcomp.cocktail_sgd("replica", optax.sgd(0.1)), "cocktail_sgd"),
        (lambda: jaxcomp.local_steps("replica", optax.sgd(0.1), every=2), "local_steps"),
        (lambda: jaxcomp.per_layer(loss_fn, TX), "per_layer"),
        (lambda: jaxcomp.train_step(TX, loss_fn, mesh_of(2), "replica"), "train_step"),
    ],
)
def test_swapped_arguments(make, of):
    with pytest.raises(ValueError, match=f"{of} got .* where an optax transformation belongs"):
        make()


def test_a_state_in_the_place_of_parameters():
    init, step = jaxcomp.train_step(loss_fn, TX, mesh_of(2), "replica")
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = jax.eval_shape(init, params)
    with pytest.raises(
        ValueError, match=r"got a CompressedMeanState .* step\(params, state, batch"
    ):
        jax.eval_shape(step, state, params, jnp.ones(4))
    with pytest.raises(ValueError, match="where the parameters belong"):
        jaxcomp.local_params(state, params, "replica")


def test_parameters_that_optax_leaves_out():
    made = jaxcomp.train_step(loss_fn, TX, mesh_of(2), "replica").init
    with pytest.raises(ValueError, match="without arrays.*tree_map_params.*jaxcomp.state_specs"):
        optax.tree_utils.tree_map_params(made, lambda x: x, jax.eval_shape(made, PARAMS))


def test_a_state_that_the_first_update_makes_larger():
    measure = {"norm": optax.tree.norm}
    with pytest.raises(ValueError, match=r"measurements\['norm'\].* write optax.snapshot"):
        init(optax.chain(TX, optax.monitor(measure)))
    init(optax.chain(TX, optax.snapshot("norm", optax.tree.norm)))


def test_an_optimizer_that_needs_the_loss_as_a_function():
    with pytest.raises(ValueError, match="obj_fn must be provided.* write another optimizer"):
        init(optax.chain(TX, optax.contrib.sophia(1e-3)))


def test_pmap_is_told_what_to_write():
    run = jax.pmap(lambda x: jaxcomp.per_replica(TX, "replica").init(PARAMS), axis_name="replica")
    with pytest.raises(ValueError, match="jax.pmap never checks them: write jax.shard_map"):
        run(jnp.ones((2, 3)))


@pytest.mark.parametrize("rate", [math.nan, math.inf, "1e-3", None])
@pytest.mark.parametrize("make", [jaxcomp.slamb, jaxcomp.demo])
def test_a_rate_that_is_none(make, rate):
    with pytest.raises(ValueError, match="learning_rate=.*needs a finite number or a schedule"):
        make(rate, "replica")


def test_a_choice_of_each_replica_to_exchange():
    skipping = optax.MultiSteps(TX, 2, should_skip_update_fn=optax.skip_not_finite)
    with pytest.raises(ValueError, match="exchanges in a branch that each replica takes or leaves"):
        init(skipping.gradient_transformation())
    behind = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite)
    init(optax.chain(TX, behind.gradient_transformation()))
    # Before the mean each replica counts by itself, which JAX's types of a branch do not tell.
    counted, _ = init(optax.chain(behind.gradient_transformation(), TX))
    assert counted.mini_step.shape == counted.gradient_step.shape == (2,)


def test_an_optimizer_that_takes_no_argument_of_a_step():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    with pytest.raises(ValueError, match="argument 'value'. .*GradientTransformation.sam.init"):
        init(optax.chain(TX, sam))
    init(optax.chain(TX, optax.GradientTransformation(sam.init, lambda *args: sam.update(*args))))


def test_two_means_in_one_chain():
    twice = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), TX)
    with pytest.raises(ValueError, match="another method stands before .* leave one of them out"):
        init(twice)


def test_an_optimizer_that_searches_along_a_line():
    with pytest.raises(ValueError, match=r"'value_fn'.* write optax.lbfgs\(0.1, linesearch=None"):
        init(optax.chain(TX, optax.lbfgs()))
    init(optax.chain(TX, optax.lbfgs(0.1, linesearch=None)))


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (optax.contrib.galore(1e-3, rank=2), "galore"),
        (optax.MultiSteps(CLIPPED, 1), r"MultiSteps; write jaxcomp\.clip_by_global_norm for it"),
    ],
    ids=["galore", "clip_by_global_norm"],
)
def test_an_optimizer_that_branches_on_shards(optimizer, told):
    whole = optax.chain(TX, optimizer)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    init(whole, params)
    specs = {"w": jax.P("fsdp"), "b": jax.P()}
    made = jaxcomp.train_step(loss_fn, whole, mesh_of(2, 2), "replica", param_specs=specs)
    with pytest.raises(ValueError, match=rf"shards over \('fsdp',\) as whole .*{told}"):
        jax.eval_shape(made.init, params)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_parameters_of_one_byte(dtype):
    params = {"wide": jnp.ones(8), "narrow": jnp.ones(8, dtype)}
    told = f"'narrow'.* has dtype {dtype}.*keep it in bfloat16"
    with pytest.raises(ValueError, match=told):
        init(jaxcomp.master_weights(TX), params)
    with pytest.raises(ValueError, match=told):
        jaxcomp.qsdp("replica").shard(params, mesh_of(2))


PLATEAU = optax.contrib.reduce_on_plateau(patience=5)


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: jaxcomp.cocktail_sgd(inner, "replica"),
        lambda inner: jaxcomp.local_steps(inner, "replica", every=2),
    ],
)
def test_a_plateau_inside_of_what_trains_alone(around):
    with pytest.raises(ValueError, match="reduce_on_plateau is inside .* outer=optax.chain"):
        init(around(optax.chain(optax.adam(1e-2), PLATEAU)))


def test_a_plateau_where_replicas_are_alike():
    init(optax.chain(TX, PLATEAU))
    outer = optax.chain(optax.sgd(0.7, momentum=0.9, nesterov=True), PLATEAU)
    init(jaxcomp.local_steps(optax.adam(1e-2), "replica", every=2, outer=outer))


@pytest.mark.parametrize("name", ["conditionally_mask", "conditionally_transform"])
def test_steps_that_a_method_is_left_out_of(name):
    every_other = lambda inner: getattr(optax.transforms, name)(inner, lambda step: step % 2 == 0)
    with pytest.raises(ValueError, match=f"{name} is around .*chain.*{name}.optax.adamw"):
        init(every_other(TX))
    init(optax.chain(TX, every_other(optax.adam(1e-2))))


@pytest.mark.parametrize("mesh", [None, "replica"])
def test_what_is_no_mesh(mesh):
    with pytest.raises(ValueError, match="where the mesh belongs; write jax.make_mesh"):
        jaxcomp.train_step(loss_fn, TX, mesh, "replica")


@pytest.mark.parametrize("argument", ["param_specs", "batch_specs"])
@pytest.mark.parametrize("specs", ["fsdp", (None, "fsdp"), NamedSharding(mesh_of(2), jax.P())])
def test_what_is_no_spec(argument, specs):
    made = jaxcomp.train_step(loss_fn, TX, mesh_of(2, 2), "replica", **{argument: specs})
    with pytest.raises(ValueError, match=f"{argument}.* is .*no jax.sharding.PartitionSpec; write"):
        jax.eval_shape(made.step, PARAMS, jax.eval_shape(made.init, PARAMS), jnp.ones(4))


def test_one_axis_for_replicas_and_their_devices():
    made = jaxcomp.train_step(loss_fn, TX, mesh_of(2), "replica", fast_axis="replica")
    with pytest.raises(ValueError, match="fast_axis is 'replica', the axis of the replicas"):
        jax.eval_shape(made.init, PARAMS)
