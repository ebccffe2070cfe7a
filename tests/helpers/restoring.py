"""A checkpoint that is read whole."""

from train.checkpoints import store


def restore(directory, like, step=None):
    """The tree of a checkpoint, its metadata and its step; the newest by default."""
    saved = store.choose(directory, step)
    return store.load(saved, like), saved.metadata, saved.step
