"""Chains sparsifiers with a code for the values that they keep."""

import math

from jaxcomp.compressors import checks
from jaxcomp.compressors.base import Compressor, Payload, Selection, identity
from jaxcomp.compressors.packing import fold


def compose(*stages: Compressor) -> Compressor:
    """Passes the values that each sparsifier keeps to the next stage; the last stage encodes them.

    Each stage adds to the payload only what the receiver cannot know. The contraction is the
    product of the stages'.

    Args:
      *stages: Sparsifiers, then any compressor. If the last is a sparsifier too, the values that it
        keeps are sent as float32. At most one is `random_k`: a second one would roll with the same
        count and never visit most entries. A chain inside a chain counts as its stages; a single
        stage is returned as it is.

    Examples:
      >>> import jaxcomp
      >>> code = jaxcomp.compose(
      ...     jaxcomp.random_k(0.1), jaxcomp.top_k(0.2), jaxcomp.quantize(4)
      ... )
      >>> round(code.bits_per_parameter, 6)
      0.1825

    Raises:
      ValueError: At construction, without stages, for an argument that is not a compressor, for a
        stage before the last that is not a sparsifier, or for two `random_k`.

    References:
      J. Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", ICML
      2023, algorithm 2.
    """
    if not stages:
        raise ValueError("compose() got no stage; write identity() to send float32 values")
    for stage in stages:
        checks.compressor("compose", stage)
    # Chains inside a chain are flattened, so that the checks see all stages.
    stages = tuple(one for stage in stages for one in stage.stages or (stage,))
    selections = []
    for stage in stages[:-1]:
        if stage.selection is None:
            raise ValueError(
                f"compose got {stage.name} before the last stage, where only a sparsifier may "
                "stand: random_k, top_k or group_top_1; write it as the last stage"
            )
        selections.append(stage.selection)
    if sum(stage.selection is not None and stage.linear for stage in stages) > 1:
        raise ValueError(
            f"compose got {', '.join(stage.name for stage in stages)}: needs at most one random_k; "
            "write one with the product of the densities"
        )
    if len(stages) == 1:
        return stages[0]
    encode, decode, bits = stages[-1].encode, stages[-1].decode, stages[-1].bits_per_parameter
    for selection in reversed(selections):
        encode, decode = _chain(selection, encode, decode)
        bits = selection.position_bits + selection.density * bits
    alphas = [stage.contraction for stage in stages if stage.contraction is not None]
    return Compressor(
        name=f"compose({', '.join(stage.name for stage in stages)})",
        encode=encode,
        decode=decode,
        bits_per_parameter=bits,
        contraction=math.prod(alphas) if len(alphas) == len(stages) else None,
        unbiased=all(stage.unbiased for stage in stages),
        linear=all(stage.linear for stage in stages),
        shared_selection=(selections[0], compose(*stages[1:])) if stages[0].linear else None,
        stages=stages,
    )


def sparsifier(name: str, selection: Selection, contraction: float, linear: bool) -> Compressor:
    """Makes the compressor that sends what a selection keeps, in float32; `compose` can chain it.

    Args:
      name: The call that makes it.
      selection: What is kept, and how the receiver learns where.
      contraction: Least share of the squared norm that is kept, in expectation.
      linear: Whether the positions are the same on all replicas.
    """
    exact = identity()
    encode, decode = _chain(selection, exact.encode, exact.decode)
    return Compressor(
        name=name,
        encode=encode,
        decode=decode,
        bits_per_parameter=selection.position_bits + selection.density * exact.bits_per_parameter,
        contraction=contraction,
        unbiased=contraction == 1.0,
        linear=linear,
        selection=selection,
    )


def _chain(selection, encode_kept, decode_kept):
    # Each stage folds the shared key, so that two stages never draw the same numbers.
    def encode(x, shared, private):
        values, where = selection.select(x, shared)
        return Payload((where, encode_kept(values, fold(shared, 1), private).data), x.size)

    def decode(payload, shared):
        where, data = payload.data
        kept = Payload(data, selection.kept(payload.numel))
        values = decode_kept(kept, fold(shared, 1))
        return selection.scatter(values, where, shared, payload.numel)

    return encode, decode
