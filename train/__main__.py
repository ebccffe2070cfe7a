"""`python -m train CONFIG [overrides]`: trains the run that a config file describes.

With `--report` as the first override it prints what one step would send, and trains nothing.
"""

import sys

from train import config as configs
from train import devices


def main(args: list[str]) -> None:
    """Runs the program; a user's mistake ends it with one message and exit status 2."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m train CONFIG.py [--report] [overrides]\n")
        print("CONFIG.py --help lists the overrides; configs/ has the files.")
        sys.exit(0 if args else 2)
    only_report = "--report" in args
    try:
        path, *overrides = [arg for arg in args if arg != "--report"]
        config = configs.load(path, overrides)
        devices.start(config.replicas)
        if only_report:
            from train.task import make_task, report

            print(report(make_task(config)))
        else:
            from train.loop import run

            rows = run(config)
            print(f"{config.runs_dir}/{config.name}: step {rows[-1]['step']}, {_last_loss(rows)}")
            print(f"{config.runs_dir}/{config.name}/loss.png")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _last_loss(rows) -> str:
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    return f"validation loss {losses[-1]:.4f} nats per byte" if losses else "not evaluated"


if __name__ == "__main__":
    main(sys.argv[1:])
