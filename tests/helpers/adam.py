"""What the tests of 0/1 Adam and 1-bit Adam share: a small tree, its gradients, and training."""

import functools

import numpy as np

from tests.helpers import replicas

SHAPES = {"bias": (7,), "kernel": (33, 40)}
RATE = 2.0**-7  # exact in float32
random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)
GRADIENTS = [random_tree(step, 4, dtype=np.float64) for step in range(1, 7)]


def trained(tx, gradients, num_replicas=4, dtype=np.float32):
    """Parameters and states after each step."""
    return replicas.history_of(tx, random_tree(0, dtype=dtype), gradients, num_replicas)
