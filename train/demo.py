"""`make demo`: one model, the same data twice; dense Adam, then CocktailSGD."""

import argparse
import dataclasses
import pathlib
import shutil

from configs import nano_cocktail, nano_dense
from train.compare import compare
from train.config import Config
from train.processes import devices
from train.processes.exits import clean_exits

METHODS = {"dense Adam": nano_dense, "CocktailSGD": nano_cocktail}


def shortened(config: Config, steps: int) -> Config:
    """The run with another number of steps; warm-up and evaluations in proportion."""
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=steps // 10)
    return dataclasses.replace(
        config,
        name=f"demo/{config.name}",
        steps=steps,
        optimizer=optimizer,
        eval_every=max(1, steps // 10),
        checkpoint_every=steps,
        log_every=max(1, steps // 20),
    )


def main() -> None:
    """Reads --steps, runs the demo and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps is {steps}; write at least 1, as make demo STEPS=20")
    with clean_exits():
        print(demo(steps))


def demo(steps: int) -> str:
    """Trains both, in place of an earlier demo; returns the table and the path of the picture."""
    configs = [shortened(made.get_config(), steps) for made in METHODS.values()]
    devices.start(configs[0].replicas)
    from train.loop import run

    folders = [pathlib.Path(config.runs_dir, config.name) for config in configs]
    for config, folder in zip(configs, folders, strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        run(config)
    picture = folders[0].with_name("comparison.png")
    table = compare(dict(zip(METHODS, folders, strict=True)), picture)
    return f"\n{table}\n\n{picture}"


if __name__ == "__main__":
    main()
