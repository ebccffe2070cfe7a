"""Reads from compiled steps how much memory compressed methods need above dense Adam.

    python -m benchmarks.memory --json FILE

The step is one of Adam's family on 2**27 parameters; XLA says what it holds at most: arguments,
results that are not donated arguments, and temporaries. Nothing runs. `gradients` is the
difference to the dense step of as many replicas, in copies of a float32 gradient.
"""

import argparse
import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks import rows as rows_file
from train.placement import devices

NUMEL = 2**27  # more than one bucket: small models need less


class Row(NamedTuple):
    """A transformation, and how many gradients above the dense step it may take."""

    name: str
    tx: optax.GradientTransformation
    replicas: int
    target: float | None  # None: what its state needs is more, and only told


def mean(code, replicas, target, exchange=jaxcomp.two_shot) -> Row:
    """The row of a compressor in front of Adam."""
    averaged = jaxcomp.compressed_mean(exchange(code), "replica")
    name = f"{code.name} {exchange!r}"
    return Row(name, optax.chain(averaged, optax.adam(1e-3)), replicas, target)


# Residuals are 1 + 1/R gradients, and as much again until the update is known to be finite: 2.5 for
# four replicas, 3 for two, plus messages; `gathered` has no owners. top_k looks its values up entry
# by entry, once for all readers: XLA keeps a dense result.
ROWS = [
    mean(jaxcomp.quantize(4), 4, 3),
    mean(jaxcomp.quantize(4, rounding="stochastic"), 4, 3),
    mean(jaxcomp.sign(), 4, 3),
    mean(jaxcomp.group_top_1(8), 4, 3),
    mean(jaxcomp.group_top_1(64), 4, 3),
    mean(jaxcomp.compose(jaxcomp.group_top_1(8), jaxcomp.quantize(4)), 4, 3),
    mean(jaxcomp.top_k(0.1), 4, 4),
    mean(jaxcomp.quantize(4), 2, 3, jaxcomp.gathered),
    mean(jaxcomp.group_top_1(8), 2, 3, jaxcomp.gathered),
    mean(jaxcomp.quantize(4), 2, 3.25),
    Row("cocktail_sgd", jaxcomp.cocktail_sgd(optax.adam(1e-3), "replica"), 4, None),
    Row("one_bit_adam", jaxcomp.one_bit_adam(1e-3, "replica", freeze_step=9), 4, None),
    Row("sharded_optimizer", jaxcomp.sharded_optimizer(optax.adam(1e-3), "replica"), 4, None),
    Row("zero_one_adam", jaxcomp.zero_one_adam(1e-3, "replica"), 4, None),
    *(
        Row(
            f"one_bit_adam, residual in {bits} bits",
            jaxcomp.compact(jaxcomp.one_bit_adam(1e-3, "replica", freeze_step=9), bits),
            4,
            None,
        )
        for bits in (8, 16)
    ),
]


def peak_bytes(tx: optax.GradientTransformation, num_replicas: int) -> int:
    """Memory of a device in a compiled step, what is donated counted once."""
    mesh = devices.make_mesh(num_replicas)
    abstract = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    half = np.broadcast_to(np.float32(0), (NUMEL // 1024, 512))
    params = {name: abstract(half, P()) for name in ("a", "b")}
    batch = abstract(np.broadcast_to(np.float32(0), (8, NUMEL // 1024)), P("replica"))
    loss_fn = lambda p, x: jnp.mean((x @ p["a"] @ p["b"].T) ** 2)
    specs = jaxcomp.state_specs(jaxcomp.per_replica(tx, "replica"), params, mesh, "replica")
    step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    state = jax.tree.map(abstract, jax.eval_shape(step.init, params), specs)
    memory = step.step.lower(params, state, batch).compile().memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


@functools.cache
def dense_peak_bytes(num_replicas: int) -> int:
    """The same of dense Adam."""
    return peak_bytes(mean(jaxcomp.identity(), num_replicas, 0).tx, num_replicas)


def gradients_above_dense(row: Row) -> float:
    """The difference of the two, in copies of a gradient."""
    above = peak_bytes(row.tx, row.replicas) - dense_peak_bytes(row.replicas)
    return above / (4 * NUMEL)


def main() -> None:
    """Prints a row each and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file to write the rows to")
    arguments = parser.parse_args()
    devices.start(max(row.replicas for row in ROWS))
    rows = []
    for row in ROWS:
        gradients = gradients_above_dense(row)
        facts = {"method": row.name, "replicas": row.replicas, "target": row.target}
        rows.append({**facts, "gradients": gradients})
        print(f"{row.name}, {row.replicas} replicas: {gradients:.2f}")
    if arguments.json:
        rows_file.write(arguments.json, [row | rows_file.machine() for row in rows])


if __name__ == "__main__":
    main()
