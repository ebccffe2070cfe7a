"""The common work of all peers, made by `train`: initial weights, and rows of text."""

import pathlib

import jax
import numpy as np

from jaxcomp.compressors.policies import path_of
from train import examples
from train.config import Config
from train.placement import build


def write(path: pathlib.Path, config: Config, steps: int) -> None:
    """Writes the weights and rows of a run of this config, for programs without JAX.

    Args:
      path: An `.npz` file: the parameters by their paths, `train` i32[steps, batch, context + 1]
        and `validation` i32[eval_batches, batch, context + 1].
      config: The run.
      steps: Number of steps whose rows are written.
    """
    made, rows = examples.read(config), slice(0, config.data.batch)
    leaves = jax.tree_util.tree_leaves_with_path(build.random_params(config))
    arrays = {path_of(key): np.asarray(leaf) for key, leaf in leaves}
    arrays["train"] = np.stack([made.train(step, rows) for step in range(steps)])
    arrays["validation"] = np.stack(
        [made.validation(number, rows) for number in range(config.eval_batches)]
    )
    np.savez(path, **arrays)
