"""Methods as users of small models write them, at a learning rate that suits Adam."""

from collections.abc import Callable

import optax

import jaxcomp

SMALL = jaxcomp.quantize(8, block=32)

USER_METHODS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "mean": lambda rate: optax.chain(
        jaxcomp.compressed_mean(SMALL, "replica", exact=lambda path, leaf: leaf.ndim < 2),
        jaxcomp.clip_by_global_norm(10.0),
        optax.adam(rate),
    ),
    "cocktail_sgd": lambda rate: jaxcomp.cocktail_sgd(
        optax.adam(rate), "replica", compressor=SMALL, delayed=False
    ),
    "one_bit_lamb": lambda rate: jaxcomp.one_bit_lamb(rate, "replica", freeze_step=20),
    "power_sgd": lambda rate: optax.chain(
        jaxcomp.power_sgd(2, "replica", warmup_steps=2), optax.adam(rate)
    ),
    "sharded_optimizer": lambda rate: jaxcomp.sharded_optimizer(optax.adam(rate), "replica"),
    "sparse_loco": lambda rate: jaxcomp.sparse_loco(optax.adam(rate), "replica", every=4),
}

KINDS = ("mean", "cocktail_sgd", "sharded_optimizer", "sparse_loco")
"""One of each kind of state: residuals, drifts, pieces of owners, and a drift that is no model yet.
What wraps any method is tried on these."""

PATIENCE = {"one_bit_lamb": 4, "power_sgd": 4, "sparse_loco": 4}
"""Times the steps of dense Adam that some are given: LAMB's ratios keep its steps short at such a
rate, and what a few entries or two ranks leave out at first comes later."""
