"""One row a method, for the laws that all of them keep: a new method is a row."""

from typing import NamedTuple

import optax

import jaxcomp


class Method(NamedTuple):
    """A transformation, and what of the laws depends on it."""

    tx: optax.GradientTransformation
    # Parts that it sends as numbers: a dense beginning, or what a mask shared by all chose.
    numbers: tuple[str, ...] = ()
    # A replica whose gradient is not finite stands still alone; else all leave the step out.
    alone: bool = False
    by_row: tuple[str, ...] = ()  # parts with one number for each row of an embedding
    momentum: str = ""  # the field that `compact` may keep in 16 bits


METHODS = {
    "compressed_mean": Method(
        optax.chain(
            jaxcomp.compressed_mean(jaxcomp.quantize(4, block=8), "replica"), optax.adam(1e-2)
        )
    ),
    "cocktail_sgd": Method(
        jaxcomp.cocktail_sgd(optax.adam(1e-2), "replica"), alone=True, momentum="mu"
    ),
    "demo": Method(jaxcomp.demo(1e-2, "replica", top=1, tile=4)),
    "demo, owners": Method(jaxcomp.demo(1e-2, "replica", top=1, tile=4, mean=jaxcomp.two_shot)),
    "dion": Method(jaxcomp.dion(1e-2, "replica", rank=2), numbers=("left_factor", "right_factor")),
    "local_steps": Method(
        jaxcomp.local_steps(
            jaxcomp.mean_momentum(jaxcomp.rare_rows(optax.adam(1e-2), "replica"), "replica"),
            "replica",
            every=2,
            error_decay=0.9,
        ),
        alone=True,
        by_row=("synchronize",),
    ),
    "one_bit_adam": Method(
        jaxcomp.one_bit_adam(1e-2, "replica", freeze_step=1),
        numbers=("variance",),
        momentum="momentum",
    ),
    "one_bit_lamb": Method(
        jaxcomp.one_bit_lamb(1e-2, "replica", freeze_step=1),
        numbers=("variance",),
        momentum="momentum",
    ),
    "power_sgd": Method(
        optax.chain(jaxcomp.power_sgd(2, "replica", warmup_steps=1), optax.sgd(0.1, momentum=0.9)),
        numbers=("warmup", "left_factor", "right_factor"),
    ),
    "sharded_optimizer": Method(
        jaxcomp.sharded_optimizer(optax.adam(1e-2), "replica"), momentum="mu"
    ),
    "slamb": Method(
        jaxcomp.slamb(1e-2, "replica", sync_every=1),
        numbers=("momentum", "synchronize"),
        alone=True,
        momentum="momentum",
    ),
    "slamb, mean variance": Method(
        jaxcomp.slamb(1e-2, "replica", sync_every=1, variance="mean"),
        numbers=("momentum", "synchronize"),
        alone=True,
        momentum="momentum",
    ),
    "zero_one_adam": Method(
        jaxcomp.zero_one_adam(1e-2, "replica"),
        numbers=("variance",),
        alone=True,
        momentum="momentum",
    ),
}
