"""The nano task by 0/1 Adam: a variance learned now and then, 1-bit messages, skipped rounds.

    python -m train configs/nano_zero_one_adam.py

The same model, data and order as configs/nano_dense.py. The variance is learned at distances that
double every 16 updates, to the end; after the warm-up the replicas meet at intervals that double as
the rate halves.

Of 1,000 steps 719 send anything, 598,259 bytes a step in the mean, 8.5 times fewer than dense;
validation loss after 1,000 steps 1.449 nats per byte (mean of three seeds; dense 1.433 at this
rate, 1.414 at its best). With the paper's weights of the variance (`weigh_steps=False`) it is 1.457
at 6e-3; with its policy too (`variance_at=schedules.growing(until=warmup_steps)`) 345,126 bytes and
1.508 (one seed each).
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
        "warmup_steps=warmup_steps)"
    )
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_zero_one_adam", optimizer=optimizer)
