"""A small run of islands in one process, whose numbers are exact."""

import threading

import jax
import numpy as np

from tests.helpers import replicas

SHAPES = {"bias": (6,), "kernel": (5, 8)}
START = jax.tree.map(
    lambda x: np.round(64 * x).astype(np.float32) / 64, replicas.random_tree(0, shapes=SHAPES)
)


def moved(params, by):
    return {name: params[name] + np.float32(by) for name in params}


def together(*steps):
    """Calls functions in threads of their own, which must all return."""
    threads = [threading.Thread(target=step, daemon=True) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
