"""Steps that donate get one array several times: it is copied, and the process goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxcomp
import jaxcomp.flax
from jaxcomp.steps.compiling import Donating
from tests.helpers.replicas import everywhere, mesh_of

WEIGHT = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
NAMES = ("first", "second")


def loss(params, batch):
    for name in NAMES:
        batch = jnp.tanh(batch @ params[name]["kernel"] + params[name]["bias"][None])
    return jnp.mean((batch - 0.5) ** 2)


def keeping() -> optax.GradientTransformation:
    """An optimizer whose state begins as the parameters themselves."""
    update = lambda grads, state, params: (jax.tree.map(lambda g: -0.1 * g, grads), params)
    return optax.GradientTransformation(lambda params: params, update)


TX = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(8), "replica"), keeping())
CODE = jaxcomp.cocktail(1 / 2, 0.25, block=16)


def apart():
    make = lambda: {"kernel": jnp.array(WEIGHT), "bias": jnp.zeros(8) + 0}
    return {name: make() for name in NAMES}


def one_object():
    return dict.fromkeys(NAMES, apart()["first"])


def views(mesh):
    """Different arrays, which share the first device's buffers."""
    return jax.device_put(one_object(), jax.sharding.NamedSharding(mesh, jax.P()))


def trained(functions, params, batch=WEIGHT, compiled=False, steps=3):
    """Losses and parameters after some steps."""
    state, step, losses = functions.init(params), functions.step, []
    if compiled and hasattr(step, "lower"):
        step = step.lower(params, state, batch).compile()
    elif compiled:
        step = step.compile(params, state, batch)
    for _ in range(steps):
        params, state, metrics = step(params, state, batch)
        losses.append(np.asarray(metrics["loss"]))
    return jax.device_get((losses, params))


def same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


MAKERS = {
    "train": lambda mesh: jaxcomp.train_step(loss, TX, mesh, "replica"),
    "simulated": lambda mesh: jaxcomp.simulated_train_step(loss, TX, 2, "replica"),
    "overlapped": lambda mesh: jaxcomp.overlapped_train_step(
        loss, jaxcomp.cocktail_sgd(keeping(), "replica", compressor=CODE), mesh, "replica"
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_one_array_in_two_leaves_trains_as_two_arrays_do(name, compiled):
    mesh = mesh_of(2)
    functions = MAKERS[name](mesh)
    same(*[trained(functions, make(), compiled=compiled) for make in (one_object, apart)])
    if name != "simulated":
        wanted = trained(functions, everywhere(mesh, apart()), compiled=compiled)
        same(trained(functions, views(mesh), compiled=compiled), wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_or_a_part_of_the_state_may_be_a_parameter(name):
    mesh = mesh_of(2)
    init, step = MAKERS[name](mesh)
    found = []
    for shared in (True, False):
        params = apart() if name == "simulated" else everywhere(mesh, apart())
        params, state, _ = step(params, init(params), WEIGHT)
        leaf = params["first"]["kernel"]
        kept = jnp.copy(leaf) if not shared else leaf
        mine = lambda x, leaf=leaf, kept=kept: kept if x.shape == leaf.shape else x
        shape = jax.tree.structure(params)
        like = lambda node, shape=shape: jax.tree.structure(node) == shape
        swap = lambda node, like=like, mine=mine: jax.tree.map(mine, node) if like(node) else node
        state = jax.tree.map(swap, state, is_leaf=like)
        params, state, _ = step(params, state, kept)
        found.append(jax.device_get((params, kept)))
    same(*found)


def test_shards_and_what_is_named_are_copied_too():
    mesh, fsdp = mesh_of(2), jaxcomp.qsdp("replica")

    def of_shards(shards, batch):
        return loss(fsdp.gather(shards), batch)

    init, step = jaxcomp.qsdp_train_step(of_shards, optax.adam(0.1), mesh, fsdp)
    found = []
    for shared in (True, False):
        shards = fsdp.shard(apart(), mesh)
        shards["second"] = shards["first"] if shared else jax.tree.map(jnp.copy, shards["first"])
        shards, state, metrics = step(shards, state=init(shards), batch=WEIGHT)
        found.append(jax.device_get((jax.tree.leaves(shards), metrics)))
    same(*found)
    params = one_object()
    init, step = jaxcomp.train_step(loss, TX, mesh, "replica")
    step(params=params, state=init(params), batch=WEIGHT)


class Twice(nnx.Module):
    """Two layers of one array each; one of them may be frozen."""

    def __init__(self, make, kind=nnx.Param):
        zeros = make()["first"]["kernel"]
        self.first = nnx.Param(zeros)
        self.second = kind(zeros if make is one_object else jnp.copy(zeros))

    def __call__(self, x):
        return jnp.tanh(jnp.tanh(x @ self.first) @ self.second)


class Frozen(nnx.Param):
    """A parameter that no optimizer changes."""


@pytest.mark.parametrize("kind", [nnx.Param, nnx.BatchStat, Frozen])
def test_models_of_flax_may_hold_one_array_twice(kind):
    mesh, found = mesh_of(2), []
    step = jaxcomp.flax.train_step(lambda model, batch: jnp.mean((model(batch) - 0.5) ** 2))
    for make in (one_object, apart):
        model = Twice(make, kind)
        tx = jaxcomp.flax.on_mesh(TX, mesh, "replica")
        wrt = nnx.Not(Frozen) if kind is Frozen else nnx.Param
        wrt = nnx.All(nnx.Param, wrt)
        optimizer = nnx.Optimizer(model, tx, wrt=wrt)
        losses = [jax.device_get(step(model, optimizer, WEIGHT)["loss"]) for _ in range(3)]
        found.append((losses, jax.device_get(nnx.to_pure_dict(nnx.state(model)))))
    same(*found)


def test_a_train_state_may_hold_one_array_twice():
    mesh, found = mesh_of(2), []
    step = jaxcomp.flax.train_state_step(loss)
    for make in (one_object, apart):
        tx = jaxcomp.flax.on_mesh(TX, mesh, "replica")
        state = TrainState.create(apply_fn=None, params=make(), tx=tx)
        for _ in range(3):
            state, _ = step(state, WEIGHT)
        found.append(jax.device_get(state.params))
    same(*found)


def test_keys_are_copied_and_what_is_traced_is_left_alone():
    mesh = mesh_of(2)
    key = jax.random.key(0)
    step = Donating(jax.jit(lambda params, state: (params, state), donate_argnums=(0, 1)))
    a, b = step(key, {"same": key})
    assert jax.random.key_data(a).tolist() == jax.random.key_data(b["same"]).tolist()
    init, step = jaxcomp.train_step(loss, TX, mesh, "replica")
    params = apart()
    state = init(params)
    twice = jax.make_jaxpr(lambda p, s: step(dict.fromkeys(NAMES, p["first"]), s, WEIGHT))
    assert "copy" not in str(twice(params, state).jaxpr.eqns[0].primitive)
    shapes = jax.eval_shape(step, params, state, WEIGHT)
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(params)


def test_parameters_that_are_given_twice_are_refused():
    init, step = jaxcomp.train_step(loss, TX, mesh_of(2), "replica")
    params = apart()
    state = init(params)
    for call in (step, step.lower):
        with pytest.raises(TypeError, match="multiple values for argument 'params'"):
            call(params, state, WEIGHT, params=params)
    step(params, batch=WEIGHT, state=state)


TAKEN = r"the parameters: there is an array of shape \(8,\) at .*bias.* that is gone.*jnp.copy"


def test_what_a_step_has_taken_is_refused():
    """JAX would end the process, since there are several CPU devices."""
    mesh = mesh_of(2)
    init, step = jaxcomp.train_step(loss, TX, mesh, "replica")
    old = everywhere(mesh, apart())
    state = init(old)
    params, new, _ = step(old, state, WEIGHT)
    for function in (step, step.lower(params, new, WEIGHT).compile()):
        with pytest.raises(ValueError, match=TAKEN):
            function(old, new, WEIGHT)
        with pytest.raises(ValueError, match="the state: there is .*Go on with what that"):
            function(params, state=state, batch=WEIGHT)
    with pytest.raises(ValueError, match="the state: there is an array"):
        jaxcomp.resize(state, new)
    step(params, new, WEIGHT)


FSDP = jaxcomp.qsdp("replica")
REFUSING = {
    "init": lambda mesh, old: MAKERS["train"](mesh).init(old),
    "mean_params": lambda mesh, old: jaxcomp.mean_params(old, (), mesh, "replica"),
    "eval_step": lambda mesh, old: jaxcomp.eval_step(loss, mesh, "replica")(old, (), WEIGHT),
    "replica_spread": lambda mesh, old: jaxcomp.replica_spread(old, mesh, "replica"),
    "on_mesh": lambda mesh, old: jaxcomp.flax.on_mesh(TX, mesh, "replica").init(old),
    "overlapped": lambda mesh, old: MAKERS["overlapped"](mesh).step(old, (), WEIGHT),
    "shard": lambda mesh, old: FSDP.shard(old, mesh),
    "of shards": lambda mesh, old: jaxcomp.qsdp_train_step(loss, keeping(), mesh, FSDP).init(old),
    "unshard": lambda mesh, old: FSDP.unshard(old, mesh),
    "deployed": lambda mesh, old: FSDP.deployed(old, (), mesh),
}


@pytest.mark.parametrize("name", REFUSING)
def test_what_a_step_has_taken_is_refused_by_all_that_take_it(name):
    mesh = mesh_of(2)
    old = everywhere(mesh, apart())
    in_shards = name in ("unshard", "deployed")
    old = FSDP.shard(old, mesh) if in_shards else old
    jax.tree.map(lambda x: x.delete(), old)
    said = "the parameters: there is an array .* that is gone" if in_shards else TAKEN
    with pytest.raises(ValueError, match=said):
        REFUSING[name](mesh, old)
