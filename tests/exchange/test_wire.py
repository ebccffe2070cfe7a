"""Collectives of encoded buckets against NumPy: values, types, bytes, and nothing else sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.compressors.base import Key, Payload
from jaxcomp.exchange import wire
from jaxcomp.exchange.messages import message_bytes
from tests.helpers.replicas import division_error, mesh_of, one_value, rows

SHARED = Key(jnp.int32(3), jnp.uint32(7))

# Sends float32 as it is but is not linear, so it goes the way of the lossy codes.
UNSUMMED = jaxcomp.Compressor(
    "unsummed",
    encode=lambda x, shared, private: Payload((x[::2], x[1::2]), x.size),
    decode=lambda payload, shared: (
        jnp.zeros(payload.numel).at[::2].set(payload.data[0]).at[1::2].set(payload.data[1])
    ),
    bits_per_parameter=32.0,
)


def whole_numbers(num_replicas, numel, seed=0):
    """Rows whose sums are exact, and whose mean is whole for every number of replicas."""
    return 840.0 * np.random.default_rng(seed).integers(-9, 10, (num_replicas, numel))


def jitted(function, num_replicas, out_specs):
    """Jits a function of this replica's rows of some arrays."""
    first = lambda *xs: function(*(x[0] for x in xs))
    mesh = mesh_of(num_replicas)
    return jax.jit(jax.shard_map(first, mesh=mesh, in_specs=P("replica"), out_specs=out_specs))


def mean_of(exchange, compressor, num_replicas):
    """Jits `(rows, owner residuals) -> Mean`, the mean equal on all replicas by type."""

    def mean(x, owner_residual):
        result = exchange.mean(x, owner_residual, compressor, SHARED, "replica")
        return wire.Mean(result.mean, result.sent.reshape(1, -1), result.owner_residual[None])

    out_specs = wire.Mean(P(), P("replica"), P("replica"))
    return jitted(mean, num_replicas, out_specs)


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_every_mean_is_numpys_on_whole_numbers(num_replicas):
    numel = 6 * num_replicas
    x = whole_numbers(num_replicas, numel)
    owned = 840.0 * np.arange(numel).reshape(num_replicas, -1)
    mesh = mesh_of(num_replicas)
    none = np.zeros((num_replicas, 0))
    for exchange, compressor, residual in [
        (wire.summed, jaxcomp.identity(), none),
        (wire.gathered, UNSUMMED, none),
        (wire.two_shot, UNSUMMED, owned),
    ]:
        mean = mean_of(exchange, compressor, num_replicas)
        result = mean(*rows(mesh, (np.float32(x), np.float32(residual))))
        want = x.mean(axis=0) + (residual.reshape(-1) if exchange.owns_chunks else 0)
        # Relative to the largest, as adding the owner's residual may cancel.
        atol = division_error(num_replicas) * np.abs(want).max()
        np.testing.assert_allclose(one_value(result.mean), want, rtol=0, atol=atol)
        np.testing.assert_array_equal(result.sent, x)
        np.testing.assert_array_equal(result.owner_residual, np.zeros_like(residual))


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_reduce_scatter_and_gather_are_halves_of_the_mean(num_replicas):
    numel = 4 * num_replicas
    x = whole_numbers(num_replicas, numel)

    def scatter(x):
        chunk, sent = wire.reduce_scatter(x, UNSUMMED, SHARED, "replica")
        return chunk, sent[None]

    scatter = jitted(scatter, num_replicas, P("replica"))
    chunks, sent = scatter(rows(mesh_of(num_replicas), np.float32(x)))
    # Chunk i belongs to replica i.
    np.testing.assert_allclose(chunks, x.mean(axis=0), rtol=division_error(num_replicas), atol=0)
    np.testing.assert_array_equal(sent, x)

    gather = functools.partial(wire.gather, compressor=UNSUMMED, shared=SHARED, axis_name="replica")
    gather = jitted(gather, num_replicas, (P(), P("replica")))
    full, kept = gather(rows(mesh_of(num_replicas), np.float32(x)))
    np.testing.assert_array_equal(one_value(full), x.reshape(-1))
    np.testing.assert_array_equal(kept, x.reshape(-1))


LOSSY = [
    jaxcomp.cast("bfloat16"),
    jaxcomp.quantize(4, block=16),
    jaxcomp.quantize(2, range="minmax", block=16, rounding="stochastic"),
    jaxcomp.sign(),
    jaxcomp.top_k(0.2),
    jaxcomp.compose(jaxcomp.random_k(0.5), jaxcomp.quantize(4)),
]


# Of whole trees, on all numbers of replicas: tests/methods/test_compressed_mean.py.
@pytest.mark.parametrize("num_replicas", [2, 5])
@pytest.mark.parametrize("compressor", LOSSY, ids=lambda c: c.name)
def test_the_two_shot_mean_loses_nothing_that_it_does_not_keep(compressor, num_replicas):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(num_replicas, 40 * num_replicas)).astype(np.float32)
    owned = rng.normal(size=(num_replicas, 40)).astype(np.float32)
    mean = mean_of(wire.two_shot, compressor, num_replicas)
    result = jax.tree.map(np.float64, mean(*rows(mesh_of(num_replicas), (x, owned))))
    came_out = result.mean + result.owner_residual.reshape(-1)
    went_in = result.sent.mean(axis=0) + owned.reshape(-1)
    # Roundings of float32: R - 1 in the sum, two in the division, then + owned and - kept.
    terms = np.abs(result.sent).sum(axis=0) + np.abs(owned).reshape(-1) + np.abs(result.mean)
    assert np.all(np.abs(came_out - went_in) <= (num_replicas + 3) * 2.0**-24 * terms)


def test_gathered_means_decode_to_the_mean_of_what_was_sent():
    x = np.random.default_rng(2).normal(size=(4, 60)).astype(np.float32)
    mean = mean_of(wire.gathered, jaxcomp.quantize(2, block=16), 4)
    result = mean(*rows(mesh_of(4), (x, np.zeros((4, 0), np.float32))))
    np.testing.assert_array_equal(
        one_value(result.mean), sum(np.asarray(result.sent)) / np.float32(4)
    )


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_compiled_programs_hold_the_documented_messages_and_no_other(num_replicas):
    numel, mesh = 256 * num_replicas, mesh_of(num_replicas)
    shapes = [jax.ShapeDtypeStruct((num_replicas, n), jnp.float32) for n in (numel, 256)]
    quantize = jaxcomp.quantize(4)

    def found(exchange, compressor):
        compiled = mean_of(exchange, compressor, num_replicas).lower(*shapes).compile()
        return compiled, report.collectives(compiled, mesh)

    chunk = message_bytes(quantize, 256)
    assert chunk == 128 + 2 * 2 + 12  # to whole units of 16 bytes
    compiled, messages = found(wire.two_shot, quantize)
    assert sorted((m.op, m.operand_bytes, m.count) for m in messages) == [
        ("all-gather", chunk, 1),
        ("all-to-all", num_replicas * chunk, 1),
    ]
    assert {shape.split("[")[0] for m in messages for shape in m.shape.split(", ")} == {"u8"}
    # 2 m (R - 1) / R bytes for a message of m = R chunks.
    assert report.sent_bytes(compiled, mesh) == 2 * chunk * (num_replicas - 1)

    compiled, [message] = found(wire.gathered, quantize)
    assert message.op == "all-gather" and message.shape.startswith("u8[")
    assert report.sent_bytes(compiled, mesh) == message_bytes(quantize, numel) * (num_replicas - 1)

    kept = jaxcomp.random_k(1 / 8)
    compiled, [message] = found(wire.summed, kept)
    assert (message.op, message.operand_bytes) == ("all-reduce", 4 * numel // 8)


@pytest.mark.parametrize("exchange", [wire.gathered, wire.two_shot])
def test_rounding_noise_differs_between_replicas_and_chunks_and_averages_out(exchange):
    num_replicas, chunk = 4, 4096
    compressor = jaxcomp.quantize(1, block=chunk, rounding="stochastic")
    # The same for all: a 1 that sets the scale to 2 steps of 1, then halfway values 0.
    x = np.zeros((num_replicas, num_replicas, chunk), np.float32)
    x[:, :, 0] = 1.0
    x = x.reshape(num_replicas, -1)
    owned = np.zeros((num_replicas, chunk if exchange.owns_chunks else 0), np.float32)
    mean = mean_of(exchange, compressor, num_replicas)
    result = mean(*rows(mesh_of(num_replicas), (x, owned)))
    coins = np.asarray(result.sent).reshape(num_replicas, num_replicas, chunk)[:, :, 1:]
    assert set(np.unique(coins)) == {-1.0, 1.0}
    coins = coins.reshape(num_replicas**2, -1)
    correlation = coins @ coins.T / coins.shape[1]
    # Independent fair coins: standard deviation 1 / sqrt(4095) = 0.0156; 5 of them allowed.
    off_diagonal = correlation[~np.eye(len(coins), dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(coins.shape[1])
    assert np.abs(coins.mean(axis=1)).max() < 5 / np.sqrt(coins.shape[1])
    # So the mean over 4 replicas has a quarter of the variance of one.
    if exchange is wire.gathered:
        assert abs(np.var(result.mean) - 0.25) < 0.02


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_owners_round_with_a_noise_of_their_own(num_replicas):
    compressor = jaxcomp.quantize(1, block=4096, rounding="stochastic")
    x = np.zeros((num_replicas, 4096), np.float32)
    x[:, 0] = 1.0

    def both(x):
        first = compressor.encode(x, SHARED, wire._private(SHARED, "replica"))
        second, _ = wire.gather(x, compressor, SHARED, "replica")
        return compressor.decode(first, SHARED)[None], second

    first, second = jitted(both, num_replicas, (P("replica"), P()))(rows(mesh_of(num_replicas), x))
    second = np.asarray(second).reshape(num_replicas, -1)
    coins = np.concatenate([np.asarray(first), second])[:, 1:]
    correlation = (coins @ coins.T / coins.shape[1])[~np.eye(2 * num_replicas, dtype=bool)]
    assert np.abs(correlation).max() < 5 / np.sqrt(4095)


def test_equal_values_travel_under_vmap_too():
    # As a drift that is still zero everywhere, in a function that makes and updates a state.
    x, residual = jnp.arange(64.0), jnp.zeros(16)
    exchange = lambda _: wire.two_shot.mean(x, residual, UNSUMMED, SHARED, "replica")
    found = jax.vmap(exchange, axis_name="replica")(jnp.zeros(4))
    np.testing.assert_array_equal(found.mean, np.stack([x] * 4))
    np.testing.assert_array_equal(found.sent.reshape(4, -1), np.stack([x] * 4))
