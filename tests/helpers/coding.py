"""Buckets for tests of compressors, and what compressors make of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.compressors import platforms
from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold

SHARED, PRIVATE = 0x12345678, 0x9ABCDEF0


def make_key(seed, count=0):
    return Key(jnp.int32(count), jnp.uint32(seed))


def as_for_tpus(monkeypatch):
    """Has every later trace take the forms of TPUs, which run here, too."""
    monkeypatch.setattr(platforms, "_platform_of_mesh", lambda: "tpu")


# Half the time to compile. One test compares with what XLA makes of it otherwise.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def jitted(compressor):
    """One compilation a shape, for all tests."""
    return jax.jit(functools.partial(roundtrip, compressor), compiler_options=QUICK)


def roundtrip(compressor, x, shared, private):
    """The payload of a bucket, and what it decodes to."""
    payload = compressor.encode(x, shared, private)
    return payload, compressor.decode(payload, shared)


def decoded(compressor, x, count=0, shared=SHARED, private=PRIVATE):
    keys = make_key(shared, count), make_key(private, count)
    return np.asarray(jitted(compressor)(jnp.asarray(x), *keys)[1])


def bucket(numel, seed=0):
    """Values whose magnitudes differ between blocks and within them."""
    random = np.random.default_rng([seed, numel])
    return (random.standard_normal(numel) * np.exp(random.standard_normal(numel))).astype("f4")


def drawn(compressor, x, num_draws):
    """`[num_draws, ...]`: what each row decodes to at as many steps, each with its own keys."""

    def draw(count, x):
        shared = fold(Key(count, jnp.uint32(SHARED)), count)
        return roundtrip(compressor, x, shared, fold(shared, 1))[1]

    draws = jax.jit(jax.vmap(jax.vmap(draw, (None, 0)), (0, None)), compiler_options=QUICK)
    return np.asarray(draws(jnp.arange(num_draws), x), np.float64)


def hard_buckets():
    """Gaussian, heavy tails, one large value, constant, and all between two levels of 4 bits."""
    spike, halves = np.full(256, 1e-3), np.full(256, 0.5 / 7)
    spike[0], halves[::128] = 1.0, 1.0
    buckets = (bucket(256) ** 0, bucket(256), bucket(256) ** 3, spike, halves, -halves)
    return np.stack(buckets).astype("f4")
