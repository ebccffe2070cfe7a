"""The nano task with sharded parameters on two hosts of two devices: QSDP on a hybrid mesh.

    python -m train configs/nano_qsdp_hybrid.py
    python -m train configs/nano_qsdp_hybrid.py --report    # bytes of the two axes; trains nothing

As configs/nano_qsdp.py, but the 4 replicas are 2 over the slow axis times 2 over fast links. Inside
a host gradients are averaged in float32. Secondary shards: weights cross the slow axis once a step.

One replica sends 433,254 bytes a step across the slow axis. Its loss was measured in the
fine-tuning of 300 steps (`--task nano_fine_tune` of benchmarks.convergence, one seed): 1.193, where
dense Adam has 1.193 to 1.199.
"""

import dataclasses

from configs import nano_qsdp
from train.config import Config


def get_config() -> Config:
    """The run on shards of one axis, on two."""
    return dataclasses.replace(
        nano_qsdp.get_config(),
        name="nano_qsdp_hybrid",
        fast=2,
        qsdp="qsdp(axis_name, fast_axis=fast_axis, secondary=True)",
    )
