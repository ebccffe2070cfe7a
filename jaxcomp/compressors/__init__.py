"""Pure codes for one flat float32 bucket; no collective in them."""

from jaxcomp.compressors.base import Compressor, Key, Levels, Payload, Selection, identity
from jaxcomp.compressors.cocktail import cocktail
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.learned import learned_levels
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.quantize import cast, quantize
from jaxcomp.compressors.rotated import rotated
from jaxcomp.compressors.sign import sign
from jaxcomp.compressors.sparse import group_top_1, random_k, top_k

__all__ = [
    "Compressor",
    "Key",
    "Levels",
    "Payload",
    "Selection",
    "cast",
    "cocktail",
    "compose",
    "fold",
    "group_top_1",
    "identity",
    "learned_levels",
    "quantize",
    "random_k",
    "rotated",
    "sign",
    "top_k",
]
