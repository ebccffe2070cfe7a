"""Journeys stop together before each hop, and come home with what they have found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.exchange import journeys
from jaxcomp.exchange.journeys import Hop, alone, completed, received, resumed


def walk(name, hops, log):
    """A journey that sends its name and the hop's number, and returns all that came back."""
    found = []
    for number in range(hops):
        log.append((name, number, "ready"))
        found.append((yield Hop(lambda message: message.upper(), f"{name}{number}")))
    log.append((name, "home"))
    return found


def test_all_messages_of_a_hop_are_ready_before_any_arrives():
    log = []

    def pace(travel, messages):
        log.append(("leave", *messages))
        return travel(messages)

    assert completed([walk("a", 2, log), walk("b", 1, log), walk("c", 0, log)], pace) == [
        ["A0", "A1"],
        ["B0"],
        [],
    ]
    assert log == [
        ("a", 0, "ready"),
        ("b", 0, "ready"),
        ("c", "home"),
        ("leave", "a0", "b0"),
        ("a", 1, "ready"),
        ("b", "home"),
        ("leave", "a1"),
        ("a", "home"),
    ]


def test_a_pace_may_send_other_messages_and_change_what_arrives():
    pace = lambda travel, messages: [x + "!" for x in travel([m + "?" for m in messages])]
    assert completed([walk("a", 1, [])], pace) == [["A0?!"]]


def test_one_journey_alone_and_none_at_all():
    assert alone(walk("a", 2, [])) == ["A0", "A1"]
    assert completed([]) == []


def test_a_journey_resumes_from_what_another_like_it_has_received():
    arrived = received(walk("a", 2, []))
    assert arrived == ["A0", "A1"] and received(walk("a", 0, [])) == []
    assert resumed(walk("b", 2, []), arrived) == arrived
    with pytest.raises(ValueError, match="more than 2 hops"):
        resumed(walk("a", 3, []), arrived)


@pytest.mark.parametrize(
    ("platform", "dtype", "messages"),
    [("cpu", "float32", 2), ("cpu", "bfloat16", 3), ("gpu", "float32", 3)],
)
def test_on_cpus_sums_of_one_type_are_one_message(monkeypatch, platform, dtype, messages):
    monkeypatch.setattr(journeys, "platform", lambda: platform)
    sent = []

    def doubled(message):
        sent.append(message)
        return jax.tree.map(lambda x: 2 * x, message)

    def walk(message, is_sum):
        return (yield Hop(doubled, message, is_sum))

    trees = [
        jnp.arange(3.0),
        jnp.ones(2),
        {"a": jnp.full((2, 2), 5.0, dtype), "b": jnp.arange(4.0)},
    ]
    found = completed([walk(trees[0], True), walk(trees[1], False), walk(trees[2], True)])
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(lambda x: 2 * x, trees))
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(found) == dtypes(trees)
    assert len(sent) == messages
