"""Optax transformations that average over replicas by compressed messages."""

from jaxcomp.transforms.clipping import clip_by_global_norm
from jaxcomp.transforms.cocktail_sgd import CocktailSGDState, cocktail_sgd
from jaxcomp.transforms.compressed_mean import CompressedMeanState, compressed_mean
from jaxcomp.transforms.one_bit_adam import OneBitAdamState, one_bit_adam
from jaxcomp.transforms.one_bit_lamb import OneBitLambState, one_bit_lamb
from jaxcomp.transforms.sharded_optimizer import ShardedOptimizerState, sharded_optimizer
from jaxcomp.transforms.slamb import SlambState, slamb
from jaxcomp.transforms.zero_one_adam import ZeroOneAdamState, zero_one_adam
from jaxcomp.transforms.zero_one_adam_deepspeed import (
    ZeroOneAdamDeepSpeedState,
    zero_one_adam_deepspeed,
)

__all__ = [
    "CocktailSGDState",
    "CompressedMeanState",
    "OneBitAdamState",
    "OneBitLambState",
    "ShardedOptimizerState",
    "SlambState",
    "ZeroOneAdamDeepSpeedState",
    "ZeroOneAdamState",
    "clip_by_global_norm",
    "cocktail_sgd",
    "compressed_mean",
    "one_bit_adam",
    "one_bit_lamb",
    "sharded_optimizer",
    "slamb",
    "zero_one_adam",
    "zero_one_adam_deepspeed",
]
