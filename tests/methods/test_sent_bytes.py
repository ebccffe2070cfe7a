"""The bytes of each part of a compiled step, and how often the state says that it was sent."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import report, schedules
from jaxcomp.exchange.messages import message_bytes
from jaxcomp.replicas import protocol
from tests.helpers.replicas import everywhere, mesh_of, rows

MATRIX = 512 * 512
RING = 2 * 3 / 4  # how often each of four replicas sends an array in a sum of all
# A bit a parameter, and a float32 scale for each block of 1,024.
SIGNS = RING * MATRIX / 8 * (1 + 32 / 1024)
EIGHT_BITS = RING * MATRIX / 8 * (8 + 16 / 128)
WHOLE = math.ceil(512 * 513 / 1024) * 1024  # of cocktail_sgd, in chunks of whole blocks
COCKTAIL = 2 * 3 * message_bytes(jaxcomp.cocktail(), WHOLE // 4)
WARM = RING * 4 * WHOLE + 3 * message_bytes(jaxcomp.quantize(8), WHOLE // 4)
# Two matrices of one shape, one of three axes, and what is sent as it is.
FACTORS = {"a": (12, 20), "b": (12, 20), "bias": (5,), "c": (8, 4, 4), "small": (2, 3)}
LEFT, RIGHT, SMALL = 12 + 12 + 8, 20 + 20 + 16, 5 + 6


class Row(NamedTuple):
    """A method, the bytes of its parts, and how often each was sent after some steps."""

    tx: Any
    parts: dict[str, float]
    steps: int
    rounds: dict[str, int]
    shapes: dict[str, tuple[int, ...]] = {"kernel": (512, 512)}  # noqa: RUF012, no one changes it
    padding: int = 0  # of buckets and factors, in bytes


def cocktail(**options):
    return jaxcomp.cocktail_sgd(optax.adam(1e-3), "replica", **options)


def zero_one_adam(code):
    return jaxcomp.zero_one_adam(
        *(1e-3, "replica"),
        sync_at=lambda count: count % 2 == 0,
        variance_at=schedules.growing(1, until=8),  # picks the steps number 1, 3 and 7
        variance_compressor=code,
        warmup_steps=2,
    )


def slamb(**options):
    return jaxcomp.slamb(1e-3, "replica", sync_every=3, **options)


BIASED = {"bias": (512,), "kernel": (512, 512)}
TENTH = {"bias": (512,), "kernel": (500, 512)}
ZERO_ONE = {"all": 4, "synchronize": 3, "variance": 3, "warmup": 1}
SLAMB = {"all": 7, "momentum": 7, "synchronize": 2}
# What is sent as it is comes with the left factor, or with the one that is sent alone.
ONE = {"left_factor": RING * 4 * (2 * LEFT + SMALL), "right_factor": RING * 4 * (2 * RIGHT + SMALL)}
BOTH = ONE | {"right_factor": RING * 4 * 2 * RIGHT}
ROWS = {
    "cocktail_sgd": Row(
        cocktail(), {"synchronize": COCKTAIL}, 2, {"all": 2, "synchronize": 2}, BIASED
    ),
    "cocktail_sgd, warm-up": Row(
        cocktail(warmup_steps=2),
        {"synchronize": COCKTAIL, "warmup": WARM},
        3,
        {"all": 3, "synchronize": 1, "warmup": 2},
        BIASED,
    ),
    "cocktail_sgd, at once": Row(
        cocktail(warmup_steps=2, delayed=False),
        {"synchronize": COCKTAIL, "warmup": WARM},
        3,
        {"all": 3, "synchronize": 1, "warmup": 2},
        BIASED,
    ),
    "one_bit_lamb": Row(
        jaxcomp.one_bit_lamb(1e-3, "replica", freeze_step=2),
        {"variance": RING * 4 * MATRIX, "synchronize": SIGNS},
        5,
        {"all": 5, "synchronize": 3, "variance": 2},
    ),
    "zero_one_adam": Row(
        zero_one_adam(jaxcomp.identity()),
        {"variance": RING * 4 * MATRIX, "synchronize": SIGNS, "warmup": EIGHT_BITS},
        8,
        ZERO_ONE,
    ),
    "zero_one_adam, coded variance": Row(
        zero_one_adam(jaxcomp.quantize(8)),
        {"variance": EIGHT_BITS, "synchronize": SIGNS, "warmup": EIGHT_BITS},
        8,
        ZERO_ONE,
    ),
    "slamb": Row(
        slamb(),
        {"momentum": RING * 4 * (25_600 + 512), "synchronize": RING * 4 * (256_000 + 512)},
        7,
        SLAMB,
        TENTH,
    ),
    "slamb, coded drifts": Row(
        slamb(drift_compressor=jaxcomp.quantize(8)),
        {
            "momentum": RING * 4 * (25_600 + 512),
            "synchronize": 6 * message_bytes(jaxcomp.quantize(8), 64_000) + RING * 4 * 512,
        },
        7,
        SLAMB,
        TENTH,
    ),
    "power_sgd": Row(
        jaxcomp.power_sgd(2, "replica", warmup_steps=1),
        ONE | {"warmup": RING * 4 * (20 * 24 + 5 + 128 + 6)},
        5,
        {"all": 5, "warmup": 1, "left_factor": 2, "right_factor": 2},
        FACTORS,
        padding=24,
    ),
    "power_sgd, nothing to factor": Row(
        jaxcomp.power_sgd(2, "replica", warmup_steps=1),
        dict.fromkeys(("warmup", "left_factor", "right_factor"), RING * 4 * (512 + 6)),
        5,
        {"all": 5, "warmup": 1, "left_factor": 2, "right_factor": 2},
        {"bias": (512,), "small": (2, 3)},
        padding=24,
    ),
    "power_sgd, both sides": Row(
        jaxcomp.power_sgd(2, "replica", warmup_steps=2, sides="both"),
        BOTH | {"warmup": RING * 4 * (20 * 24 + 5 + 128 + 6)},
        5,
        {"all": 5, "warmup": 2, "left_factor": 3, "right_factor": 3},
        FACTORS,
        padding=24,
    ),
    "dion": Row(
        jaxcomp.dion(0.1, "replica", rank=2, exact=lambda path, leaf: path in ("bias", "small")),
        BOTH,
        2,
        {"all": 2, "left_factor": 2, "right_factor": 2},
        FACTORS,
        padding=24,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_part_sends_its_bytes_and_is_counted(name):
    row, mesh = ROWS[name], mesh_of(4)
    loss = lambda params, batch: sum(map(jnp.sum, params.values())) * jnp.mean(batch)
    init, step = jaxcomp.train_step(loss, row.tx, mesh, "replica")
    params = everywhere(mesh, {k: np.ones(shape, "f4") for k, shape in row.shapes.items()})
    state, batch = init(params), rows(mesh, np.ones(4, np.float32))
    program = step.lower(params, state, batch).compile()
    sent = report.sent_bytes_by_part(program, mesh, "replica")
    assert {part for part, count in sent.items() if count > row.padding} == set(row.parts)
    for part, wanted in row.parts.items():
        assert wanted <= sent[part] <= wanted + row.padding
    if "warmup" in row.parts and not row.padding:  # each step takes one branch of a conditional
        assert all(message.branch for message in report.collectives(program, mesh))
    for _ in range(row.steps):
        params, state, _ = program(params, state, batch)
    counts = {part: int(count) for part, count in protocol.rounds(state).items()}
    assert {part: count for part, count in counts.items() if count} == row.rounds
