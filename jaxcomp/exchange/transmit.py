"""Sends one array through one code: the message, what it decodes to, its cost and error."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp._printing import array
from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.compressors.packing import fold
from jaxcomp.exchange.messages import message_of, payload_of


class Transmission(NamedTuple):
    """What `transmit` returns."""

    message: jax.Array  # what is sent: u8[bytes] on CPUs, u32[words] elsewhere
    decoded: jax.Array  # f32 of the array's shape, what a receiver gets
    bits_per_parameter: float  # of the message
    error: float  # |x - decoded|^2 / |x|^2; 0 for an array of zeros that decodes to zeros

    def __repr__(self) -> str:
        fields = (f"{name}={array(value)}" for name, value in self._asdict().items())
        return f"Transmission({', '.join(fields)})"


def transmit(compressor: Compressor, x: jax.Array, *, seed: int = 0) -> Transmission:
    """Encodes an array as one bucket and decodes the message again; needs no network.

    Use it to compare codes on real gradients. On independent normal values, no code of b bits
    per parameter has an expected error below 4**-b.

    Args:
      compressor: Any code.
      x: Floating array of any shape, with at least one element.
      seed: Seed of masks, shifts and stochastic rounding.

    Returns:
      The `Transmission`.

    Raises:
      ValueError: If the array is not floating or has no elements.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxcomp
      >>> sent = jaxcomp.transmit(jaxcomp.sign(), jnp.array([3.0, -3.0] * 512))
      >>> sent.message.shape, sent.bits_per_parameter, sent.error
      ((144,), 1.125, 0.0)

    References:
      T. M. Cover, J. A. Thomas, "Elements of Information Theory", 2nd edition, 2006, theorem
      10.3.2, for the bound.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
        raise ValueError(
            f"transmit got {x.dtype}{list(x.shape)}; needs floating numbers, at least one; write "
            "x.astype('float32')."
        )
    message, decoded, error = _transmit(compressor, x.astype(jnp.float32), jnp.uint32(seed))
    return Transmission(message, decoded, 8 * message.nbytes / x.size, float(error))


@functools.partial(jax.jit, static_argnums=0)
def _transmit(compressor, x, seed):
    shared = Key(jnp.int32(0), seed)
    payload = compressor.encode(x.reshape(-1), shared, fold(shared, 1))
    message = message_of(payload)
    decoded = compressor.decode(payload_of(message, payload), shared).reshape(x.shape)
    lost, norm = jnp.sum(jnp.square(x - decoded)), jnp.sum(jnp.square(x))
    return message, decoded, lost / jnp.where(norm > 0, norm, 1)
