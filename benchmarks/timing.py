"""Timing of calls that alternate, so that a busy machine slows all of them."""

import statistics
import time
from collections.abc import Callable

import jax


def interleaved(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Calls each once, then each in turn `repeats` times; the median seconds of each."""
    seconds = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
