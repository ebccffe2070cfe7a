"""Parameters for another run: the mean of what replicas of a checkpoint had, each by itself."""

import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp import MethodState
from tests.helpers.replicas import mesh_of, one_value
from train.checkpoints import mean, store


@MethodState.register
class State(NamedTuple):
    drift: Any
    momentum: Any


# A parameter has the name of the field.
PARAMS = {"a": {"w": np.ones((2, 3), np.float32)}, "drift": {"w": np.ones(3, np.float32)}}


def rows(count, x):
    return np.arange(count * x.size, dtype=np.float32).reshape(count, *x.shape)


@pytest.mark.parametrize("count", [4, 3])
def test_reads_the_mean_of_any_number_of_replicas_below_the_working_folder(
    tmp_path, monkeypatch, count
):
    monkeypatch.chdir(tmp_path)
    drift = jax.tree.map(lambda x: rows(count, x), PARAMS)
    # As a share of a fast axis is: filled up.
    filled = drift | {"a": {"w": np.pad(drift["a"]["w"], [(0, 0), (0, 1), (0, 0)])}}
    state = (State(filled, drift), {"count": np.int32(3)})
    names = mean.drifts(state)
    assert names == {"state/0/drift/a/w": "a/w", "state/0/drift/drift/w": "drift/w"}
    tree = jax.tree.map(jax.numpy.asarray, {"params": PARAMS, "state": state})
    mesh = mesh_of(2)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    moved = jax.tree.map(lambda p, d: p + d.mean(axis=0), PARAMS, drift)
    # Checkpoints of older versions name no drifts.
    for step, (metadata, expected) in enumerate([({}, PARAMS), ({"drifts": names}, moved)]):
        checkpoints = store.open_checkpoints("here")
        checkpoints.save(step, tree, metadata | {"num_replicas": count})
        checkpoints.close()
        saved = store.choose("here")
        # A running run saves another one, of which nothing is read.
        checkpoints = store.open_checkpoints("here")
        other = jax.tree.map(lambda x: x + 1, tree)
        checkpoints.save(10 + step, other, {"drifts": {}, "num_replicas": count})
        checkpoints.close()
        got = mean.restore_mean(saved, jax.tree.map(place, PARAMS), mesh)
        shutil.rmtree(f"here/{10 + step}")
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(one_value, got), expected)
