"""BERT's twin of the nano task by 0/1 Adam, whose authors trained BERT.

    python -m train configs/nano_bert_zero_one_adam.py

The update of configs/nano_zero_one_adam.py on the task of configs/nano_bert_dense.py. Its one
seed has not left the plateau that dense Adam leaves: validation loss 2.970 after 1,000 steps.
"""

import dataclasses

from configs import nano_bert_dense, nano_zero_one_adam
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    optimizer = nano_zero_one_adam.get_config().optimizer
    return dataclasses.replace(
        nano_bert_dense.get_config(), name="nano_bert_zero_one_adam", optimizer=optimizer
    )
