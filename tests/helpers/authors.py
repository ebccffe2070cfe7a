"""The authors' own arithmetic, where it differs from the library's, for traces of their code."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import jaxcomp
from jaxcomp.compressors.base import Compressor, Payload, Selection
from jaxcomp.compressors.sparse import sparsifier
from jaxcomp.exchange import wire
from jaxcomp.exchange.journeys import Hop


def half(x):
    """Rounds to float16's values, subnormal ones included, which `lax.reduce_precision` drops."""
    # Without the barrier XLA would leave out a cast there and back.
    return lax.optimization_barrier(jnp.asarray(x).astype(jnp.float16)).astype(jnp.float32)


def cocktail_quantizer(bits, bucket):
    """CocktailSGD's code: asymmetric codes, every n-th value in one bucket, all in float16."""
    levels = 2.0 ** (bits - 1)

    def encode(x, shared, private):
        columns = x.reshape(min(bucket, x.size), -1)
        scale = jnp.max(jnp.abs(columns), axis=0)
        steps = half(half(columns / half(scale + half(1e-6))[None]) * levels)
        codes = jnp.clip(jnp.round(steps), -levels, levels - 1)
        return Payload((codes.astype(jnp.int8), scale.astype(jnp.float16)), x.size)

    def decode(payload, shared):
        codes, scale = payload.data
        return half(codes / levels * scale.astype(jnp.float32)[None]).reshape(-1)

    name = f"cocktail_quantizer({bits}, {bucket})"
    return Compressor(name, encode, decode, bits_per_parameter=8.0)


def cocktail_compressor(env):
    """The compressor of a CocktailSGD trace, from the environment variables that it ran with."""
    stride, bucket = int(1 / float(env["RANDOMP_RATIO"])), int(env["QUANT_BUCKET_SIZE"])
    return jaxcomp.compose(
        jaxcomp.random_k(1 / stride, "strided"),
        jaxcomp.top_k(float(env["TOPK_RATIO"])),
        cocktail_quantizer(int(env["QUANT_BITS"]), bucket),
    )


def _exchanged(chunks, axis_name):
    return Hop(lambda x: lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0), chunks)


def _gathered(chunk, axis_name):
    return Hop(lambda x: lax.all_gather(x, axis_name, to="invarying"), chunk)


def half_two_shot_journey(x, owner_residual, compressor, shared, axis_name):
    """The two-shot mean of CocktailSGD's code: differences, sums and residuals in float16."""
    num_replicas = lax.axis_size(axis_name)
    code = lambda v: compressor.decode(compressor.encode(half(v), shared, shared), shared)
    sent = jax.vmap(code)(x.reshape(num_replicas, -1))
    received = yield _exchanged(sent, axis_name)
    total = received[0]
    for row in received[1:]:
        total = half(total + row)
    total = half(half(total / num_replicas) + owner_residual)
    passed_on = code(total)
    mean = (yield _gathered(passed_on, axis_name)).reshape(-1)
    return wire.Mean(mean, sent.reshape(-1), half(total - passed_on))


half_two_shot = wire.Exchange(half_two_shot_journey, owns_chunks=True)


def one_bit_journey(x, owner_residual, compressor, shared, axis_name):
    """DeepSpeed's 1-bit all-reduce: one l2 scale of a worker's whole tensor, one of a chunk."""

    def code(v):
        scale = jnp.linalg.norm(v) / jnp.sqrt(jnp.float32(v.size))
        return jnp.where(v >= 0, scale, -scale)

    num_replicas = lax.axis_size(axis_name)
    sent = code(x)
    received = yield _exchanged(sent.reshape(num_replicas, -1), axis_name)
    total = jnp.sum(received, axis=0) / num_replicas + owner_residual
    passed_on = code(total)
    mean = (yield _gathered(passed_on, axis_name)).reshape(-1)
    return wire.Mean(mean, sent, total - passed_on)


one_bit = wire.Exchange(one_bit_journey, owns_chunks=True)


def per_tensor(path, leaf):
    """A policy under which each tensor travels by itself."""
    return dataclasses.replace(jaxcomp.sign(), name=f"sign of {path}")


def masked_by(masks):
    """A policy of masks given as bool[steps, numel] a tensor; all of a tensor's values travel."""

    def policy(path, leaf):
        on = jnp.asarray(masks[path], jnp.float32)
        selection = Selection(
            kept=lambda numel: numel,
            select=lambda x, shared: (x * on[shared.count], ()),
            scatter=lambda values, where, shared, numel: values * on[shared.count],
            density=1.0,
            position_bits=0.0,
        )
        return sparsifier(f"mask of {path}", selection, contraction=0.0, linear=True)

    return policy
