"""Real images with SLAMB: configs/digits_dense.py with a tenth of the momentum a step.

    pip install -e '.[train,images]'
    python -m train configs/digits_slamb.py

One replica sends 256,512 bytes of momentum a step and 330,486 with the parameters on average, 5.6
times fewer than dense float32: small leaves are sent in float32.
benchmarks/results/convergence.json has losses at three rates, of runs without weight decay.
"""

import dataclasses

from configs import digits_dense
from train.config import Config


def get_config() -> Config:
    """The run of LAMB with another method."""
    dense = digits_dense.get_config()
    optimizer = dataclasses.replace(
        dense.optimizer,
        update="slamb(learning_rate, axis_name, density=0.1, sync_every=25, weight_decay=1e-2)",
    )
    return dataclasses.replace(dense, name="digits_slamb", optimizer=optimizer)
