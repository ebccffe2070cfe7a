"""BERT-Large with SLAMB: 24 layers, width 1,024; 64 K sequences of 128, the large batch of LAMB.

    python -m train configs/shapes/bert_large_slamb.py --report    # trains nothing

`--model.context 512 --data.batch 32768` makes it the shape of the second phase. A tenth of the
momentum a step, parameters averaged every 100 steps, 64 replicas. What differs from BERT: as in
configs/shapes/bert_base_zero_one_adam.py. Training is for accelerators, and has not been tried.

One replica sends 291,346,675 bytes a step on average, 9.0 times fewer than dense float32.
"""

import dataclasses

from configs.shapes import bert_large_zero_one_adam
from train.config import Config, Optimizer


def get_config() -> Config:
    """The model of the 0/1 Adam run with another method and batch."""
    bert = bert_large_zero_one_adam.get_config()
    return dataclasses.replace(
        bert,
        name="bert_large_slamb",
        steps=7_000,
        replicas=64,
        accumulate=64,
        optimizer=Optimizer(
            update="slamb(learning_rate, axis_name, density=0.1, sync_every=100, "
            "weight_decay=0.01)",
            learning_rate=6e-3,
            warmup_steps=2_000,
            schedule="linear",
            final_fraction=0.0,
        ),
        data=dataclasses.replace(bert.data, batch=65_536),
    )
