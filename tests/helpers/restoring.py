"""A checkpoint that is read whole, and trees that are compared bit for bit."""

import jax
import numpy as np

from train.checkpoints import store


def restore(directory, like, step=None):
    """The tree of a checkpoint, its metadata and its step; the newest by default."""
    saved = store.choose(directory, step)
    return store.load(saved, like), saved.metadata, saved.step


def require_equal_bits(tree, other):
    """Compares the bytes of all leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), same in zip(leaves, jax.tree.leaves(other), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(same).tobytes(), path
