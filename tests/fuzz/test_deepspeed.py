"""Settings of DeepSpeed."""

import contextlib
import math

from tests.helpers.fuzzing import fuzz, objects, refused
from train import deepspeed
from train.config import Optimizer

DEEPSPEED = {
    "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True},
}


@fuzz(objects(DEEPSPEED))
def test_deepspeed(value):
    if (found := refused(deepspeed.translate, value, 10)) is not None:
        compile(deepspeed.to_python(found, "run"), "run.py", "exec")
        with contextlib.suppress(ValueError):  # the config says what it does not take
            assert 0 < Optimizer(**found.optimizer).learning_rate < math.inf
