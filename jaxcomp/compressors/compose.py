"""Chains sparsifiers with a code for the values that they keep; CocktailSGD's is such a chain."""

import math

from jaxcomp.compressors.base import Compressor, require_compressor
from jaxcomp.compressors.quantize import quantize
from jaxcomp.compressors.sparse import chained, random_k, top_k


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
        require_compressor("compose", stage)
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
    last = stages[-1]
    encode, decode, entries, bits = last.encode, last.decode, last.entries, last.bits_per_parameter
    for selection in reversed(selections):
        encode, decode, entries = chained(selection, encode, decode)
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
        entries=entries,
    )


def cocktail(
    random: float = 0.1,
    top: float = 0.2,
    bits: int = 4,
    block: int = 128,
    top_block: int | None = 128,
) -> Compressor:
    """Random sparsification, then top-K, then quantization: CocktailSGD's compressor.

    It is `compose(random_k(random), top_k(top, block=top_block), quantize(bits, block=block))`. It
    costs `random * (1 + kept * (bits + 16 / block))` bits per parameter, where `kept` is
    `ceil(top * top_block) / top_block`: 0.184 by default, 87 times fewer than float16.

    Args:
      random: Share of the entries that a step considers, the same on all replicas: in (0, 1], one
        over an integer.
      top: Share of these that is sent, the largest ones, in (0, 1]; a bit mask gives their
        positions.
      bits: Width of a value's code, 1 to 8.
      block: Values that share a scale.
      top_block: Entries among which to choose the largest. The default is what every accelerator
        chooses from in one pass. None chooses from all, as the authors do: 0.182 bits.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      J. Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", ICML 2023,
      algorithm 2; the default is that of the authors' fine-tuning scripts. Their code differs in
      four points: random entries lie a stride apart (`random_k(random, "strided")`), the largest
      are chosen from all of these, codes are asymmetric (the largest value decodes to 7/8 of
      itself), and blocks are strided.
    """
    return compose(random_k(random), top_k(top, block=top_block), quantize(bits, block=block))
