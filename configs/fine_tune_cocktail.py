"""Fine-tuning of a Hugging Face folder with CocktailSGD, with the rate and decay of its paper.

    python -m train configs/fine_tune_cocktail.py --start-from FOLDER --data.path TEXT

Each replica holds the whole model, Adam's moments and what it has not sent: 20 bytes a parameter.
docs/fine_tune.md goes through a run on two machines. The paper's models, sharded over the devices
of a host, are in configs/shapes.
"""

from train.config import Config, Data, Optimizer
from train.huggingface.pretrained import Pretrained


def get_config() -> Config:
    """The run, on all devices; the command line names folder and text."""
    return Config(
        name="fine_tune_cocktail",
        steps=1_000,
        replicas=0,
        accumulate=4,
        per_layer=False,
        optimizer=Optimizer(
            # Rows of rare tokens would step 1/replicas as far as in dense training: most of what
            # CocktailSGD costs at such rates, see docs/methods/cocktail_sgd.md.
            update="cocktail_sgd(rare_rows(chain(clip_by_global_norm(1.0), "
            "adamw(learning_rate, weight_decay=0.01)), axis_name), axis_name)",
            learning_rate=1e-5,
            warmup_steps=10,
            schedule="linear",
            final_fraction=0.0,
        ),
        model=Pretrained(),
        data=Data(batch=64),
    )
