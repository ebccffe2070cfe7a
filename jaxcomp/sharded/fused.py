"""Several arrays behind each other as one bucket, each by a code of its own."""

import dataclasses
import itertools

import jax.numpy as jnp

from jaxcomp.compressors.base import Compressor, Payload
from jaxcomp.compressors.packing import fold


def fused(*parts: tuple[Compressor, int]) -> Compressor:
    """Codes the parts of a bucket apart, so that no block lies in two of them, as one payload.

    All parts see the same shared key, and so the same random shift; rounding noise and levels are
    a part's own. Unlike other compressors it is made for buckets of one size, and promises what
    all parts promise.

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
    """What `fused` makes of these parts, but that it decodes one of them alone.

    So each part gets a dtype of its own, and no array ever holds them all.
    """
    whole = fused(*parts)
    code, size = parts[index]

    def decode(payload, shared):
        return code.decode(Payload(payload.data[index], size), _of_part(shared, index))

    return dataclasses.replace(whole, name=f"piece_of({index}, {whole.name})", decode=decode)


def _of_part(shared, index):
    return shared if shared.levels is None else shared._replace(levels=shared.levels[index])
