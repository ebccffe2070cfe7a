"""Payloads as messages: every bit arrives, in both forms, in whole units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.compressors.base import Payload
from jaxcomp.exchange import messages
from jaxcomp.exchange.messages import message_bytes
from tests.helpers.coding import as_for_tpus

FORMS = {
    "of the platform": (messages.message_of, jnp.uint8),
    "bytes": (messages.bytes_of, jnp.uint8),
    "words": (messages.words_of, jnp.uint32),
}
PAYLOADS = [
    jnp.arange(5, dtype=jnp.uint8),
    (jnp.arange(3, dtype=jnp.uint8), jnp.array([[1.5, -0.0], [jnp.inf, jnp.nan]])),
    {"a": jnp.array([1.5, -2], jnp.bfloat16), "b": jnp.zeros(0), "c": jnp.uint16([65535, 1, 7])},
    [jnp.float16([65504, 6e-8]), jnp.float32(2.5), jnp.int32([[-1], [2**31 - 1]])],
    Payload((jnp.float8_e5m2([1, 2]), jnp.uint32([2**32 - 1]), jnp.int8([[-1, 2, -128]])), 7),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_message_holds_every_bit_of_a_payload(payload, form):
    message_of, dtype = FORMS[form]
    message, leaves = jax.jit(message_of)(payload), jax.tree.leaves(payload)
    used = sum(-(-leaf.nbytes // 4) * 4 for leaf in leaves)
    assert message.dtype == dtype and message.nbytes == -(-used // 16) * 16
    assert not np.any(message[used // message.itemsize :])
    like = jax.eval_shape(lambda: payload)
    back = jax.jit(lambda message: messages.payload_of(message, like))(message)
    assert jax.tree.structure(back) == jax.tree.structure(payload)
    for a, b in zip(jax.tree.leaves(back), leaves, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_first_slice_of_a_leaf_takes_the_low_bits_of_all_words():
    message = messages.words_of(jnp.arange(8, dtype=jnp.uint8))
    np.testing.assert_array_equal(message[:2], np.uint32([0x06040200, 0x07050301]))


def test_messages_are_padded_to_16_bytes():
    # 1,000 codes of 4 bits and a bfloat16 for each of 8 blocks.
    assert messages.message_bytes(jaxcomp.quantize(4), 1000) == 500 + 2 * 8 + 12
    assert messages.message_bytes(jaxcomp.identity(), 1000) == 4000


def test_a_tpu_sends_rows_of_128_words_and_an_island_on_it_what_all_send(monkeypatch):
    island = [messages.bytes_of(payload).nbytes for payload in PAYLOADS]
    as_for_tpus(monkeypatch)
    assert [messages.bytes_of(payload).nbytes for payload in PAYLOADS] == island
    assert {messages.message_of(payload).nbytes for payload in PAYLOADS} == {512}
    assert messages.message_bytes(jaxcomp.quantize(4), 1000) == 1024
    back = messages.payload_of(messages.message_of(PAYLOADS[0]), PAYLOADS[0])
    np.testing.assert_array_equal(back, PAYLOADS[0])


X = np.random.default_rng(0).normal(size=(52, 77)).astype(np.float32)


@pytest.mark.parametrize(
    "compressor",
    [jaxcomp.identity(), jaxcomp.quantize(4), jaxcomp.sign(), jaxcomp.cocktail(0.5)],
    ids=lambda c: c.name,
)
def test_cost_and_loss_are_those_of_the_message(compressor):
    sent = jaxcomp.transmit(compressor, X)
    assert sent.message.dtype == np.uint8
    assert sent.message.nbytes == message_bytes(compressor, X.size)
    assert sent.bits_per_parameter == 8 * sent.message.nbytes / X.size
    assert sent.decoded.shape == X.shape
    lost = np.sum((X.astype(np.float64) - sent.decoded) ** 2) / np.sum(X.astype(np.float64) ** 2)
    assert abs(sent.error - lost) <= 1e-5 * lost
    assert 4.0**-sent.bits_per_parameter <= sent.error or compressor.name == "identity()"


def test_float32_travels_exact():
    sent = jaxcomp.transmit(jaxcomp.identity(), X)
    np.testing.assert_array_equal(sent.decoded, X)
    assert sent.message.tobytes() == X.tobytes() and sent.error == 0


def test_the_seed_moves_the_mask():
    code = jaxcomp.random_k(0.25, "random")
    masks = [np.asarray(jaxcomp.transmit(code, X, seed=n).decoded != 0) for n in (0, 0, 1)]
    assert np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[0], masks[2])


def test_zeros_lose_nothing():
    assert jaxcomp.transmit(jaxcomp.quantize(4), jnp.zeros(9)).error == 0


@pytest.mark.parametrize("x", [jnp.zeros(0), jnp.ones(3, jnp.int32)])
def test_what_cannot_be_sent_is_refused(x):
    with pytest.raises(ValueError, match="transmit got .* needs floating numbers"):
        jaxcomp.transmit(jaxcomp.sign(), x)
