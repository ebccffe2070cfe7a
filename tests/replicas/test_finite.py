"""What is not finite is found on every shard, and what follows from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.finite import (
    finite,
    finite_by_leaf,
    finite_by_row,
    not_finite,
    poisoned,
    unless,
)
from tests.helpers.replicas import mesh_of

TREE = {"a": jnp.ones(3), "b": jnp.zeros((2, 2), jnp.bfloat16)}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_entry_makes_a_tree_fail(value):
    assert finite(TREE) and finite({})
    assert not finite(TREE | {"b": TREE["b"].at[1, 0].set(value)})


@pytest.mark.parametrize("form", [finite_by_leaf, finite_by_row])
def test_both_forms_find_one_entry_of_any_leaf(form):
    shapes = (), (3,), (2**16 + 1,), (4, 5), (2, 3, 4), (0, 2), (0,)
    leaves = [np.ones(shape, np.float32) for shape in shapes]
    check = jax.jit(form)
    assert check(leaves) and form([])
    for x in leaves:
        for place in {0, x.size - 1} if x.size else ():
            x.flat[place] = np.inf
            assert not check(leaves)
            x.flat[place] = 1


@pytest.mark.parametrize("form", [finite_by_leaf, finite_by_row])
def test_leaves_that_vary_and_others_are_checked_together(form):
    def found(x, same):
        return form([x, same])[None]

    x = np.zeros((2, 4), np.float32)
    x[1, 3] = np.nan
    specs = {"in_specs": (P("replica"), P()), "out_specs": P("replica")}
    check = jax.shard_map(found, mesh=mesh_of(2), **specs)
    assert check(x, np.zeros(3)).tolist() == [True, False]
    assert check(x, np.full(3, np.nan)).tolist() == [False, False]


@pytest.mark.parametrize("replica", range(2))
def test_every_replica_knows_of_itself_or_of_all(replica):
    mesh, x = mesh_of(2), np.zeros((2, 4), np.float32)
    x[replica, 3] = np.nan

    def found(x):
        return not_finite(x, "replica")[None], not_finite(x)

    sharded = jax.shard_map(found, mesh=mesh, in_specs=P("replica"), out_specs=(P("replica"), P()))
    own, of_all = sharded(x)
    assert own.tolist() == [int(number == replica) for number in range(2)] and of_all == 1


def test_what_fails_is_poison_for_others_or_stays_as_it_was():
    old = jax.tree.map(lambda x: x + 1, TREE)
    for bad in (False, True):
        for name, x in poisoned(jnp.bool_(bad), TREE).items():
            assert x.dtype == TREE[name].dtype and np.all(np.isnan(np.float32(x)) == bad)
        for name, x in unless(jnp.bool_(bad), TREE, old).items():
            np.testing.assert_array_equal(x, (old if bad else TREE)[name])
