"""What all methods check, and how they count."""

import jax.numpy as jnp
import pytest

from jaxcomp._checks import require
from jaxcomp.methods.common import counted, no_rounds


def test_an_argument_out_of_range_is_named_with_what_to_write():
    require(True, "mine", "[0, 1)", "b=0.9", b=0.5)
    message = r"mine got a='x', b=3; needs \[0, 1\); write b=0.9\."
    with pytest.raises(ValueError, match=message):
        require(False, "mine", "[0, 1)", "b=0.9", a="x", b=3)


def test_rounds_count_what_was_sent():
    rounds = counted(no_rounds("code", "exact"), all=True, code=jnp.bool_(True), exact=False)
    rounds = counted(rounds, all=jnp.bool_(False), code=False, exact=jnp.bool_(True))
    assert {part: int(n) for part, n in rounds.items()} == {"all": 1, "code": 1, "exact": 1}
