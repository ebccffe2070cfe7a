"""The nano task, dense: Adam on the exact float32 mean of gradients; the baseline of all others.

    python -m train configs/nano_dense.py

A byte-level GPT of 0.84 M parameters on the source of Python's standard library, 4 replicas.
"""

from train.config import Config, Optimizer


def get_config() -> Config:
    """The run; other nano configs replace its `name` and `optimizer`."""
    return Config(
        name="nano_dense",
        steps=1000,
        optimizer=Optimizer(
            update="chain(compressed_mean(identity(), axis_name), adam(learning_rate))",
            learning_rate=6e-3,
            warmup_steps=100,
        ),
    )
