"""Optax transformations with collectives of their own."""

from jaxcomp.transforms.compressed_mean import CompressedMeanState as CompressedMeanState
from jaxcomp.transforms.compressed_mean import compressed_mean as compressed_mean
