"""Random rotations in front of a code."""

import numpy as np

from jaxcomp.compressors.quantize import quantize
from jaxcomp.compressors.rotated import rotated
from tests.helpers.coding import decoded, hard_buckets


def test_rotation_takes_outliers_from_the_scale_and_draws_anew():
    x, code = hard_buckets()[1], quantize(4, block=256)
    error = lambda code, shared: np.linalg.norm(decoded(code, x, shared=shared) - x)
    turned = [error(rotated(code, block=256), shared) for shared in range(3)]
    assert max(turned) < 0.75 * error(code, 0)
    assert len(set(turned)) == 3
