"""What an island takes for parameters, and where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.islands import trees
from tests.helpers.exact_islands import START, equal, moved, together


@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_of_training_may_donate_its_parameters(join, delay):
    """And a counter among them, which is not exchanged."""
    begins = jax.tree.map(jnp.asarray, {**START, "steps": np.int32(0)})
    island = join("a", begins, delay=delay, every=2)
    train = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    train(begins)
    params = island.params
    for _ in range(6):
        params = island.step(train(params))
    assert island.rounds == 3 - delay and island.params["steps"] == 0
    # With a delay the step after each message is lost: at the outer step nothing of it is kept.
    equal(island.leave(params), {**moved(START, 6 - 2 * delay), "steps": 6})


@pytest.mark.parametrize(
    "params",
    [
        {"bias": START["bias"]},
        {**START, "bias": np.zeros(7)},
        {**START, "bias": np.zeros(6, np.int32)},
    ],
)
def test_parameters_of_another_structure_are_told_at_once(join, params):
    island = join("a", every=100)
    with pytest.raises(ValueError, match="another structure"):
        island.step(params)
    with pytest.raises(ValueError, match="another structure"):
        island.leave(params)
    assert island.step({**START, "bias": jnp.ones(6)})["bias"][0] == 1  # as any array


def test_a_step_between_rounds_reads_no_array(join, monkeypatch):
    """To put hundreds of leaves on another mesh would cost milliseconds."""
    island, parameters = join("a", every=2), jax.tree.map(jnp.array, START)
    monkeypatch.setattr(trees, "floats", None)
    for x in parameters.values():
        x.delete()
    assert island.step(parameters) is parameters


def test_sharded_parameters_are_encoded_where_they_lie(join):
    """One island has its matrix on four devices, the other on one: they read each other."""
    mesh = jax.make_mesh((4,), ("fsdp",))
    options = {"code": jaxcomp.quantize(4, block=8), "outer": optax.sgd(lambda count: 1.0)}
    kernel = np.arange(64, dtype=np.float32).reshape(8, 8)
    place = {"kernel": NamedSharding(mesh, P("fsdp")), "bias": NamedSharding(mesh, P())}
    start = {"kernel": kernel, "bias": np.zeros(6, np.float32)}
    first = join("a", jax.device_put(start, place), quorum=2, **options)
    second = join("b", start, quorum=2, **options)
    found = {}
    more = jax.device_put(start["kernel"] % 7, place["kernel"])
    stepped = {**first.params, "kernel": first.params["kernel"] + more}
    together(
        lambda: found.update(a=first.step(stepped)),
        lambda: found.update(b=second.step(second.params)),
    )  # fmt: skip
    equal(found["a"], found["b"])
    assert found["a"]["kernel"].sharding.is_equivalent_to(place["kernel"], 2)
    assert np.abs(found["a"]["kernel"] - (kernel + kernel % 7 / 2)).max() < 0.25
    sent = jax.eval_shape(
        lambda *of: first._programs[0].encode(*of)[0],
        first._consensus[0], first._consensus[0], None, np.int32(0), np.int32(0),
    )  # fmt: skip
    assert sorted(x.shape[0] for x in jax.tree.leaves(sent)) == [1, 4]


def test_a_fragment_may_have_nothing_to_send(join):
    empty = np.zeros((0, 3), np.float32)
    island = join(
        "a", {**START, "empty": empty}, fragments=lambda path, x: int(x.size == 0), every=2
    )
    params = island.params
    for _ in range(4):
        params = island.step(moved(params, 1))
    assert island.rounds == 4
    equal(island.leave(params), {**moved(START, 4), "empty": empty})


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("shards", [(), ("kernel",)])
def test_arrays_that_are_on_no_device_yet_go_where_training_puts_them(join, array, shards):
    """Parameters as a model makes them, and a batch or some of the parameters on four devices."""
    place = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
    begins = {"kernel": array(np.ones((8, 3), np.float32)), "scale": array(np.float32(1))}
    begins |= {name: jax.device_put(begins[name], place) for name in shards}
    batch = jax.device_put(np.ones(8, np.float32), place)
    train = jax.jit(lambda p, x: jax.tree.map(lambda w: w + x.mean(), p))
    island = join("a", begins, every=2)
    params = train(begins, batch)
    for _ in range(3):
        params = train(island.step(params), batch)
    equal(island.step(params), island.params)
    equal(train(island.params, batch)["scale"], 6)
    equal(island.leave(params), {"kernel": np.full((8, 3), 5), "scale": 5})


def test_other_leaves_stay_and_narrow_ones_keep_their_dtype(join):
    params = {"w": jnp.ones(4, jnp.bfloat16), "act": jnp.tanh, "steps": np.int32(3)}
    island = join("a", params)
    got = island.step({**params, "w": params["w"] + 2})
    assert got["w"].dtype == jnp.bfloat16 and got["act"] is jnp.tanh and got["steps"] == 3
    np.testing.assert_array_equal(got["w"].astype(np.float32), 3)
