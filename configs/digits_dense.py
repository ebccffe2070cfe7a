"""Real images, dense: a ResNet of 0.31 M parameters learns scikit-learn's digits with LAMB.

    pip install -e '.[train,images]'
    python -m train configs/digits_dense.py

1,797 handwritten digits of 8x8, one in ten held out by the hash of the image; 4 replicas; 32 epochs
in which each is moved by up to a pixel.

One to two minutes on 2 busy cores of an AMD EPYC; one replica sends 1,849,344 bytes a step. Its
loss differs much from seed to seed: benchmarks/results/convergence.json, without weight decay.
"""

from train.config import Config, Images, Optimizer
from train.models.resnet import ResNetConfig


def get_config() -> Config:
    """The run; other digits configs replace its `name` and `optimizer`."""
    return Config(
        name="digits_dense",
        steps=400,
        objective="classify",
        optimizer=Optimizer(
            update="chain(compressed_mean(identity(), axis_name), "
            "lamb(learning_rate, weight_decay=1e-2))",
            learning_rate=2e-2,
            warmup_steps=40,
        ),
        model=ResNetConfig(
            blocks=(1, 1, 1), width=32, stem="plain", size=8, channels=1, classes=10
        ),
        data=Images(form="digits", batch=128),
        eval_every=50,
        eval_batches=2,
    )
