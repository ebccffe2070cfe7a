"""What each compressor must return, stated in NumPy, value by value and block by block.

`roundtrip(x, count, shared, private) -> x_hat`, with the seeds as integers. A sparsifier has
`positions(x, count, shared)` too: which entries are kept, in the order in which they travel;
those from numel on are padding, and zeros.
"""

import ml_dtypes
import numpy as np


def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = x * 0xD35A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)


def fold(seed, *data):
    for datum in data:
        seed = mix((mix((seed + 0x9E3779B9) & 0xFFFFFFFF) + datum) & 0xFFFFFFFF)
    return (mix(seed) + mix(seed ^ 1)) & 0xFFFFFFFF


def random_bits(seed, size):
    x = np.arange(size, dtype=np.uint64) ^ seed
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x + mix(seed)) * 0xD35A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)


def uniform(seed, size):
    return ((random_bits(seed, size) >> 8) * 2.0**-24).astype(np.float32)


def blocks_of(x, block):
    return np.split(x, range(block, x.size, block)) if block else [x]


def round_up(value, dtype):
    nearest = np.float32(value).astype(dtype)
    if value - np.float32(nearest) > abs(value) * 2.0**-22:
        nearest = np.nextafter(nearest, np.asarray(np.inf, dtype))
    return np.float32(nearest)


def identity():
    return lambda x, count, shared, private: x


def cast(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)

    def roundtrip(x, count, shared, private):
        return np.clip(x, -largest, largest).astype(dtype).astype(np.float32)

    return roundtrip


def quantize(bits, block=128, range="absmax", rounding="nearest", scale_dtype=ml_dtypes.bfloat16):
    def roundtrip(x, count, shared, private):
        if rounding == "stochastic":
            noise = uniform(private, x.size) - np.float32(0.5)
        elif rounding == "shift":
            noise = np.repeat(uniform(shared, 1) - np.float32(0.5), x.size)
        else:
            noise = np.zeros(x.size, np.float32)
        decoded = []
        for values, offsets in zip(blocks_of(x, block), blocks_of(noise, block), strict=True):
            if range == "minmax":
                num_steps = 2**bits - 1
                low = -round_up(-values.min(), scale_dtype)
                step = round_up((values.max() - low) / np.float32(num_steps), scale_dtype)
            else:
                num_steps = max(1, 2**bits - 2)
                half = np.float32(num_steps / 2)
                step = round_up(np.abs(values).max() / half, scale_dtype)
                low = -half * step
            if step == 0:
                decoded.append(np.full_like(values, low))
                continue
            codes = np.clip(np.rint((values - low) / step + offsets), 0, num_steps)
            decoded.append((codes - (offsets if rounding == "shift" else 0)) * step + low)
        return np.concatenate(decoded).astype(np.float32)

    return roundtrip


def learned_levels(bits, block, rounding="nearest", scale_dtype=ml_dtypes.bfloat16):
    """Of levels that have learned nothing yet."""
    levels = np.linspace(0, 1, 2**bits, dtype=np.float32)

    def roundtrip(x, count, shared, private):
        share = uniform(private, x.size) if rounding == "stochastic" else np.full(x.size, 0.5)
        decoded = []
        for values, offsets in zip(blocks_of(x, block), blocks_of(share, block), strict=True):
            low = -round_up(-values.min(), scale_dtype)
            span = round_up(values.max() - low, scale_dtype)
            unit = (values - low) * (np.float32(1) / span if span else np.float32(0))
            edges = levels[:-1] + offsets[:, None].astype(np.float32) * np.diff(levels)
            decoded.append(low + span * levels[np.sum(unit[:, None] > edges, axis=1)])
        return np.concatenate(decoded).astype(np.float32)

    return roundtrip


def rotated(inner, block=128):
    """By butterflies, in float64, where the code multiplies by a Hadamard matrix."""

    def turned(x):
        rows, step = x.reshape(-1, block).astype(np.float64), 1
        while step < block:
            pairs = rows.reshape(len(rows), -1, 2, step)
            rows = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
            rows, step = rows.reshape(-1, block), 2 * step
        return (rows / np.sqrt(block)).astype(np.float32).reshape(-1)

    def roundtrip(x, count, shared, private):
        flips = np.where(random_bits(shared, x.size) & 1, -1, 1).astype(np.float32)
        values = inner(turned(padded(x * flips, block)), count, fold(shared, 1), private)
        return turned(values)[: x.size] * flips

    return roundtrip


def bin_means(bits, block=None):
    def roundtrip(x, count, shared, private):
        decoded = []
        for values in blocks_of(x.astype(np.float64), block):
            width = values.std() * 6 / 2**bits
            centred = values - values.mean()
            bins = np.floor(centred / width) if width > 0 else np.zeros(values.size)
            bins = np.clip(bins, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            decoded.append(np.array([values[bins == own].mean() for own in bins]))
        return np.concatenate(decoded).astype(np.float32)

    return roundtrip


def sign(scale="l1", block=None, scale_dtype=np.float32):
    def roundtrip(x, count, shared, private):
        decoded = []
        for values in blocks_of(x.astype(np.float64), block):
            l1, l2 = np.mean(np.abs(values)), np.sqrt(np.mean(values**2))
            magnitude = np.float32(l1 if scale == "l1" else l2).astype(scale_dtype)
            decoded.append(np.where(values >= 0, 1, -1) * np.float32(magnitude))
        return np.concatenate(decoded).astype(np.float32)

    return roundtrip


def padded(x, multiple):
    return np.pad(x, (0, -x.size % multiple))


def random_k(stride, pattern="runs"):
    def positions(x, count, shared):
        groups = -(-x.size // stride)
        if pattern == "strided":
            return np.arange(groups) * stride + count % stride
        if pattern == "runs":
            # Of each `stride` runs of 1024 one; what is left over is `stride` shorter runs.
            runs, start = np.arange(x.size // (1024 * stride)), count % stride
            first = (runs[:, None] * stride + start) * 1024 + np.arange(1024)
            end, last = len(runs) * stride * 1024, groups - len(runs) * 1024
            return np.append(first.reshape(-1), end + start * last + np.arange(last))
        place = np.floor(uniform(shared, groups) * np.float32(stride)).astype(int)
        return place * groups + np.arange(groups)

    return positions


def group_top_1(group):
    def positions(x, count, shared):
        rows = padded(x, group).reshape(group, -1)
        return np.abs(rows).argmax(axis=0) * rows.shape[1] + np.arange(rows.shape[1])

    return positions


def top_k(share, block=None):
    """`share` is a `fractions.Fraction`, so that the number kept is exact."""

    def positions(x, count, shared):
        size = min(block or x.size, x.size)
        kept = -(-share.numerator * size // share.denominator)
        order = np.argsort(-np.abs(padded(x, size).reshape(-1, size)), axis=1, kind="stable")
        index = np.sort(order[:, :kept], axis=1)
        return (index + size * np.arange(index.shape[0])[:, None]).reshape(-1)

    return positions


def compose(positions, inner):
    """The code of a sparsifier's `positions`, then `inner`'s roundtrip of the values."""

    def roundtrip(x, count, shared, private):
        index = positions(x, count, shared)
        room = np.zeros(max(x.size, index.max() + 1), np.float32)
        room[: x.size] = x
        values = inner(room[index], count, fold(shared, 1), private)
        room[:] = 0
        room[index] = values
        return room[: x.size]

    return roundtrip
