"""Journeys stop together before each hop, and come home with what they have found."""

import pytest

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
