"""Reads from compiled steps how much memory a compressed mean needs above the dense one.

    python -m benchmarks.memory --json FILE

The step is Adam's on 2**20 parameters; XLA says what it holds at most: arguments, results that
are not donated arguments, and temporaries. Nothing runs. `gradients` is the difference to the
dense step of as many replicas, in copies of a float32 gradient.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from train import devices
from train.metrics import hardware_name

NUMEL = 2**20

# What is not sent yet is 1 + 1/R gradients, and as much again until the update is known to be
# finite: 2.5 for four replicas, 3 for two, where messages come on top; `gathered` has no owners.
# top_k looks its values up entry by entry, once for all readers: XLA keeps a dense result.
ROWS = [
    # compressor, replicas, exchange, gradients above the dense step at most
    *[
        (code, 4, jaxcomp.two_shot, 3)
        for code in (
            *(jaxcomp.quantize(4), jaxcomp.quantize(4, rounding="stochastic"), jaxcomp.sign()),
            *(jaxcomp.group_top_1(8), jaxcomp.group_top_1(64)),
            jaxcomp.compose(jaxcomp.group_top_1(8), jaxcomp.quantize(4)),
        )
    ],
    (jaxcomp.top_k(0.1), 4, jaxcomp.two_shot, 4),
    (jaxcomp.quantize(4), 2, jaxcomp.gathered, 3),
    (jaxcomp.group_top_1(8), 2, jaxcomp.gathered, 3),
    (jaxcomp.quantize(4), 2, jaxcomp.two_shot, 3.25),
]


def peak_bytes(code, num_replicas, exchange=jaxcomp.two_shot) -> int:
    """Memory of a device in a compiled step behind a compressor, what is donated counted once."""
    mesh = devices.make_mesh(num_replicas)
    abstract = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    half = np.broadcast_to(np.float32(0), (NUMEL // 1024, 512))
    params = {name: abstract(half, P()) for name in ("a", "b")}
    batch = abstract(np.broadcast_to(np.float32(0), (8, 1024)), P("replica"))
    loss_fn = lambda p, x: jnp.mean((x @ p["a"] @ p["b"].T) ** 2)
    mean = jaxcomp.compressed_mean(code, "replica", exchange=exchange)
    tx = optax.chain(mean, optax.adam(1e-3))
    specs = jaxcomp.state_specs(jaxcomp.per_replica(tx, "replica"), params, mesh, "replica")
    step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    state = jax.tree.map(abstract, jax.eval_shape(step.init, params), specs)
    memory = step.step.lower(params, state, batch).compile().memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


@functools.cache
def dense_peak_bytes(num_replicas: int) -> int:
    """The same without compression."""
    return peak_bytes(jaxcomp.identity(), num_replicas)


def gradients_above_dense(code, num_replicas, exchange) -> float:
    """The difference of the two, in copies of a gradient."""
    above = peak_bytes(code, num_replicas, exchange) - dense_peak_bytes(num_replicas)
    return above / (4 * NUMEL)


def main() -> None:
    """Prints a row each and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file to write the rows to")
    arguments = parser.parse_args()
    devices.start(max(num_replicas for _, num_replicas, *_ in ROWS))
    rows = []
    for code, num_replicas, exchange, target in ROWS:
        gradients = gradients_above_dense(code, num_replicas, exchange)
        names = {"method": code.name, "exchange": exchange.mean.__name__}
        rows.append({**names, "replicas": num_replicas, "gradients": gradients, "target": target})
        print(f"{code.name}, {num_replicas} replicas, {names['exchange']}: {gradients:.2f}")
    if arguments.json:
        record = {"hardware": hardware_name(), "jax": jax.__version__}
        arguments.json.write_text(json.dumps([row | record for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
