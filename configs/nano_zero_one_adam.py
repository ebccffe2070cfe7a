"""The nano task with 0/1 Adam: a variance learned now and then, 1-bit messages, skipped rounds.

    python -m train configs/nano_zero_one_adam.py

The same model, data and order as configs/nano_dense.py. The variance is learned at distances that
double every 16 updates, to the end, from gradients of 8 bits; messages of the warm-up have 8 bits
too; after it the replicas synchronize at intervals that double as the rate halves.

Of 1,000 steps 719 send anything, 352,216 bytes a step on average, 14.4 times fewer than dense;
validation loss after 1,000 steps 1.440 nats per byte (mean of three seeds; dense 1.414). Without a
warm-up of 8 bits one seed of three never recovers from it at this rate; at half the rate, with
the paper's stale variance (`deviations=Deviations(fresh_variance=False)`), all three end at 1.449
on average.
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
        "warmup_steps=warmup_steps, variance_compressor=quantize(8))"
    )
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_zero_one_adam", optimizer=optimizer)
