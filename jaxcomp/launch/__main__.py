"""`python -m jaxcomp.launch [options] -- PROGRAM [arguments]`: one run on many processes."""

import sys
from collections.abc import Sequence

from jaxcomp.launch import control, distributed, member, options, seals, starting
from jaxcomp.launch.exits import clean_exits
from jaxcomp.launch.program import Program


def main(args: Sequence[str], program: Program | None = None) -> None:
    """Starts the processes of a run, or is one of them.

    Args:
      args: The command line.
      program: The program that follows `--`; by default its command does.

    Raises:
      SystemExit: With the status of the run, or of the process that failed first.
    """
    program = program or Program()
    split = args.index("--") if "--" in args else len(args)
    parser = options.parser(program)
    (given, unknown), theirs = parser.parse_known_args(args[:split]), list(args[split + 1 :])
    with clean_exits():
        secret = control.obey() if given.obey_stdin else b""  # an interrupt may be waiting there
        if unknown:
            raise ValueError(options.not_understood(args, unknown, program))
        if not theirs:
            raise ValueError(
                f"no {program.noun}; write python -m {program.module} [options] -- {program.place}."
            )
        if given.local or given.hosts:
            sys.exit(starting.start_all(given, theirs, program))
        if given.env:
            raise ValueError("--env is for --local and --hosts; write NAME=VALUE before python.")
        secret = secret or seals.read_secret(given.secret_file)
    distributed.finish(lambda: member.be_one(given, [*program.command, *theirs], secret))


if __name__ == "__main__":
    main(sys.argv[1:])
