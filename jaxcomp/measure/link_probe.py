"""Measures the time of collectives on the current network, for `jaxcomp.plan`.

All processes of a run call these functions together, and get the same numbers, those of the slowest
process, since replicas wait for each other.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.measure import report
from jaxcomp.measure.planner import Cost

SIZES = tuple(4**power for power in range(6, 14))
"""Bytes that leave one replica per call of a sweep: 4 KiB to 64 MiB."""


def seconds_of(call: Callable[[], Any], repeats: int, pause: float = 0.0) -> float:
    """The median seconds of `repeats` calls on the slowest process, after a warm-up call.

    Args:
      call: Returns arrays. All processes call it together.
      repeats: At least 1.
      pause: Seconds before each call.
    """
    seconds = []
    for _ in range(repeats + 1):
        time.sleep(pause)
        jax.block_until_ready(_together(0.0))
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(np.max(_together(seconds[1:]), axis=0).tolist())


def _together(values: Any) -> np.ndarray:
    """The values of all processes, `[num_processes, ...]`; also a barrier."""
    own = np.asarray(values)
    return own[None] if jax.process_count() == 1 else multihost_utils.process_allgather(own)


def measure_link(
    mesh: Mesh,
    axis_name: str,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    longest: float = 0.25,
    pause: float = 0.05,
) -> dict[str, Cost]:
    """Times collectives of increasing size between the replicas.

    Args:
      mesh: The mesh of the run.
      axis_name: The axis of the replicas, of size 2 or more. If replicas have several devices, all
        of them send at once.
      sizes: Bytes that leave one device in one call, increasing; at least two sizes.
      repeats: Timed calls of each size.
      longest: Seconds; after a call that takes longer, no larger size is tried.
      pause: Seconds before each call. A traffic shaper allows bursts, and its allowance refills
        while a step computes; without a pause, small messages would be timed without it.

    Returns:
      A `planner.Link` of `all-reduce` (float32), `all-gather` and `all-to-all` (bytes). A latency
      includes the dispatch of one program.

    Raises:
      ValueError: If there is only one replica, or there are fewer than two sizes.
    """
    if mesh.shape[axis_name] < 2 or len(sizes) < 2:
        raise ValueError(
            f"got {mesh.shape[axis_name]} replica and {len(sizes)} sizes, need two or more of both "
            "to measure what lies between them; give the rate and latency of the link instead."
        )
    link, devices = {}, mesh.size // mesh.shape[axis_name]
    for op, make in COLLECTIVES.items():
        samples = []
        for size in sizes:
            program, x = collective(make, size, mesh, axis_name)
            call = functools.partial(program, x)
            sent = devices * report.sent_bytes(program, mesh, axis_name)
            samples.append((sent, seconds_of(call, repeats, pause)))
            if samples[-1][1] > longest and len(samples) > 1:
                break
        link[op] = cost_of(samples)
    return link


def cost_of(samples: Sequence[tuple[float, float]]) -> Cost:
    """Makes a cost from pairs of bytes, increasing, and measured seconds.

    A time above that of a larger message is replaced by the larger message's time.
    """
    sent, seconds = zip(*samples, strict=True)
    rising = itertools.accumulate(reversed(seconds), min)
    return Cost(tuple(map(float, sent)), tuple(reversed(list(rising))))


def _all_reduce(size, num_replicas):
    numel = max(1, round(size * num_replicas / (8 * (num_replicas - 1))))
    return lax.psum, jax.ShapeDtypeStruct((numel,), jnp.float32), P()


def _all_gather(size, num_replicas):
    gather = functools.partial(lax.all_gather, to="invarying")
    return gather, jax.ShapeDtypeStruct((max(1, size // (num_replicas - 1)),), jnp.uint8), P()


def _all_to_all(size, num_replicas):
    exchange = functools.partial(lax.all_to_all, split_axis=0, concat_axis=0)
    shape = num_replicas, max(1, size // (num_replicas - 1))
    return exchange, jax.ShapeDtypeStruct(shape, jnp.uint8), None


COLLECTIVES = {"all-reduce": _all_reduce, "all-gather": _all_gather, "all-to-all": _all_to_all}


def collective(make, size: int, mesh: Mesh, axis_name: str):
    """A compiled collective that sends about `size` bytes, and its argument."""
    function, own, out = make(size, mesh.shape[axis_name])
    rows = P(axis_name)
    run = jax.shard_map(
        lambda x: function(x[0], axis_name)[None if out is None else ...],
        mesh=mesh,
        in_specs=rows,
        out_specs=rows if out is None else out,
    )
    shape = (mesh.shape[axis_name], *own.shape)
    x = jax.jit(lambda: jnp.zeros(shape, own.dtype), out_shardings=NamedSharding(mesh, rows))()
    return jax.jit(run).lower(x).compile(), x
