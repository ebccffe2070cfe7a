"""Signs with one scale a block."""

import numpy as np

from jaxcomp.compressors.sign import sign
from tests.helpers.coding import (
    decoded,
)


def test_sign_of_zero_is_plus_and_zeros_stay_zeros_in_their_block():
    x = np.array([0, 4, -0.0, -4, 0, 0, 0, 0], "f4")
    np.testing.assert_array_equal(decoded(sign(block=4), x), [2, 2, 2, -2, 0, 0, 0, 0])
