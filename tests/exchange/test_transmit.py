"""One array through one code: bytes, error and form."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.exchange.messages import message_bytes

X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


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
