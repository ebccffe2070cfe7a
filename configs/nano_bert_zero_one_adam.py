"""BERT's twin of the nano task with 0/1 Adam, whose authors trained BERT.

    python -m train configs/nano_bert_zero_one_adam.py

The method of configs/nano_zero_one_adam.py, but the variance is learned from more gradients, with
kappa = 256, on the task of configs/nano_bert_dense.py. In 3,000 steps
(`--steps 3000 --optimizer.warmup-steps 300`) one replica sends 623,961 bytes a step on average, 8.1
times fewer than dense; validation loss 1.184 nats a byte (mean of three seeds; dense 1.195; with
kappa = 64 one of them reaches only 1.697).
"""

import dataclasses

from configs import nano_bert_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_bert_dense.get_config()
    meet = "schedules.halving(learning_rate, steps, after=warmup_steps)"
    update = (
        f"zero_one_adam(learning_rate, axis_name, sync_at={meet}, warmup_steps=warmup_steps, "
        f"variance_at=schedules.both(schedules.growing(256), {meet}), "
        "variance_compressor=quantize(8))"
    )
    optimizer = dataclasses.replace(dense.optimizer, update=update, learning_rate=3e-3)
    return dataclasses.replace(dense, name="nano_bert_zero_one_adam", optimizer=optimizer)
