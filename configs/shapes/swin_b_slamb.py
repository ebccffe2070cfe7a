"""Swin-B on ImageNet with SLAMB, one of its authors' tasks: 88 M parameters, 128 replicas.

    python -m train configs/shapes/swin_b_slamb.py --report    # needs no images
    python -m train configs/shapes/swin_b_slamb.py --data.path FOLDER

FOLDER holds `train` and `val`, each with a folder for each of the 1,000 classes. b3 and eps are
those of the authors' configuration; batch, rate and schedule are ours, and images are cut and
mirrored, but not mixed as in the paper of Swin. With each stage as a scan the report takes 92 CPU
seconds. Training is for accelerators, and has not been tried.

One replica sends 78,324,354 bytes a step on average, 8.9 times fewer than dense float32.
"""

from train.config import Config, Images, Optimizer
from train.models.swin import SwinConfig


def get_config() -> Config:
    """The run: 300 epochs."""
    return Config(
        name="swin_b_slamb",
        steps=94_000,
        replicas=128,
        objective="classify",
        optimizer=Optimizer(
            update="slamb(learning_rate, axis_name, eps=1e-8, density=0.1, "
            "rescaling=Rescaling(b3=0.999), sync_every=100, weight_decay=0.05)",
            learning_rate=5e-3,
            warmup_steps=6_000,
        ),
        model=SwinConfig(dtype="bfloat16", scan=True),
        data=Images(form="folder", path="imagenet", batch=4_096),
        eval_every=1_000,
        eval_batches=12,  # 49,152 of the 50,000
        checkpoint_every=5_000,
    )
