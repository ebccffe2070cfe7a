"""ResNet-18 on ImageNet with 0/1 Adam, one of its authors' tasks: 224x224, 90 epochs.

    python -m train configs/shapes/resnet18_imagenet_zero_one_adam.py --report    # needs no images
    python -m train configs/shapes/resnet18_imagenet_zero_one_adam.py --data.path FOLDER

FOLDER holds `train` and `val`, each with a folder for each of the 1,000 classes. Groups of channels
are normalized in place of batches; the schedule is ours. Training is for accelerators, and has not
been tried.

One replica sends 1,845,930 bytes a step on average, 44 times fewer than dense float32.
"""

from train.config import Config, Images, Optimizer
from train.models.resnet import ResNetConfig


def get_config() -> Config:
    """The run, on eight replicas."""
    return Config(
        name="resnet18_imagenet_zero_one_adam",
        steps=450_000,
        replicas=8,
        objective="classify",
        optimizer=Optimizer(
            update="zero_one_adam(learning_rate, axis_name, "
            "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
            "variance_at=schedules.growing(until=warmup_steps), weight_decay=1e-4)",
            learning_rate=1e-3,
            warmup_steps=5_000,
        ),
        model=ResNetConfig(dtype="bfloat16"),
        data=Images(form="folder", path="imagenet", batch=256),
        eval_every=5_000,
        eval_batches=195,  # 49,920 of the 50,000
        checkpoint_every=5_000,
    )
