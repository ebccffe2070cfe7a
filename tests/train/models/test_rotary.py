"""Rotary position embeddings: how fast features turn."""

import math

import numpy as np

from train.models import rotary


def test_long_waves_are_stretched_as_in_metas_code():
    """`apply_scaling` of llama-models, one frequency at a time, with the numbers of Llama 3.1."""
    factor, low, high, context = 8.0, 1.0, 4.0, 8192.0

    def scaled(turns):
        wave = 2 * math.pi / turns  # tokens of one turn
        if wave < context / high:
            return turns
        if wave > context / low:
            return turns / factor
        smooth = (context / wave - low) / (high - low)
        return (1 - smooth) * turns / factor + smooth * turns

    plain = rotary.frequencies(128, 500_000.0, None)
    found = rotary.frequencies(128, 500_000.0, (factor, low, high, context))
    np.testing.assert_allclose(found, [scaled(float(x)) for x in plain], rtol=1e-6)
    kept = found / plain
    middle = (kept > 1.01 / factor) & (kept < 0.99)
    assert kept[0] == 1 and math.isclose(kept[-1], 1 / factor) and middle.sum() == 6
