"""A run of islands for each test."""

import itertools

import optax
import pytest

import jaxcomp
from jaxcomp import islands
from tests.helpers.exact_islands import START

numbers = itertools.count()
exact = {"code": jaxcomp.identity(), "outer": optax.sgd(1.0)}


@pytest.fixture
def url():
    return f"memory://run-{next(numbers)}"


@pytest.fixture
def join(url):
    """Joins the test's run; all islands end with the test."""
    joined = []

    def join(name, params=START, **options):
        given = {"every": 1, "poll": 0.02, "deadline": 20.0, "patience": 60.0, **exact, **options}
        joined.append(islands.join(given.pop("url", url), params, name=name, **given))
        return joined[-1]

    yield join
    for island in joined:
        island._end(leaves=False)
        assert not island._crew.courier.is_alive()
