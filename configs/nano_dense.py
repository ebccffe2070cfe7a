"""The nano task, dense: Adam on the exact float32 mean of gradients; the baseline of all others.

    python -m train configs/nano_dense.py

A byte-level GPT of 0.84 M parameters on the source of Python's standard library, 4 replicas.

About 5 minutes on 2 idle cores of an AMD EPYC; one replica sends 5,062,656 bytes a step; validation
loss after 1,000 steps 1.399 to 1.436 nats per byte (three seeds, Python 3.11.7's library). Losses
at the heads of configs are rows of `python -m benchmarks.convergence`.
"""

from train.config import Config, Optimizer


def get_config() -> Config:
    """The run; other nano configs replace its `name` and `optimizer`."""
    return Config(
        name="nano_dense",
        steps=1000,
        eval_batches=16,
        optimizer=Optimizer(
            update="chain(compressed_mean(identity(), axis_name), adam(learning_rate))",
            learning_rate=6e-3,
            warmup_steps=100,
        ),
    )
