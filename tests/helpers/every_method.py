"""One transformation a method, for properties that all of them have."""

import optax

import jaxcomp

EVERY_METHOD = {
    "compressed_mean": optax.chain(
        jaxcomp.compressed_mean(jaxcomp.quantize(4, block=8), "replica"), optax.adam(1e-2)
    ),
    "cocktail_sgd": jaxcomp.cocktail_sgd(optax.adam(1e-2), "replica"),
    "demo": jaxcomp.demo(1e-2, "replica", top=1, tile=4),
    "dion": jaxcomp.dion(1e-2, "replica", rank=2),
    "local_steps": jaxcomp.local_steps(optax.adam(1e-2), "replica", every=2, error_decay=0.9),
    "one_bit_adam": jaxcomp.one_bit_adam(1e-2, "replica", freeze_step=1),
    "one_bit_lamb": jaxcomp.one_bit_lamb(1e-2, "replica", freeze_step=1),
    "power_sgd": optax.chain(
        jaxcomp.power_sgd(2, "replica", warmup_steps=1), optax.sgd(0.1, momentum=0.9)
    ),
    "sharded_optimizer": jaxcomp.sharded_optimizer(optax.adam(1e-2), "replica"),
    "slamb": jaxcomp.slamb(1e-2, "replica", sync_every=1),
    "zero_one_adam": jaxcomp.zero_one_adam(1e-2, "replica"),
}

NUMBERS = {
    "dion": ("left_factor", "right_factor"),
    "power_sgd": ("warmup", "left_factor", "right_factor"),
    "one_bit_adam": ("variance",),
    "one_bit_lamb": ("variance",),
    "slamb": ("momentum", "synchronize"),
    "zero_one_adam": ("variance",),
}
"""Parts that a method sends as numbers: a dense beginning, or what a mask shared by all chose."""
