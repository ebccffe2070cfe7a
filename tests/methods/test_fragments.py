"""Parts of a model: whole leaves, cut and put together again."""

import numpy as np
import optax
import pytest

from jaxcomp.methods.local_steps import fragments_of

PARAMS = {"a": np.zeros((4, 4)), "b": {"c": np.zeros(9), "d": np.zeros(6)}, "e": np.zeros(())}


def test_parts_are_of_about_equal_sizes_and_join_to_the_whole():
    parts = fragments_of(2, PARAMS)
    assert parts.owners == (0, 1, 1, 1) and parts.names("x") == ["x_0", "x_1"]
    first, second = parts.cut(PARAMS)
    assert first["b"] == {"c": optax.MaskedNode(), "d": optax.MaskedNode()}
    joined = parts.merged([first, second])
    assert joined["b"]["d"] is PARAMS["b"]["d"] and joined["a"] is PARAMS["a"]
    nothing = {"a": None, "b": {"c": None, "d": 3}, "e": None}
    assert parts.merged(parts.cut(nothing)) == nothing


def test_a_policy_numbers_the_parts():
    parts = fragments_of(lambda path, leaf: int(path.startswith("b/")), PARAMS)
    assert parts.owners == (0, 1, 1, 0)
    assert fragments_of(1, PARAMS).names("x") == ["x"]


@pytest.mark.parametrize("fragments", [5, lambda path, leaf: 2 * (path == "a")])
def test_a_part_without_leaves_is_refused(fragments):
    with pytest.raises(ValueError, match="of 4 leaves; needs a leaf in each of .* from 0 on"):
        fragments_of(fragments, PARAMS)
