"""`python -m train CONFIG [overrides]`: trains the run of a config file.

With `--report` it prints what one step would send, with `--plan` which method is predicted to be
the fastest on a network; neither trains.
"""

import sys
from typing import Literal

from jaxcomp import launch
from jaxcomp.launch.exits import clean_exits, show, while_read
from train.config import Config
from train.config import run as configs
from train.config.facts import program_facts, to_json
from train.placement import devices
from train.plan import arguments
from train.plan.arguments import Options


def main(args: list[str]) -> None:
    """Runs the program; a user's mistake ends it with a message and exit status 2.

    Args:
      args: The command line after `python -m train`.
    """
    with clean_exits():
        num_processes = launch.connect()
        with while_read():  # `--help | head`
            config, instead = read(args)
        if num_processes > 1:
            launch.require_same(program_facts(to_json(config)) | {"options": str(instead)})
        devices.start(config.replicas, num_processes)
        if isinstance(instead, Options):
            from train.plan import planning

            planned = planning.text(*planning.make_plan(config, instead))
            if launch.is_first():
                show(planned)
        elif instead == "report":
            from train.examples import none
            from train.report import text
            from train.task import make_task

            show(text(make_task(config, read=none)))
        else:
            from train.loop import run

            rows = run(config)
            if rows:  # empty in the other processes of a run
                from train import outputs

                show(outputs.summary(config, rows))


def read(args: list[str]) -> tuple[Config, Options | Literal["report"] | None]:
    """Reads the command line: the run, and a report or a plan if one is requested.

    Raises:
      SystemExit: After the usage, with status 0 if it was requested and 2 if not.
      ValueError: If the config file is invalid, or options conflict.
    """
    options, args = arguments.parse(args)
    report = "report" if "--report" in args else None
    args = [arg for arg in args if arg != "--report"]
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m train CONFIG.py [--report] [overrides]")
        print("       python -m train CONFIG.py --plan [--measure] [--link-rate BIT/S] ...\n")
        print("CONFIG.py --help lists the overrides; configs/ has the files; docs/planner.md has")
        print("the options of a plan.")
        sys.exit(0 if args else 2)
    return configs.load(args[0], args[1:]), options or report
