"""Times each compressor against a copy of the same array, in one process; writes JSON.

    python -m benchmarks.codec --json FILE [--numel 16777216] [--repeats 9]

A row's seconds are those of `encode`, from the bucket to the payload, plus those of `decode`, from
the payload to a new array. They are compiled separately, and each is the median of the repeats.
Rows and copies alternate, so that a busy machine slows all of them. `target` is the greatest
accepted ratio, `met` whether it holds. The last rows compare with `lax.top_k`, not with a copy.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rows as rows_file
from benchmarks.timing import interleaved
from jaxcomp.compressors.base import Key
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.learned import learned_levels
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.quantize import cast, quantize
from jaxcomp.compressors.rotated import rotated
from jaxcomp.compressors.sign import sign
from jaxcomp.compressors.sparse import group_top_1, random_k, top_k

TARGET = 8.0
ROWS = [
    # compressor, greatest ratio to a copy
    (cast("bfloat16"), None),
    (sign(), TARGET),
    (sign(block=128), None),
    (quantize(1), None),
    (quantize(3), None),
    (quantize(4), TARGET),
    (quantize(4, rounding="stochastic"), TARGET),
    (quantize(4, rounding="shift"), None),
    (quantize(4, range="minmax"), None),
    (quantize(8), None),
    (learned_levels(4), None),
    (rotated(quantize(4)), None),
    (rotated(learned_levels(4)), None),
    (random_k(0.1), TARGET),
    (random_k(0.1, pattern="random"), None),
    (group_top_1(8), TARGET),
    (group_top_1(64), None),
    (compose(group_top_1(8), quantize(4)), None),
    (compose(random_k(0.1), group_top_1(8), quantize(4)), None),
]


def codec_calls(compressor, x, shared, private) -> dict:
    """The two compiled halves of a compressor, as calls without arguments."""
    encode, decode = jax.jit(compressor.encode), jax.jit(compressor.decode)
    payload = encode(x, shared, private)
    return {"encode": lambda: encode(x, shared, private), "decode": lambda: decode(payload, shared)}


def codec_row(compressor, target, x, shared, private, repeats) -> dict:
    """One compressor against the copy of the bucket."""
    copy = jax.jit(jnp.copy)
    calls = {"copy": lambda: copy(x), **codec_calls(compressor, x, shared, private)}
    median = interleaved(calls, repeats)
    seconds = median["encode"] + median["decode"]
    return {
        "name": compressor.name,
        "seconds": seconds,
        "encode_seconds": median["encode"],
        "decode_seconds": median["decode"],
        "copy_seconds": median["copy"],
        "ratio": seconds / median["copy"],
        "target": target,
        "met": None if target is None else seconds <= target * median["copy"],
    }


def against_row(name, compressor, other, target, x, shared, private, repeats) -> dict:
    """One compressor against another, halves summed; `ratio` is its share of the other's time."""
    pair = {"this": compressor, "other": other}
    calls = {
        f"{role} {half}": call
        for role, each in pair.items()
        for half, call in codec_calls(each, x, shared, private).items()
    }
    median = interleaved(calls, repeats)
    seconds = median["this encode"] + median["this decode"]
    other_seconds = median["other encode"] + median["other decode"]
    return {
        "name": name,
        "seconds": seconds,
        "other_seconds": other_seconds,
        "ratio": seconds / other_seconds,
        "target": target,
        "met": seconds <= target * other_seconds,
    }


def select_rows(x, shared, repeats) -> list[dict]:
    """Codes that choose an eighth of the entries, against `lax.top_k`; without packing."""
    targets = {group_top_1(8): 1 / 50, top_k(1 / 8): None}
    whole = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), x.size // 8))
    calls = {"whole": lambda: whole(x)}
    for code in targets:
        choose = jax.jit(lambda x, code=code: code.selection.select(x, shared))
        calls[code.name] = lambda choose=choose: choose(x)
    median = interleaved(calls, repeats)
    return [
        {
            "name": f"{code.name}.select / lax.top_k at density 1/8",
            "seconds": median[code.name],
            "other_seconds": median["whole"],
            "ratio": median[code.name] / median["whole"],
            "target": target,
            "met": None if target is None else median[code.name] <= target * median["whole"],
        }
        for code, target in targets.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="file to write the rows to")
    parser.add_argument("--numel", type=int, default=2**24, help="float32 values in the bucket")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each call")
    arguments = parser.parse_args()

    x = jnp.asarray(np.random.default_rng(0).standard_normal(arguments.numel, np.float32))
    shared = Key(jnp.int32(3), jnp.uint32(7))
    keys, repeats = (shared, fold(shared, 1)), arguments.repeats
    rows = [codec_row(each, target, x, *keys, repeats) for each, target in ROWS]
    nearest, stochastic = quantize(4), quantize(4, rounding="stochastic")
    pair = "4 bits, stochastic / nearest"
    rows.append(against_row(pair, stochastic, nearest, 2.0, x, *keys, repeats))
    rows += select_rows(x, shared, min(repeats, 3))

    record = rows_file.machine() | {"numel": arguments.numel}
    print(f"{record['hardware']}; {arguments.numel} float32")
    print(f"{'':52s} {'ms':>9s} {'ratio':>8s} target")
    for row in rows:
        target = (
            "" if row["target"] is None else f"{row['target']:g} {'' if row['met'] else 'MISSED'}"
        )
        print(f"{row['name']:52s} {1e3 * row['seconds']:9.2f} {row['ratio']:8.3f} {target}")
    if arguments.json:
        rows_file.write(arguments.json, [row | record for row in rows])


if __name__ == "__main__":
    main()
