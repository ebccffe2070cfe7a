"""Fine-tuning, dense: the trained nano model learns C after Python; the baseline of the other.

    python -m train configs/nano_dense.py             # first, once
    python -m train configs/nano_fine_tune_dense.py

The text is the header files of the machine's own Python. Validation loss after 300 steps 1.195 nats
per byte (mean of three seeds; 1.205 at a rate of 3e-3, 1.207 at 1.2e-2, one seed each), after 3,000
at 3e-3 1.0255 (three seeds), after which it overfits: 1.0185 after 2,000 (one seed).
"""

import dataclasses
import sysconfig

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """A short run on other text that starts from the dense run's parameters."""
    dense = nano_dense.get_config()
    return dataclasses.replace(
        dense,
        name="nano_fine_tune_dense",
        steps=300,
        start_from=f"{dense.runs_dir}/{dense.name}",
        optimizer=dataclasses.replace(dense.optimizer, learning_rate=6e-3, warmup_steps=30),
        data=dataclasses.replace(dense.data, path=sysconfig.get_path("include")),
    )
