"""Compressors one after the other."""

import numpy as np
import pytest

from jaxcomp.compressors.compose import cocktail, compose
from jaxcomp.compressors.quantize import quantize
from jaxcomp.compressors.sparse import random_k, top_k
from tests.helpers.coding import bucket, decoded


def test_stages_of_a_composition_draw_different_numbers():
    compressor = compose(random_k(1.0, "random"), quantize(2, rounding="shift"))
    x = bucket(1000)
    alone = decoded(quantize(2, rounding="shift"), x)
    assert not np.array_equal(decoded(compressor, x), alone)


def test_a_chain_in_a_chain_is_one():
    chains = [
        compose(random_k(0.1), compose(top_k(0.2, block=128), quantize(4))),
        compose(compose(random_k(0.1), top_k(0.2, block=128)), quantize(4)),
    ]
    assert chains == [cocktail()] * 2


def test_compose_of_one_stage_is_the_stage():
    stage = quantize(4)
    assert compose(stage) is stage


def test_the_authors_cocktail_takes_the_largest_of_all():
    authors = cocktail(top_block=None)
    assert authors == compose(random_k(0.1), top_k(0.2), quantize(4))
    assert authors.bits_per_parameter == pytest.approx(0.1825, rel=1e-12)
    kept = 26 / 128
    assert cocktail().bits_per_parameter == pytest.approx(0.1 * (1 + kept * 4.125), rel=1e-12)
