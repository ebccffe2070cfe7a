"""Inputs for a parser: whatever it is given, it reads it or says what is wrong.

No traceback, no hang. `make fuzz` tries 3,000 inputs of each parser of tests/fuzz, where the suite
tries as many as fit a second or two.
"""

import copy
import functools
import json
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = int(os.environ.get("FUZZ", "0"))  # inputs of each parser; 0: what the suite has time for

TEXT = st.text(max_size=80)
NUMBERS = st.one_of(
    st.integers(-3), st.integers(), st.floats(), st.sampled_from([10**400, 2**63, True])
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)


@functools.cache  # made anew at each draw, they would take most of the time
def trees(keys=TEXT):
    """JSON values, objects among them whose keys are those of a file."""
    keys = st.one_of(keys, TEXT)
    return st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


def texts(good: str, keys=TEXT):
    """Texts of a file: any bytes, any JSON, and a good one with pieces cut, doubled or replaced."""

    harmed = _harmed(good, st.one_of(TEXT, LEAVES.map(json.dumps)))
    return st.one_of(
        st.binary(max_size=200),
        trees(keys).map(lambda value: json.dumps(value).encode(errors="surrogatepass")),
        st.just(b"[" * 60_000),
        harmed.map(lambda text: text.encode(errors="surrogatepass")),
    )


def octets(good: bytes):
    """A good file with pieces cut, doubled or replaced, its end gone, or any other bytes."""

    @st.composite
    def shorter(draw):
        content = draw(_harmed(good, st.binary(max_size=12)))
        return content[: draw(st.one_of(st.none(), st.integers(0, len(content))))]

    return st.one_of(st.binary(max_size=200), shorter())


@st.composite
def _harmed(draw, good, pieces):
    """Text or bytes with one to three pieces cut, doubled or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(good)))
        end = draw(st.integers(begin, min(len(good), begin + 40)))
        piece = draw(st.one_of(pieces, st.just(good[begin:end] * 2)))
        good = good[:begin] + piece + good[end:]
    return good


def objects(good: dict):
    """A good object with some of its values, however deep, replaced by any other, or gone."""

    @st.composite
    def harmed(draw):
        value = copy.deepcopy(good)
        for _ in range(draw(st.integers(1, 2))):
            node = value
            while True:
                key = draw(
                    st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
                )
                inner = node[key]
                if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                    break
                node = inner
            node[key] = draw(trees())
            if isinstance(node, dict) and draw(st.booleans()):
                node[draw(TEXT)] = draw(LEAVES)
        return value

    return st.one_of(trees(), harmed())


def fuzz(strategy, few=100):
    """Tries inputs of a strategy: `few` of them in the suite."""

    def decorated(test):
        quiet = [
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ]
        return settings(
            max_examples=FUZZ or few, deadline=5000, derandomize=not FUZZ, database=None,
            suppress_health_check=quiet,
        )(given(strategy)(test))  # fmt: skip

    return decorated


def refused(call, *args, **kwargs):
    """What a call returns, or None if it refuses its input in words of one line."""
    try:
        return call(*args, **kwargs)
    except ValueError as error:
        assert str(error)
