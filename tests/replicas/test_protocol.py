"""The protocol of states: what is found by which name, and what is not."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.tree_util import DictKey, GetAttrKey

from jaxcomp.replicas import protocol


@protocol.MethodState.register
class Own(NamedTuple):
    """The state of somebody's own method with a drift."""

    drift: Any
    owner_residual: Any
    owned: Any
    rounds: Any
    skipped: Any


@protocol.MethodState.register
class Feedback(NamedTuple):
    """That of one that sends all in every step, and leaves what is not finite to the step."""

    residual: Any


@protocol.EvaluatesConsensus.register
class Outer(NamedTuple):
    """That of a method whose drift is not yet part of the model."""

    drift: Any


class Theirs(NamedTuple):
    """That of another library, which means something else by these words."""

    drift: Any
    residual: Any
    skipped: Any
    rounds: Any
    loss_scale: Any
    owner_residual: Any = ()


@protocol.MethodState.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnData:
    """A state that is no NamedTuple, around another one."""

    rounds: Any
    inner: Any


PARAMS = {"drift": jnp.ones(2), "layers": [{"residual": jnp.ones(3)}]}
OWN = Own(PARAMS, (jnp.zeros(4),), [jnp.ones(4)], {"all": jnp.int32(3)}, jnp.int32(2))
STATE = {"a": (optax.adam(1.0).init(PARAMS), OWN), "b": Feedback(PARAMS)}
THEIRS = Theirs(PARAMS, PARAMS, jnp.int32(1), {"all": jnp.int32(1)}, jnp.float32(8))


def test_fields_are_those_of_methods_and_not_of_parameters():
    assert protocol.drifts(STATE) == [PARAMS]
    assert protocol.residuals(STATE) == [PARAMS]
    assert protocol.skipped(STATE) == [2]
    assert protocol.rounds(STATE) == {"all": 3}
    assert protocol.rounds(STATE["b"]) == {} and protocol.drifts(PARAMS) == []


def test_a_drift_is_evaluated_unless_its_class_says_that_the_consensus_is_the_model():
    both = STATE, Outer(PARAMS), [Own(OWN.rounds, (), (), {}, 0)]
    assert protocol.evaluated_drifts(both) == [PARAMS, OWN.rounds]
    assert protocol.drifts(both) == [PARAMS, PARAMS, OWN.rounds]
    assert protocol.evaluated_drifts((Outer(PARAMS), THEIRS)) == []


def test_several_methods_cannot_count_as_one():
    with pytest.raises(ValueError, match="2 methods that count .* write one of them"):
        protocol.rounds([OWN, OWN])


def test_fields_of_other_libraries_mean_nothing():
    assert protocol.drifts(THEIRS) == protocol.residuals(THEIRS) == protocol.skipped(THEIRS) == []
    assert protocol.rounds([OWN, THEIRS]) == {"all": 3} and protocol.loss_scale(THEIRS) is None
    assert protocol.exchanging(THEIRS) is None and not protocol.has_feedback(THEIRS)
    assert not protocol.keeps_rounding(THEIRS) and not protocol.exchanges_ahead(THEIRS)
    assert protocol.leaves_out_alone([OWN, THEIRS])
    # What a method keeps of it is looked through.
    assert protocol.drifts(Theirs(OWN, (), 0, {}, 1)) == [PARAMS]


def test_any_class_of_named_children_may_be_a_state():
    state = OwnData({"all": 3}, {"adam": OWN._replace(rounds=None)})
    assert list(protocol.fields(state, "drift", "rounds")) == [
        (GetAttrKey("rounds"),),
        (GetAttrKey("inner"), DictKey("adam"), GetAttrKey("drift")),
        (GetAttrKey("inner"), DictKey("adam"), GetAttrKey("rounds")),
    ]


def test_a_state_with_fields_of_the_protocol_must_be_registered():
    protocol.require_registered(OWN)
    protocol.require_registered(optax.adam(1.0).init(PARAMS))
    with pytest.raises(ValueError, match=r"Theirs has the fields .*'drift'.*MethodState\.register"):
        protocol.require_registered(THEIRS)


def test_only_methods_that_all_count_what_they_skip_are_left_alone():
    assert protocol.leaves_out_alone(OWN) and protocol.leaves_out_alone([OWN, OWN])
    assert not protocol.leaves_out_alone(STATE)
    assert not protocol.leaves_out_alone(optax.adam(1.0).init(PARAMS))


def test_a_state_that_exchanges_says_by_which_field():
    assert protocol.exchanging(OWN) == "owner_residual"
    assert protocol.exchanging(optax.adam(1.0).init(PARAMS)) is None


def test_a_path_tells_what_owners_hold():
    def of(state):
        owned = protocol.fields(state, "owner_residual", "owned")
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        return [name for path in paths if (name := protocol.field_of(path, owned))]

    assert of(OWN) == ["owner_residual", "owned"]
    assert of(PARAMS) == of(THEIRS) == []
    assert protocol.has_feedback(OWN) and not protocol.has_feedback(PARAMS)
