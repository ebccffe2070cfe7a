"""Payloads as messages: every bit arrives, in both forms, in whole units of 16 bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.compressors.base import Payload
from jaxcomp.exchange import messages

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


@pytest.mark.parametrize("compressor", [jaxcomp.quantize(4), jaxcomp.identity()])
def test_message_bytes_are_those_of_the_message(compressor):
    key = jaxcomp.Key(jnp.int32(0), jnp.uint32(0))
    message = messages.message_of(compressor.encode(jnp.ones(1001), key, key))
    assert messages.message_bytes(compressor, 1001) == message.nbytes


def test_messages_are_padded_to_16_bytes():
    # 1,000 codes of 4 bits and a bfloat16 for each of 8 blocks.
    assert messages.message_bytes(jaxcomp.quantize(4), 1000) == 500 + 2 * 8 + 12
    assert messages.message_bytes(jaxcomp.identity(), 1000) == 4000
