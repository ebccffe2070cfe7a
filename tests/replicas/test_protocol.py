"""The protocol of states: what is found by which name, and what is not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcomp.replicas import protocol


class Own(NamedTuple):
    """The state of somebody's own method with a drift."""

    drift: Any
    owner_residual: Any
    owned: Any
    rounds: Any
    skipped: Any


class Feedback(NamedTuple):
    """That of one that sends all in every step, and leaves what is not finite to the step."""

    residual: Any


PARAMS = {"drift": jnp.ones(2), "layers": [{"residual": jnp.ones(3)}]}
OWN = Own(PARAMS, (jnp.zeros(4),), [jnp.ones(4)], {"all": jnp.int32(3)}, jnp.int32(2))
STATE = {"a": (optax.adam(1.0).init(PARAMS), OWN), "b": Feedback(PARAMS)}


def test_fields_are_those_of_methods_and_not_of_parameters():
    assert protocol.drifts(STATE) == [PARAMS]
    assert protocol.residuals(STATE) == [PARAMS]
    assert protocol.skipped(STATE) == [2]
    assert protocol.rounds(STATE) == {"all": 3}
    assert protocol.rounds(STATE["b"]) == {} and protocol.drifts(PARAMS) == []


def test_several_methods_cannot_count_as_one():
    with pytest.raises(KeyError, match="multiple values for 'rounds'"):
        protocol.rounds([OWN, OWN])


def test_only_methods_that_all_count_what_they_skip_are_left_alone():
    assert protocol.leaves_out_alone(OWN) and protocol.leaves_out_alone([OWN, OWN])
    assert not protocol.leaves_out_alone(STATE)
    assert not protocol.leaves_out_alone(optax.adam(1.0).init(PARAMS))


def test_a_state_that_exchanges_says_by_which_field():
    assert protocol.exchanging(OWN) == "owner_residual"
    assert protocol.exchanging(optax.adam(1.0).init(PARAMS)) is None


def test_a_path_tells_what_owners_hold():
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(OWN)]
    assert [protocol.is_owned(path) for path in paths].count(True) == 2
    assert not any(
        protocol.is_owned(path) for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)
    )
    assert protocol.has_feedback(OWN) and not protocol.has_feedback(PARAMS)
