"""The whole step: on one axis and on two, all replicas skip together, and what it sends."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks import codes
from jaxcomp import report
from tests.helpers import layered, replicas
from tests.helpers.layered import ROUNDING, assert_close, make_batch
from tests.helpers.layered import pair_loss as loss_fn
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows, transform

HIDDEN = 128


make_params = functools.partial(layered.make_pair, HIDDEN)
plain_training = functools.partial(layered.plain_training, loss_fn=loss_fn, params=make_params())


def put(mesh, params, param_specs=None):
    if param_specs is None:
        return everywhere(mesh, params)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in param_specs.items()}
    return jax.device_put(params, shardings)


def quantized_adam(**options):
    mean = jaxcomp.compressed_mean(jaxcomp.quantize(4, block=8), "replica", **options)
    return optax.chain(mean, optax.adam(1e-2))


def train(mesh, tx, num_steps=3, loss_fn=loss_fn, **options):
    """Runs some steps: `(parameters, state, metrics of each step)`."""
    made = jaxcomp.train_step(loss_fn, tx, mesh, "replica", **options)
    batches, make = map(make_batch, range(num_steps)), lambda *args, **options: made
    found = replicas.trained(loss_fn, tx, mesh, make_params(), batches, make, **options)
    assert made.step._cache_size() == 1
    return found


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_identity_trains_as_one_device_does_on_the_whole_batch(num_replicas):
    mesh = mesh_of(num_replicas)
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    params, _, history = train(mesh, optax.chain(mean, optax.sgd(0.5)))
    want, losses, _ = plain_training(optax.sgd(0.5))
    assert_close({name: one_value(x) for name, x in params.items()}, want, ROUNDING)
    for metrics, loss in zip(history, losses, strict=True):
        assert metrics["loss"].shape == (num_replicas,) and not metrics["skipped"]
        assert abs(metrics["loss"].mean(dtype=np.float64) - loss) < 1e-6 * loss
    parts = {name: np.split(x, num_replicas) for name, x in make_batch().items()}
    for i, loss in enumerate(history[0]["loss"]):
        own = loss_fn(make_params(), {name: x[i] for name, x in parts.items()})
        assert abs(loss - own) < 1e-6 * loss


def test_microbatches_add_up_to_the_batch_and_are_exchanged_once():
    mesh, accumulate = mesh_of(2), 3
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    tx = optax.chain(mean, optax.sgd(0.5))
    params, _, history = train(mesh, tx, accumulate=accumulate)
    want, losses, _ = plain_training(optax.sgd(0.5))
    assert_close({name: one_value(x) for name, x in params.items()}, want, ROUNDING)
    assert abs(history[-1]["loss"].mean(dtype=np.float64) - losses[-1]) < 1e-6 * losses[-1]

    compiled = compile_step(mesh, quantized_adam(), accumulate=accumulate)
    once = compile_step(mesh, quantized_adam())
    assert report.collectives(compiled, mesh) == report.collectives(once, mesh)


def compile_step(mesh, tx, param_specs=None, **options):
    options["param_specs"] = param_specs
    init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica", **options)
    params = put(mesh, make_params(), param_specs)
    return step.lower(params, init(params), rows(mesh, make_batch())).compile()


FSDP = {"bias": P(), "down": P("fsdp"), "up": P(None, "fsdp")}
TENSOR = {"bias": P("tensor"), "down": P("tensor"), "up": P(None, "tensor")}
MIXED = {"bias": P(), "down": P(), "up": P("fsdp")}
ALL_SHARDED = {"bias": P("fsdp"), "down": P(None, "fsdp"), "up": P("fsdp")}
LAYOUTS = {
    "fsdp": ("fsdp", FSDP),
    "tensor": ("tensor", TENSOR),
    "some leaves sharded": ("fsdp", MIXED),
    "all leaves sharded": ("fsdp", ALL_SHARDED),
}


def sizes_of_shards(param_specs):
    params = make_params()
    return {name: x.size // (2 if any(param_specs[name]) else 1) for name, x in params.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_axis_changes_no_result_and_only_messages_cross_the_first(layout):
    second, param_specs = LAYOUTS[layout]
    mesh = mesh_of(2, 2, second=second)
    exact = lambda path, leaf: path == "bias"
    code = jaxcomp.quantize(4, block=8)

    def tx(code, optimizer):
        return optax.chain(jaxcomp.compressed_mean(code, "replica", exact=exact), optimizer)

    plain = tx(jaxcomp.identity(), optax.sgd(0.5))
    params, _, history = train(mesh, plain, param_specs=param_specs)
    want, losses, _ = plain_training(optax.sgd(0.5))
    assert_close(params, want, ROUNDING)
    assert {name: x.sharding.spec for name, x in params.items()} == param_specs
    assert abs(history[-1]["loss"].mean(dtype=np.float64) - losses[-1]) < 1e-6 * losses[-1]
    assert int(jaxcomp.replica_spread(params, mesh, "replica")) == 0

    compiled = compile_step(mesh, tx(code, optax.adam(1e-2)), param_specs)
    crossing = [m for m in report.collectives(compiled, mesh) if "replica" in m.axes]
    sizes = sizes_of_shards(param_specs)
    # Two replicas each own half of a bucket: 4 bits a value and a bfloat16 for 8 of them, to whole
    # units of 16 bytes. What is sharded and what is not lie in buckets of their own.
    together = any(param_specs["up"]) == any(param_specs["down"])
    shards = [sizes["up"] + sizes["down"]] if together else [sizes["up"], sizes["down"]]
    chunks = [16 * math.ceil((size // 2 // 2 + size // 2 // 8 * 2) / 16) for size in shards]
    want = [("all-gather", chunk, 1) for chunk in chunks]
    want += [("all-to-all", 2 * chunk, 1) for chunk in chunks]
    want += [("all-reduce", 4 * sizes["bias"], 1)]
    assert sorted((m.op, m.operand_bytes, m.count) for m in crossing) == sorted(want)
    for message in crossing:
        assert message.axes == ("replica",)
        types = {shape.split("[")[0] for shape in message.shape.split(", ")}
        assert types == ({"f32"} if message.op == "all-reduce" else {"u8"})


@pytest.mark.parametrize("method", ["compressed_mean", "sharded_optimizer"])
def test_leaves_are_small_by_the_elements_of_all_their_shards(method):
    # A shard of one of the matrices, both of 2,048 elements, has 512.
    mesh = mesh_of(2, 4)
    tx = {
        "compressed_mean": quantized_adam(),
        "sharded_optimizer": jaxcomp.sharded_optimizer(optax.adam(1e-2), "replica"),
    }[method]
    params, state, _ = train(mesh, tx, param_specs=FSDP)
    if method == "compressed_mean":
        assert report.exact_leaves(params, state) == ["bias"]
    messages = report.collectives(compile_step(mesh, tx, FSDP), mesh)
    # Less than those 1,024 elements in float32; exact, they are sent at least once.
    assert sum(m.operand_bytes for m in messages if m.axes == ("replica",)) < 4 * 1024


def test_small_leaves_stay_small_where_updates_vary():
    # 640 elements, which the two replicas have 1,280 of.
    params = {"kernel": jnp.zeros((16, 40))}
    init, update = transform(quantized_adam(), mesh_of(2), params)
    state = init(params)
    grads = rows(mesh_of(2), {"kernel": jnp.ones((2, 16, 40))})
    assert report.exact_leaves(params, state) == ["kernel"]
    assert report.exact_leaves(params, update(grads, state, params)[1]) == ["kernel"]


def test_blocks_that_are_whole_on_every_shard_are_quantized_alike():
    # Both matrices are sharded along their first axis, so that a shard's buckets, chunks and
    # blocks of 16 are rows of the whole; each matrix is one bucket.
    specs = {"bias": P(), "down": P("fsdp"), "up": P("fsdp")}
    exact = lambda path, leaf: path == "bias"
    tx = optax.chain(
        jaxcomp.compressed_mean(
            jaxcomp.quantize(8, block=16, scale_dtype="float32"), "replica", exact=exact
        ),
        optax.sgd(0.5),
    )
    whole, state, _ = train(mesh_of(2), tx, num_steps=1)
    sharded, sharded_state, _ = train(mesh_of(2, 2), tx, num_steps=1, param_specs=specs)
    # The same codes from gradients that differ by rounding; one code in a hundred may flip at
    # a tie, by a step of a 127th of a block's maximum.
    for name in ("down", "up"):
        difference = np.abs(np.asarray(whole[name]) - np.asarray(sharded[name]))
        assert np.mean(difference > ROUNDING) < 0.01


def test_the_end_of_a_warm_up_is_found_on_shards_as_on_whole_parameters():
    specs = {"bias": P(), "down": P("fsdp"), "up": P("fsdp")}
    tx = jaxcomp.one_bit_adam(1e-2, "replica", b2=0.75, freeze_ratio=0.5)
    _, whole, _ = train(mesh_of(2), tx, num_steps=6)
    _, sharded, _ = train(mesh_of(2, 2), tx, num_steps=6, param_specs=specs)
    np.testing.assert_allclose(sharded.norms, whole.norms, rtol=1e-5)
    assert bool(one_value(sharded.frozen)) and bool(whole.frozen)


@pytest.mark.parametrize("layout", ["one axis", "tensor", "some leaves sharded"])
def test_one_bad_value_on_one_device_makes_all_skip_together(layout):
    def blamed_loss(params, batch):
        blame = jnp.sum(batch["blame"], axis=0)
        ends = [params["bias"][-1], params["down"][0, 0], params["up"][-1, -1]]
        return loss_fn(params, batch) + sum(
            end * weight for end, weight in zip(ends, blame, strict=True)
        )

    second, specs = LAYOUTS.get(layout, (None, None))
    mesh = mesh_of(2, 2, second=second) if second else mesh_of(2)
    options = {"param_specs": specs}
    init, step = jaxcomp.train_step(blamed_loss, quantized_adam(), mesh, "replica", **options)
    params = put(mesh, make_params(), specs)
    good = make_batch() | {"blame": np.zeros((24, 3), np.float32)}
    params, state, metrics = step(params, init(params), rows(mesh, good))
    assert not metrics["skipped"]
    before = jax.tree.map(np.array, (params, state))
    for leaf, value in enumerate((np.nan, np.nan, np.inf)):
        bad = jax.tree.map(np.copy, good)
        bad["blame"][-1, leaf] = value
        params, state, metrics = step(params, state, rows(mesh, bad))
        assert bool(one_value(metrics["skipped"]))
        for old, new in zip(*map(jax.tree.leaves, (before, (params, state))), strict=True):
            assert old.tobytes() == np.asarray(new).tobytes()
    params, state, metrics = step(params, state, rows(mesh, good))
    assert not metrics["skipped"] and int(state[0].count) == 2
    assert np.any(before[0]["up"] != np.asarray(params["up"]))
    assert int(jaxcomp.replica_spread(params, mesh, "replica")) == 0
    assert step._cache_size() == 1


def test_freezing_without_a_mean_is_refused_by_what_to_write():
    tx = optax.partition(
        {"train": quantized_adam(), "freeze": optax.set_to_zero()},
        {"bias": "freeze", "down": "train", "up": "train"},
    )
    with pytest.raises(ValueError, match=r"\['bias'\].*with optax.set_to_zero\(\) after the mean"):
        train(mesh_of(2), tx, num_steps=1)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (make_batch(size=23), r"shape \(23, 16\).*divisible by 12"),
        (make_batch(size=6), r"shape \(6, 16\).*divisible by 12"),
        ({"x": np.float32(1)}, r"shape \(\), but its first axis must be divisible by 12"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(batch, text):
    init, step = jaxcomp.train_step(loss_fn, quantized_adam(), mesh_of(3), "replica", accumulate=4)
    params = everywhere(mesh_of(3), make_params())
    with pytest.raises(ValueError, match=text):
        step(params, init(params), batch)


def test_wrong_arguments_are_refused():
    make = functools.partial(jaxcomp.train_step, loss_fn, quantized_adam())
    for accumulate in (0, 2.0, None):
        with pytest.raises(ValueError, match=f"accumulate is {accumulate}; write at least 1"):
            make(mesh_of(2), "replica", accumulate=accumulate)
    with pytest.raises(ValueError, match=r"no axis 'data'; its axes are \('replica',\)"):
        jaxcomp.train_step(loss_fn, quantized_adam(), mesh_of(2), "data")
    with pytest.raises(ValueError, match=r"no axis 'data'; its axes are \('replica',\)"):
        jaxcomp.eval_step(loss_fn, mesh_of(2), "data")


def test_a_transformation_that_does_not_average_is_refused():
    train_step = jaxcomp.train_step(loss_fn, optax.sgd(0.5), mesh_of(2), "replica")
    params = everywhere(mesh_of(2), make_params())
    with pytest.raises(ValueError, match="nothing in it averages over the rep"):
        train_step.step(params, train_step.init(params), rows(mesh_of(2), make_batch()))


@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=["a copy", "a shard"])
@pytest.mark.parametrize("place", [0, -1])
def test_what_went_astray_is_seen(sizes, place):
    mesh = mesh_of(*sizes)
    params = everywhere(mesh, {"flags": np.ones(3, bool), "n": np.int32(3)})
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    x = jax.device_put(x, NamedSharding(mesh, P() if len(sizes) == 1 else P("fsdp")))
    assert int(jaxcomp.replica_spread(params | {"x": x}, mesh, "replica")) == 0
    parts = [np.array(shard.data) for shard in x.addressable_shards]
    parts[1].flat[place] = np.nextafter(parts[1].flat[place], np.inf)
    devices = [shard.device for shard in x.addressable_shards]
    parts = list(map(jax.device_put, parts, devices))
    astray = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    assert int(jaxcomp.replica_spread(params | {"x": astray}, mesh, "replica")) != 0


def test_copies_of_any_dtype_are_compared():
    mesh = mesh_of(2)
    params = {
        "complex": jnp.ones((), jnp.complex64),
        "key": jax.random.key(0),
        "narrow": jnp.ones(3, jnp.int4),
        "numpy": np.zeros((0, 2)),
    }
    assert int(jaxcomp.replica_spread(params, mesh, "replica")) == 0
    with pytest.raises(ValueError, match="no axis 'data'; its axes are"):
        jaxcomp.replica_spread(params, mesh, "data")


def test_leaves_in_each_others_place_are_seen():
    mesh = mesh_of(2)

    def copies(*values):
        parts = [
            jax.device_put(np.float32(x), d) for x, d in zip(values, mesh.devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays((), NamedSharding(mesh, P()), parts)

    swapped = {"one": copies(1, 2), "two": copies(2, 1)}
    assert int(jaxcomp.replica_spread(swapped, mesh, "replica")) != 0


@pytest.mark.parametrize(
    "row",
    [row for row in codes.HELD if row.target is not None],
    ids=lambda row: f"{row.name} {row.replicas}",
)
def test_memory_of_a_step_stays_within_its_bound_above_the_dense_one(row):
    numel = 2**20  # a CPU compiles that in a moment
    assert codes.gradients_above_dense(row, numel) <= row.target
