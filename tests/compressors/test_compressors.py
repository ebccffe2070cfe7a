"""Every compressor, one row each, against every property that it states."""

import functools
import math
import re
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.base import Compressor, identity
from jaxcomp.compressors.bin_means import bin_means
from jaxcomp.compressors.compose import cocktail, compose
from jaxcomp.compressors.learned import learned_levels
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.quantize import cast, quantize
from jaxcomp.compressors.rotated import rotated
from jaxcomp.compressors.sign import sign
from jaxcomp.compressors.sparse import group_top_1, random_k, top_k
from tests.helpers import reference
from tests.helpers.coding import (
    PRIVATE,
    QUICK,
    SHARED,
    bucket,
    decoded,
    drawn,
    hard_buckets,
    jitted,
    make_key,
    roundtrip,
)
from tests.helpers.replicas import mesh_of

NUMELS = (1, 7, 128, 129, 4099)  # part of a byte, a block, one more, and blocks with a rest


class Row(NamedTuple):
    """A compressor, its NumPy statement, and the bytes of its payload for 1000 values."""

    compressor: Compressor
    roundtrip: object
    num_bytes: int
    # What float32 sums and fused multiplications may change, relative to the largest value.
    rounding: float = 0.0


def quantize_row(num_bytes, *args, rounding_error=0.0, **kwargs):
    words = dict(kwargs)
    if "scale_dtype" in words:
        words["scale_dtype"] = np.dtype(words["scale_dtype"])
    return Row(
        quantize(*args, **kwargs), reference.quantize(*args, **words), num_bytes, rounding_error
    )


def sparse_row(num_bytes, compressor, positions, inner=None, rounding_error=0.0):
    inner = inner or reference.identity()
    return Row(compressor, reference.compose(positions, inner), num_bytes, rounding_error)


TENTH = reference.random_k(10)
COCKTAIL_OF_128 = reference.compose(reference.top_k(Fraction(1, 5), 128), reference.quantize(4))
COCKTAIL = reference.compose(reference.top_k(Fraction(1, 5)), reference.quantize(4))
ROWS = [
    Row(identity(), reference.identity(), 4000),
    Row(cast("bfloat16"), reference.cast(ml_dtypes.bfloat16), 2000),
    Row(cast("float16"), reference.cast(np.float16), 2000),
    Row(cast(jnp.float8_e4m3fn), reference.cast(ml_dtypes.float8_e4m3fn), 1000),
    Row(cast(jnp.float8_e5m2), reference.cast(ml_dtypes.float8_e5m2), 1000),
    quantize_row(125 + 16, 1),
    quantize_row(125 + 16, 1, rounding="stochastic"),
    quantize_row(250 + 16, 2),
    quantize_row(250 + 125 + 64, 3, block=32),
    quantize_row(500 + 16, 4),
    quantize_row(500 + 2, 4, block=2048),
    quantize_row(500 + 16, 4, rounding="stochastic"),
    quantize_row(500 + 16, 4, rounding="shift", rounding_error=2**-22),
    quantize_row(500 + 32, 4, scale_dtype="float32", rounding_error=2**-22),
    quantize_row(500 + 16, 4, scale_dtype="float16"),
    quantize_row(500 + 125 + 32, 5, range="minmax"),
    quantize_row(500 + 250 + 32, 6, range="minmax", rounding="stochastic"),
    quantize_row(500 + 250 + 125 + 16, 7, rounding="stochastic"),
    quantize_row(1000 + 16, 8),
    quantize_row(1000 + 32, 8, range="minmax", rounding="shift", rounding_error=2**-22),
    Row(learned_levels(3, 128), reference.learned_levels(3, 128), 375 + 32, 2**-22),
    Row(
        learned_levels(4, 256, "stochastic"),
        reference.learned_levels(4, 256, "stochastic"),
        500 + 16,
        2**-22,
    ),
    Row(
        rotated(quantize(4, rounding="shift")),
        reference.rotated(reference.quantize(4, rounding="shift")),
        512 + 16,
        2**-18,
    ),
    Row(
        rotated(quantize(4, block=32, rounding="stochastic"), block=32),
        reference.rotated(reference.quantize(4, block=32, rounding="stochastic"), 32),
        512 + 64,
        2**-18,
    ),
    Row(
        rotated(learned_levels(4, 256)),
        reference.rotated(reference.learned_levels(4, 256)),
        512 + 16,
        2**-18,
    ),
    Row(bin_means(2), reference.bin_means(2), 250 + 16, 2**-20),
    Row(bin_means(3, block=128), reference.bin_means(3, 128), 375 + 8 * 32, 2**-20),
    Row(sign(), reference.sign(), 125 + 4, 2**-20),
    Row(sign("l2"), reference.sign("l2"), 125 + 4, 2**-20),
    Row(
        sign(block=64, scale_dtype="bfloat16"),
        reference.sign(block=64, scale_dtype=ml_dtypes.bfloat16),
        125 + 32,
    ),
    sparse_row(400, random_k(0.1), TENTH),
    sparse_row(400, random_k(0.1, "strided"), reference.random_k(10, "strided")),
    sparse_row(4 * 334, random_k(1 / 3, "random"), reference.random_k(3, "random")),
    sparse_row(800 + 125, top_k(0.2), reference.top_k(Fraction(1, 5))),
    sparse_row(40 + 12, top_k(0.01), reference.top_k(Fraction(1, 100))),
    sparse_row(4 * 256 + 128, top_k(0.25, block=64), reference.top_k(Fraction(1, 4), 64)),
    sparse_row(4 * 32 + 24, top_k(1 / 32, block=64), reference.top_k(Fraction(1, 32), 64)),
    sparse_row(500 + 32 + 16, group_top_1(8), reference.group_top_1(8)),
    sparse_row(2000 + 63, group_top_1(2), reference.group_top_1(2)),
    sparse_row(16 + 4, group_top_1(256), reference.group_top_1(256)),
    sparse_row(13 + 10 + 2, compose(random_k(0.1), top_k(0.2), quantize(4)), TENTH, COCKTAIL),
    sparse_row(13 + 10 + 2, cocktail(), TENTH, COCKTAIL_OF_128),
    sparse_row(
        32 + 16 + 63 + 2,
        compose(group_top_1(8), quantize(4, rounding="stochastic")),
        reference.group_top_1(8),
        reference.quantize(4, rounding="stochastic"),
    ),
    sparse_row(
        50 + 2,
        compose(random_k(0.1, "random"), quantize(4, rounding="shift")),
        reference.random_k(10, "random"),
        reference.quantize(4, rounding="shift"),
        rounding_error=2**-22,
    ),
]


def rows_in(rows):
    return pytest.mark.parametrize("row", rows, ids=[row.compressor.name for row in rows])


def rows_where(condition=lambda compressor: True):
    return rows_in([row for row in ROWS if condition(row.compressor)])


def form(row):
    """What a code computes with, without its sizes and types."""
    return re.sub(
        r"(, )?(block|scale_dtype)=[^,)]*|\d[\d.e-]*|'b?float\w*'", "", row.compressor.name
    )


# A transformation of JAX sees no sizes: the first row of each form.
rows_of_forms = rows_in({form(row): row for row in reversed(ROWS)}.values())


@functools.cache
def jitted_of_all(compressor):
    """One compilation for buckets of all sizes, a third faster than one for each."""

    def estimates(buckets, shared, private):
        return [roundtrip(compressor, x, shared, private)[1] for x in buckets]

    return jax.jit(estimates, compiler_options=QUICK)


@rows_where()
def test_equals_the_numpy_statement_for_any_numel(row):
    buckets = [bucket(numel) for numel in NUMELS]
    estimates = jitted_of_all(row.compressor)(buckets, make_key(SHARED, 13), make_key(PRIVATE, 13))
    for x, got in zip(buckets, estimates, strict=True):
        want = row.roundtrip(x, 13, SHARED, PRIVATE)
        assert got.dtype == jnp.float32 and got.shape == x.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=row.rounding * np.abs(x).max())


@rows_where()
def test_zeros_decode_to_zeros(row):
    buckets = [np.zeros(numel, "f4") for numel in NUMELS]
    estimates = jitted_of_all(row.compressor)(buckets, make_key(SHARED, 13), make_key(PRIVATE, 13))
    assert not any(np.any(got) for got in estimates)


@rows_where()
def test_payload_has_the_stated_bytes(row):
    def bits(numel):
        x, key = jax.ShapeDtypeStruct((numel,), jnp.float32), make_key(0)
        payload = jax.eval_shape(row.compressor.encode, x, key, key)
        assert payload.numel == numel
        return 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))

    assert bits(1000) == 8 * row.num_bytes
    # Of so many values neither one scale per bucket nor a part of a byte is seen.
    numel = 10 * 2**20
    assert bits(numel) / numel == pytest.approx(row.compressor.bits_per_parameter, abs=1e-4)


@rows_where()
def test_name_is_the_call_that_makes_it(row):
    again = eval(row.compressor.name, vars(jaxcomp).copy())
    assert again == row.compressor and hash(again) == hash(row.compressor)
    assert sum(again == other.compressor for other in ROWS) == 1


@rows_of_forms
def test_decodes_the_same_when_compiled_apart_and_once_for_all_keys(row):
    x, traces = bucket(1000), []

    def encode(x, shared, private):
        traces.append(x.shape)
        return row.compressor.encode(x, shared, private)

    encode, decode = jax.jit(encode), jax.jit(row.compressor.decode)
    for count in (13, 14):
        shared, private = make_key(SHARED, count), fold(make_key(PRIVATE, count), 5)
        payload, together = jitted(row.compressor)(x, shared, private)
        alone = encode(x, shared, private)
        jax.tree.map(np.testing.assert_array_equal, alone, payload)
        atol = row.rounding * np.abs(x).max()
        np.testing.assert_allclose(decode(alone, shared), together, rtol=0, atol=atol)
    assert traces == [(1000,)]


@rows_of_forms
def test_vmap_equals_a_loop(row):
    x = np.stack([bucket(1000, seed) for seed in range(3)])
    shared, private = make_key(SHARED, 13), make_key(PRIVATE + np.arange(3), 13)

    def estimate(x, seed):
        return roundtrip(row.compressor, x, shared, private._replace(seed=seed))[1]

    got = jax.jit(jax.vmap(estimate), compiler_options=QUICK)(x, private.seed)
    want = [decoded(row.compressor, x[i], 13, private=PRIVATE + i) for i in range(3)]
    np.testing.assert_allclose(got, want, rtol=0, atol=row.rounding * np.abs(x).max())


@rows_of_forms
def test_varies_over_the_axis_inside_shard_map(row):
    x = np.stack([bucket(1000, seed) for seed in range(2)])
    shared, private = make_key(SHARED, 13), make_key(PRIVATE, 13)

    def replica(x, shared, private):
        own = fold(private, lax.axis_index("replica"))
        payload = row.compressor.encode(x[0], shared, own)
        for leaf in jax.tree.leaves(payload):
            assert "replica" in jax.typeof(leaf).manual_axis_type.varying
        return row.compressor.decode(payload, shared)[None]

    specs = (P("replica"), P(), P())
    mapped = jax.shard_map(replica, mesh=mesh_of(2), in_specs=specs, out_specs=P("replica"))
    got = jax.jit(mapped)(x, shared, private)
    seeds = [reference.fold(PRIVATE, i) for i in range(2)]
    want = [decoded(row.compressor, x[i], 13, private=seeds[i]) for i in range(2)]
    np.testing.assert_allclose(got, want, rtol=0, atol=row.rounding * np.abs(x).max())


@rows_where(lambda compressor: compressor.contraction is not None)
def test_contracts_as_stated(row):
    # 480 is a multiple of every stride above: whole periods of the masks that roll.
    x = hard_buckets()
    errors = np.sum((drawn(row.compressor, x, 480) - x) ** 2, axis=2)
    norms = np.sum(x.astype(np.float64) ** 2, axis=1)
    # Five standard errors of the mean over random keys; none for what is not random.
    noise = 5 * np.std(errors, axis=0) / math.sqrt(480)
    lost = 1 - row.compressor.contraction
    assert np.all(errors.mean(axis=0) <= (lost + 1e-6) * norms + noise)


@rows_where(lambda compressor: compressor.unbiased)
def test_is_unbiased(row):
    x = bucket(129)
    draws = drawn(row.compressor, x[None], 4096)[:, 0]
    # Five standard errors of each mean, and float32 rounding of the largest value.
    noise = 5 * draws.std(axis=0) / math.sqrt(len(draws)) + 1e-6 * np.abs(x).max()
    assert np.all(np.abs(draws.mean(axis=0) - x) <= noise)


def test_states_which_are_unbiased_and_linear():
    random = quantize(4, rounding="stochastic")
    assert identity().unbiased and random.unbiased and random_k(1.0).unbiased
    assert not any(c.unbiased for c in (quantize(4), sign(), random_k(0.1), group_top_1(8)))
    assert not compose(random_k(0.5), random).unbiased
    assert identity().linear and random_k(0.1).linear and random_k(0.5, "random").linear
    assert compose(random_k(0.1), identity()).linear
    assert not any(c.linear for c in (quantize(8), cast("bfloat16"), top_k(0.1), group_top_1(2)))
    assert not compose(random_k(0.1), quantize(4)).linear


@rows_where(lambda compressor: compressor.linear)
def test_linear_payloads_may_be_summed(row):
    x = np.stack([np.round(8 * bucket(1000, seed)) for seed in range(3)])
    encode = jitted(row.compressor)
    payloads = [encode(jnp.asarray(values), make_key(1, 7), make_key(2))[0] for values in x]
    total = jax.tree.map(lambda *leaves: sum(leaves), *payloads)
    want = sum(decoded(row.compressor, values, 7, 1) for values in x)
    np.testing.assert_array_equal(row.compressor.decode(total, make_key(1, 7)), want)


@rows_where(lambda compressor: compressor.contraction is not None)
def test_error_feedback_loses_nothing(row):
    # Integers and one step, so that what is kept and what is not add up without rounding.
    x = np.round(8 * bucket(256))
    residual, sent, largest = np.zeros_like(x), np.zeros(256, np.float64), 0.0
    for count in range(60):
        corrected = (x + residual).astype("f4")
        estimate = decoded(row.compressor, corrected, count, SHARED + count, PRIVATE + count)
        residual = corrected - estimate
        sent += estimate
        largest = max(largest, float(np.linalg.norm(residual)))
    # Rounding of 60 float32 differences.
    np.testing.assert_allclose(sent + residual, 60.0 * x, rtol=0, atol=60 * 2**-23 * 60 * 64)
    # The residual's limit, in norms of x: lost * (1 + limit) = limit. By chance, twice as much.
    lost = math.sqrt(1 - row.compressor.contraction)
    chance = 2 if "random'" in row.compressor.name else 1
    assert largest <= (chance + 1e-6) * lost / (1 - lost) * np.linalg.norm(x) + 1e-6


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_not_hidden(value):
    x = bucket(256)
    x[3] = value
    for compressor in (
        quantize(4),
        quantize(8, range="minmax"),
        sign(block=128),
        sign(),
        bin_means(2),
    ):
        assert not np.isfinite(decoded(compressor, x)[3])


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: cast("float32"), r"cast got dtype float32; needs bfloat16.*identity\(\)"),
        (lambda: quantize(0), "bits=0; needs an integer from 1 to 8"),
        (lambda: quantize(9), "bits=9; needs an integer from 1 to 8"),
        (lambda: quantize(4.0), "bits=4.0; needs an integer"),
        (lambda: quantize("4"), r"bits='4'; needs an integer from 1 to 8; write quantize\(4\)"),
        (lambda: quantize(4, block="128"), "block='128'; needs a positive integer"),
        (lambda: sign(block="8"), "block='8'; needs a positive integer"),
        (lambda: top_k(0.1, block="8"), "block='8'; needs a positive integer"),
        (lambda: top_k("0.1"), "top_k got density='0.1'; needs a share of the entries"),
        (lambda: random_k("0.1"), "random_k got density='0.1'; needs a share of the entries"),
        (lambda: group_top_1("8"), "group='8'; needs a power of two"),
        (lambda: rotated(quantize(4), block="64"), "block='64'; needs a power of two"),
        (lambda: rotated(4), r"rotated got 4; needs a Compressor; write quantize\(4\)"),
        (lambda: compose(random_k(0.1), 4), r"compose got 4; needs a Compressor; write quantize"),
        (lambda: quantize(4, block=0), "block=0; needs a positive integer; write block=128"),
        (lambda: quantize(4, block=2.5), "block=2.5; needs a positive integer"),
        (lambda: quantize(4, range="max"), "range='max'; write 'absmax' or 'minmax'"),
        (lambda: quantize(4, rounding="up"), "rounding='up'; write 'nearest', 'stochastic'"),
        (lambda: quantize(4, scale_dtype="int8"), "scale_dtype='int8'; write"),
        (lambda: bin_means(5), r"bits=5; needs an integer from 1 to 4; write bin_means\(2\)"),
        (lambda: bin_means(2, block=0), "block=0; needs a positive integer, or None"),
        (lambda: learned_levels(8), "bits=8; needs an integer from 1 to 6; write quantize"),
        (lambda: learned_levels("4"), "bits='4'; needs an integer"),
        (lambda: learned_levels(4, 0), "block=0; needs a positive integer"),
        (lambda: learned_levels(4, "8"), "block='8'; needs a positive integer"),
        (lambda: learned_levels(4, 8, "shift"), "rounding='shift'; write 'nearest' or"),
        (lambda: learned_levels(4, scale_dtype="int8"), "scale_dtype='int8'; write"),
        (lambda: sign("max"), "scale='max'; write 'l1' or 'l2'"),
        (lambda: sign(block=0), "block=0; needs a positive integer, or None"),
        (lambda: sign(scale_dtype="int8"), "scale_dtype='int8'; write 'bfloat16'"),
        (lambda: random_k(0.0), r"random_k got density=0.0; needs .* \(0, 1\]"),
        (lambda: random_k(1.5), r"random_k got density=1.5; needs .* \(0, 1\]"),
        (lambda: random_k(0.3), "density=0.3; needs 1 / density to be an integer; .* 1/4 or 1/3"),
        (lambda: random_k(1e-9), r"density=1e-09; needs at least 2\*\*-20; write random_k\(1 / 4"),
        (lambda: random_k(0.1, "cyclic"), "pattern='cyclic'; write 'runs', 'strided' or 'random'"),
        (lambda: top_k(-0.1), r"top_k got density=-0.1; needs .* \(0, 1\]"),
        (lambda: top_k(0.1, block=0), "top_k got block=0; needs a positive integer, or None"),
        (lambda: group_top_1(12), "group=12; needs a power of two from 2 to 256; write group=8"),
        (lambda: group_top_1(512), "group=512; needs a power of two from 2 to 256"),
        (lambda: rotated(quantize(4), block=96), "block=96; needs a power of two; write block=128"),
        (
            lambda: rotated(top_k(0.1)),
            r"top_k\(0.1\), needs a code that rounds; write quantize\(4\)",
        ),
        (lambda: rotated(cocktail()), r"quantize\(4\)\), needs a code that rounds"),
        (lambda: rotated(compose(top_k(0.1), quantize(4))), "needs a code that rounds"),
        (lambda: rotated(identity()), r"identity\(\), needs a code that rounds"),
        (lambda: compose(), r"compose\(\) got no stage; write identity\(\)"),
        (lambda: compose(quantize(4), top_k(0.1)), r"quantize\(4\) before the last stage"),
        (lambda: compose(random_k(0.1), random_k(0.5)), "at most one random_k; write one with"),
        (
            lambda: compose(random_k(0.5), compose(random_k(0.5), quantize(8))),
            r"got random_k\(0.5\), random_k\(0.5\), quantize\(8\): needs at most one random_k",
        ),
        (lambda: compose(random_k(0.5), cocktail()), "needs at most one random_k"),
        (lambda: compose(random_k(0.5), compose(top_k(0.5), random_k(0.5))), "at most one random"),
        (
            lambda: compose(compose(random_k(0.5), quantize(8)), quantize(4)),
            r"quantize\(8\) before the last stage",
        ),
    ],
)
def test_wrong_arguments_raise(make, text):
    with pytest.raises(ValueError, match=text):
        make()
