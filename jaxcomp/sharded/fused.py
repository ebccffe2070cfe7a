"""Several arrays as one bucket, each with its own code."""

import dataclasses
import itertools

import jax.numpy as jnp

from jaxcomp.compressors.base import Compressor, Payload
from jaxcomp.compressors.packing import fold


def fused(*parts: tuple[Compressor, int]) -> Compressor:
    """Encodes the parts of a bucket separately, as one payload, so that no block crosses parts.

    All parts have the same shared key, and so the same random shift; each has its own rounding
    noise and levels. Unlike other compressors it is for buckets of one size. It promises what all
    parts promise.

    Args:
      *parts: The code and the number of elements of each part, at least 1, in order.

    Raises:
      ValueError: At construction, without parts; at trace time, for a bucket of another size.
    """
    if not parts:
        raise ValueError("fused() got no part; write fused((quantize(8), numel))")
    codes, sizes = zip(*parts, strict=True)
    numel, ends = sum(sizes), list(itertools.accumulate(sizes))

    def encode(x, shared, private):
        if x.size != numel:
            raise ValueError(
                f"fused got a bucket of {x.size} values, needs the {numel} of its parts"
            )
        pieces = [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        data = [
            code.encode(piece, _of_part(shared, index), fold(private, index)).data
            for index, (code, piece) in enumerate(zip(codes, pieces, strict=True))
        ]
        return Payload(tuple(data), numel)

    def decode(payload, shared):
        pieces = [
            code.decode(Payload(data, size), _of_part(shared, index))
            for index, (code, size, data) in enumerate(zip(codes, sizes, payload.data, strict=True))
        ]
        return jnp.concatenate(pieces)

    contractions = [code.contraction for code in codes]
    return Compressor(
        name=f"fused({', '.join(f'({code.name}, {size})' for code, size in parts)})",
        encode=encode,
        decode=decode,
        bits_per_parameter=sum(c.bits_per_parameter * n for c, n in parts) / numel,
        contraction=None if None in contractions else min(contractions),
        unbiased=all(code.unbiased for code in codes),
        linear=all(code.linear for code in codes),
    )


def piece_of(index: int, *parts: tuple[Compressor, int]) -> Compressor:
    """The code that `fused` makes from these parts, but it decodes only one of them.

    So each part gets its own dtype, and no array holds all of them.
    """
    whole = fused(*parts)
    code, size = parts[index]

    def decode(payload, shared):
        return code.decode(Payload(payload.data[index], size), _of_part(shared, index))

    return dataclasses.replace(whole, name=f"piece_of({index}, {whole.name})", decode=decode)


def _of_part(shared, index):
    return shared if shared.levels is None else shared._replace(levels=shared.levels[index])
