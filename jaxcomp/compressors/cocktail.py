"""CocktailSGD's compressor, as a chain of the others."""

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.quantize import quantize
from jaxcomp.compressors.sparse import random_k, top_k


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
      top_block: Entries among which to choose the largest. The default is what a GPU sorts, or a
        TPU compares, in one pass. None chooses from all, as the authors do: 0.182 bits.

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
