"""Clipping on sharded meshes: what it gives is what optax gives for the whole tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows

MEAN = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
CLIP = jaxcomp.clip_by_global_norm(8.0)
SHAPES = {"bias": (6,), "down": (4, 6), "gain": (), "up": (6, 4)}
SPECS = {"bias": P(), "down": P("fsdp"), "gain": P(), "up": P(None, "fsdp")}
# Leaves that vary over one axis, the other, both and none.
SPECS_OF_THREE = SPECS | {"down": P("fsdp", "tensor"), "up": P("tensor")}


def loss_fn(params, batch):
    """Its gradient is the mean of the batch's rows."""
    return sum(jnp.sum(params[name] * jnp.mean(batch[name], axis=0)) for name in params)


def make_batch(scale=4):
    """Four rows, of integers: sums are exact, and so are norms up to their root."""
    rng = np.random.default_rng(0)
    return {
        name: scale * rng.integers(-9, 9, (4, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def make_step(mesh, specs, *chain):
    return jaxcomp.train_step(loss_fn, optax.chain(*chain), mesh, "replica", param_specs=specs)


def placed_zeros(mesh, specs):
    zeros = {name: np.zeros(SHAPES[name], np.float32) for name in specs}
    return jax.device_put(zeros, {name: NamedSharding(mesh, specs[name]) for name in specs})


def one_step(mesh, specs, batch, *chain):
    """The updates of one step, taken from parameters of zero: `(updates, skipped)`."""
    train_step = make_step(mesh, specs, *chain)
    params = placed_zeros(mesh, specs)
    params, _, metrics = train_step.step(params, train_step.init(params), rows(mesh, batch))
    assert {name: x.sharding.spec for name, x in params.items()} == specs
    for name in [name for name, spec in specs.items() if spec == P()]:
        one_value(params[name])
    return jax.tree.map(np.asarray, params), bool(metrics["skipped"])


def mean_of_rows(batch, chosen=slice(None)):
    return {name: x[chosen].mean(axis=0) for name, x in batch.items()}


def by_optax(tree):
    return jax.tree.map(np.asarray, optax.clip_by_global_norm(8.0).update(tree, None)[0])


def assert_equal(got, want, sizes=None):
    """Equal but for rounding, by default relative to the values themselves."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        # Two programs may round the quotient, the product and a sum of two differently.
        size = np.abs(x) if sizes is None else sizes[name]
        assert np.all(np.abs(np.float64(got[name]) - x) <= 3 * 2.0**-23 * size)


def mesh_of_three():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "fsdp", "tensor"))


@pytest.mark.parametrize("sharding", ["none", "fsdp", "fsdp and tensor"])
def test_after_the_mean_it_clips_as_optax_does_the_whole_mean(sharding):
    mesh, specs = {
        "none": (mesh_of(2), dict.fromkeys(SHAPES, P())),
        "fsdp": (mesh_of(2, 2), SPECS),
        "fsdp and tensor": (mesh_of_three(), SPECS_OF_THREE),
    }[sharding]
    batch = make_batch()
    got, _ = one_step(mesh, specs, batch, MEAN, CLIP)
    want = by_optax(mean_of_rows(batch))
    assert_equal(got, want)
    assert 7.99 < np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in want.values())) < 8.01


def test_before_the_mean_it_clips_each_replicas_gradient_by_its_own_norm():
    batch = make_batch()
    batch = {
        name: x * np.float32([1, 1, 4, 4]).reshape(4, *[1] * (x.ndim - 1))
        for name, x in batch.items()
    }
    got, _ = one_step(mesh_of(2, 2), SPECS, batch, CLIP, MEAN)
    first, second = (by_optax(mean_of_rows(batch, half)) for half in (slice(2), slice(2, 4)))
    want = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    assert_equal(got, want, jax.tree.map(lambda a, b: (np.abs(a) + np.abs(b)) / 2, first, second))


def test_what_is_short_enough_keeps_its_bits():
    batch = make_batch(scale=2.0**-5)
    got, _ = one_step(mesh_of(2, 2), SPECS, batch, MEAN, CLIP)
    for name, want in mean_of_rows(batch).items():
        np.testing.assert_array_equal(got[name], want)
    got, skipped = one_step(mesh_of(2, 2), SPECS, make_batch(scale=0), MEAN, CLIP)
    assert not skipped and not any(np.any(x) for x in got.values())


def test_one_bad_value_on_one_shard_makes_all_skip():
    batch = make_batch()
    batch["up"][-1, -1, -1] = np.nan
    got, skipped = one_step(mesh_of(2, 2), SPECS, batch, MEAN, CLIP)
    assert skipped and not any(np.any(x) for x in got.values())


def messages(*chain):
    mesh = mesh_of(2, 2)
    train_step = make_step(mesh, SPECS, *chain)
    params = placed_zeros(mesh, SPECS)
    batch = rows(mesh, make_batch())
    compiled = train_step.step.lower(params, train_step.init(params), batch).compile()
    return {axis: report.sent_bytes(compiled, mesh, axis) for axis in ("replica", "fsdp")}


def cocktail(*inner):
    return jaxcomp.cocktail_sgd(optax.chain(*inner), "replica", compressor=jaxcomp.quantize(4))


@pytest.mark.parametrize("place", ["after", "before", "inside cocktail_sgd"])
def test_it_sends_one_number_over_the_axis_of_shards_and_nothing_over_the_replicas(place):
    with_clip, without = {
        "after": ((MEAN, CLIP), (MEAN,)),
        "before": ((CLIP, MEAN), (MEAN,)),
        "inside cocktail_sgd": ((cocktail(CLIP, optax.sgd(1.0)),), (cocktail(optax.sgd(1.0)),)),
    }[place]
    one, other = messages(*with_clip), messages(*without)
    assert one["replica"] == other["replica"] > 0
    assert one["fsdp"] == other["fsdp"] + 4  # an all-reduce of a float32 between two shards


def inside(mesh, function, **options):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), **options)
    )


def test_without_the_replicas_axis_it_is_the_norm_over_all_axes():
    mesh = mesh_of(4)
    x = rows(mesh, np.float32([[3], [0], [4], [12]]))
    clip = jaxcomp.clip_by_global_norm(1.0)
    got = inside(mesh, lambda x: clip.update(x, clip.init(x))[0])(x)
    np.testing.assert_allclose(got, np.float32([[3], [0], [4], [12]]) / 13, rtol=2.0**-22)
    own = functools.partial(clip.update, axis_name="replica")
    got = inside(mesh, lambda x: own(x, clip.init(x))[0])(x)
    np.testing.assert_array_equal(got, [[1], [0], [1], [1]])


TREES = {
    "no leaf": {},
    "no leaf but None": {"none": None},
    "scalar": np.float32(5),
    "zero": np.float32(0),
    "nested": {"a": np.float32(-12), "b": {"c": np.zeros((0, 3), "f"), "d": np.full(1, 5, "f")}},
    "two types": {"half": jnp.full((300,), 3, "bfloat16"), "single": np.float32([[3, 4]])},
    "a norm beyond its type": jnp.full(4, 4e4, "float16"),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_of_any_form_are_clipped_and_keep_it(name):
    mesh, tree = mesh_of(2), TREES[name]
    clip = jaxcomp.clip_by_global_norm(8.0)
    got, state = clip.update(tree, clip.init(tree))
    assert jax.tree.leaves(state) == []
    inside = jax.shard_map(
        lambda t: clip.update(t, (), axis_name="replica")[0], mesh=mesh, in_specs=P(), out_specs=P()
    )
    square = sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree))
    scale = min(1.0, 8.0 / np.sqrt(square)) if square else 1.0
    for result in (got, inside(everywhere(mesh, tree))):
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        for out, x in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True):
            assert out.dtype == x.dtype and out.shape == x.shape
            # The norm, the quotient and the product, each rounded to the leaf's type.
            rtol = 3 * float(jnp.finfo(x.dtype).eps)
            np.testing.assert_allclose(np.float64(out), scale * np.float64(x), rtol=rtol)


def test_complex_leaves_are_clipped_by_their_absolute_values():
    tree = {"complex": np.complex64([3 + 4j, 12j]), "real": np.float32([84])}
    got, _ = jaxcomp.clip_by_global_norm(8.5).update(tree, ())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y / 10, rtol=1e-6), got, tree)


def test_the_norm_of_half_precision_leaves_is_summed_in_float32():
    x = jnp.full(2**16, 1.0, "bfloat16")  # in bfloat16 a sum of ones ends at 256
    got, _ = jaxcomp.clip_by_global_norm(1.0).update(x, ())
    assert np.all(np.float32(got) == 2.0**-8)


OPTAX = optax.clip_by_global_norm(8.0)
QUANTIZED = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
ALL_SHARDED = {"down": P("fsdp"), "up": P(None, "fsdp")}
SOME = r"update of.*'bias'.*shards over \('fsdp',\).*Write jaxcomp.clip_by_global_norm"
ALL = "a norm of local shards.*clip_by_global_norm"
NOISE = "the same random numbers for every shard"
BY_LOCAL_NORMS = {
    "before SGD": (SPECS, SOME, (MEAN, OPTAX, optax.sgd(1.0))),
    "before momentum": (
        SPECS,
        SOME.replace("update of", "trace"),
        (MEAN, OPTAX, optax.sgd(1.0, momentum=0.9)),
    ),
    "before Adam": (SPECS, SOME.replace("update of", "mu"), (MEAN, OPTAX, optax.adam(1e-3))),
    "before the mean": (SPECS, SOME, (OPTAX, QUANTIZED)),
    "before a method": (SPECS, SOME, (OPTAX, jaxcomp.zero_one_adam(1e-3, "replica"))),
    "inside cocktail_sgd": (SPECS, SOME, (cocktail(OPTAX, optax.sgd(1.0)),)),
    "all sharded, behind the mean": (ALL_SHARDED, ALL, (MEAN, OPTAX, optax.adam(1e-3))),
    "all sharded, behind codes": (ALL_SHARDED, ALL, (QUANTIZED, OPTAX, optax.sgd(1.0))),
    "all sharded, LAMB": (ALL_SHARDED, ALL, (QUANTIZED, optax.lamb(1e-3))),
    "means of rows": (ALL_SHARDED, ALL, (MEAN, optax.centralize(), optax.sgd(1.0))),
    "all sharded, inside": (ALL_SHARDED, ALL, (cocktail(OPTAX, optax.sgd(1.0)),)),
    "noise": (SPECS, NOISE, (MEAN, optax.noisy_sgd(1e-3, key=0))),
    "noise, inside": (SPECS, NOISE, (cocktail(optax.noisy_sgd(1e-3, key=0)),)),
}


@pytest.mark.parametrize("place", BY_LOCAL_NORMS)
def test_a_norm_of_local_shards_is_refused_by_what_to_write(place):
    specs, text, chain = BY_LOCAL_NORMS[place]
    with pytest.raises(ValueError, match=text):
        one_step(mesh_of(2, 2), specs, make_batch(), *chain)


def test_unchecked_types_are_refused():
    clip = lambda x: CLIP.update(x, ())[0]
    with pytest.raises(ValueError, match="leave check_vma at True"):
        inside(mesh_of(2), clip, check_vma=False)(np.ones((2, 3), np.float32))


def test_the_norm_may_be_a_hyperparameter_of_the_state():
    tx = optax.inject_hyperparams(jaxcomp.clip_by_global_norm)(max_norm=lambda count: 1.0 + count)
    state = tx.init(np.float32(5))
    for norm in (1.0, 2.0):
        got, state = tx.update(np.float32(5), state)
        assert float(got) == norm
