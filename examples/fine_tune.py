"""Fine-tunes a model of a Hugging Face folder on a text, and writes a folder for transformers.

JAX_NUM_CPU_DEVICES=4 python examples/fine_tune.py FOLDER TEXT NEW_FOLDER [STEPS]
"""

import pathlib
import sys

import jax

from train.config import Config, Data, Optimizer
from train.export import export
from train.huggingface.pretrained import Pretrained
from train.loop import run

folder, text, tuned, *steps = sys.argv[1:]
config = Config(
    name="fine_tune",
    steps=int(steps[0]) if steps else 300,
    start_from=folder,
    optimizer=Optimizer(
        update="chain(compressed_mean(quantize(4), axis_name), adamw(learning_rate))",
        learning_rate=2e-3,
        warmup_steps=10,
    ),
    model=Pretrained(),
    data=Data(path=text, batch=4 * jax.device_count()),
)
losses = [row["val_loss"] for row in run(config) if "val_loss" in row]
export(pathlib.Path(config.runs_dir, config.name), pathlib.Path(tuned), "float32", None)
print(f"loss {losses[0]:.3f}, after {config.steps} steps {losses[-1]:.3f}")
