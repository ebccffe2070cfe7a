"""The nano task by 0/1 Adam: a variance learned now and then, 1-bit messages, skipped rounds.

    python -m train configs/nano_zero_one_adam.py

The same model, data and order as configs/nano_dense.py. The paper's policies: the variance until
the end of the warm-up, at distances that double every 16 updates; then intervals that double as
the rate halves, of at most 16 steps.

Of 1,000 steps 719 send anything, 345,126 bytes a step in the mean, 15 times fewer than dense; the
loss it reaches has not been measured yet.
"""

import dataclasses

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_dense.get_config()
    update = (
        "zero_one_adam(learning_rate, axis_name, "
        "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
        "variance_at=schedules.growing(until=warmup_steps))"
    )
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_zero_one_adam", optimizer=optimizer)
