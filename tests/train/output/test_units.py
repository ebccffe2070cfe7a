"""Bytes and seconds as people write them."""

import pytest

from train.output.units import duration, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1_240_000, "1.24 MB"),
        (999_600_000, "1 GB"),
        (3.2e12, "3.2 TB"),
        (5e15, "5,000 TB"),
    ],
)
def test_size(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.0123 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
