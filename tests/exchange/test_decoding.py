"""Both forms of decoding messages give the same: those for CPUs and those for other platforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.compressors.base import Key
from jaxcomp.exchange import decoding
from jaxcomp.exchange.messages import message_of
from tests.helpers.coding import as_for_tpus

SHARED = Key(jnp.int32(3), jnp.uint32(7))
CODES = [
    jaxcomp.identity(),
    jaxcomp.quantize(4, block=16),
    jaxcomp.quantize(8, block=16, range="minmax"),
    jaxcomp.sign(block=16),
    jaxcomp.top_k(0.25, block=16),
    jaxcomp.cocktail(random=0.5, top=0.5),
]


@pytest.fixture(params=CODES, ids=lambda code: code.name)
def received(request):
    """Messages of five replicas, what decodes them, and what each decodes to."""
    x = np.random.default_rng(3).normal(size=(5, 80)).astype(np.float32)
    message = jax.jit(lambda row: message_of(request.param.encode(row, SHARED, SHARED)))
    messages = jnp.stack([message(row) for row in x])
    decode = jax.jit(decoding.decoder(request.param, SHARED, 80, jnp.float32))
    return messages, decode, np.stack([decode(message) for message in messages])


def test_both_ways_to_join_what_was_received_give_the_same(received):
    messages, decode, values = received
    for form in (decoding.rows, decoding.rows_once, decoding.rows_in_turn):
        joined = jax.jit(form, static_argnums=1)(messages, decode)
        np.testing.assert_array_equal(joined, values.reshape(-1))


def test_a_tpu_writes_what_it_received_once(received, monkeypatch):
    messages, decode, values = received
    lowered = jax.jit(decoding.rows, static_argnums=1).trace(messages, decode)
    barriers = {
        platform: lowered.lower(lowering_platforms=(platform,)).as_text().count("_barrier")
        for platform in ("cpu", "cuda", "tpu")
    }
    assert barriers["tpu"] == barriers["cpu"] + 1 == barriers["cuda"] + 1
    as_for_tpus(monkeypatch)
    joined = jax.jit(lambda messages: decoding.rows(messages, decode))(messages)
    np.testing.assert_array_equal(joined, values.reshape(-1))


def test_both_ways_to_sum_what_was_received_give_the_same(received):
    messages, decode, values = received
    wanted = np.sum(np.float64(values), axis=0)
    # Four additions of float32, in either order.
    atol = 4 * 2.0**-24 * 5 * np.abs(values).max()
    for form in (decoding.total_in_turn, decoding.total_at_once):
        total = jax.jit(form, static_argnums=1)(messages, decode)
        np.testing.assert_allclose(total, wanted, rtol=0, atol=atol)


def test_means_are_sums_over_the_number_of_messages(received):
    messages, decode, _ = received
    forms = decoding.total, decoding.mean
    total, mean = (jax.jit(form, static_argnums=1)(messages, decode) for form in forms)
    np.testing.assert_array_equal(mean, total / 5)


LISTS = [  # the last block of 75 entries is not whole
    jaxcomp.top_k(0.05, block=16),
    jaxcomp.top_k(0.03),
    jaxcomp.compose(jaxcomp.top_k(0.1, block=16), jaxcomp.quantize(4, block=8)),
]


@pytest.mark.parametrize("code", LISTS, ids=lambda code: code.name)
def test_entries_that_messages_list_are_summed_as_what_they_decode_to(code):
    x = np.random.default_rng(3).normal(size=(5, 75)).astype(np.float32)
    x[:, 64:] = 0  # so that a block of zeros sends what is beyond the bucket, too
    message = jax.jit(lambda row: message_of(code.encode(row, SHARED, SHARED)))
    messages = jnp.stack([message(row) for row in x])
    decode = jax.jit(decoding.decoder(code, SHARED, 75, jnp.float32))
    values = np.stack([decode(message) for message in messages])
    both = lambda values: (values, (values != 0).astype(jnp.float32))
    whole = lambda messages: decoding.total_of_all(messages, code, SHARED, x[0], both)
    total, senders = jax.jit(whole)(messages)
    np.testing.assert_array_equal(total, functools.reduce(np.add, values))
    np.testing.assert_array_equal(senders, np.sum(values != 0, axis=0))
    lowered = jax.jit(whole).trace(messages)
    loops = {
        platform: "stablehlo.while" in lowered.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert loops == {"cpu": True, "cuda": True, "tpu": False}
