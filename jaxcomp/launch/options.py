"""The command line of a launcher, before `--`."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from jaxcomp.launch import variables
from jaxcomp.launch.distributed import Timeouts
from jaxcomp.launch.program import Program


def parser(program: Program | None = None) -> argparse.ArgumentParser:
    """Makes the parser of the arguments before `--`."""
    program = program or Program()
    made = argparse.ArgumentParser(
        prog=f"python -m {program.module}",
        usage=f"%(prog)s [options] -- {program.place} [{program.own}]",
        description="Runs one program on many processes. Without --local, --hosts and --single "
        "this is one of them; mpirun, srun, a JobSet or the flags, which win, say which one.",
    )
    start = made.add_argument_group("start all processes").add_mutually_exclusive_group()
    start.add_argument("--local", type=at_least(1), metavar="N", help="N processes here")
    text = "by ssh to the hosts of a file: one [user@]name [slots=K] per line"
    start.add_argument("--hosts", metavar="FILE", help=text)
    start.add_argument("--single", action="store_true", help="only this process, whatever is set")
    again = made.add_argument_group("with --local and --hosts, when processes are lost")
    text = "start the run again, N times at most"
    again.add_argument("--restarts", type=at_least(0), default=0, metavar="N", help=text)
    text = f"continue without them if this many {program.counted} are left; else wait for all"
    again.add_argument("--min-replicas", type=at_least(1), metavar="M", help=text)
    text = "folder for the logs of all processes, with --local and --hosts"
    made.add_argument("--logs", metavar="FOLDER", help=text)
    set_them = made.add_argument_group("environment variables, with --local and --hosts")
    text = (
        "set a variable in all processes; without a value, to the one it has here. To other hosts "
        f"go {', '.join(f'{prefix}*' for prefix in variables.PREFIXES)}, "
        f"{', '.join(variables.NAMES)} anyway"
    )
    set_them.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    one = made.add_argument_group("be one of them")
    one.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    one.add_argument("--num-processes", type=at_least(1), metavar="N")
    one.add_argument("--process-id", type=at_least(0), metavar="I", help="in [0, N)")
    one.add_argument("--secret-file", metavar="FILE", help="file with the run's secret")
    one.add_argument("--local-id", type=at_least(0), help=argparse.SUPPRESS)
    one.add_argument("--local-count", type=at_least(1), help=argparse.SUPPRESS)
    one.add_argument("--obey-stdin", action="store_true", help=argparse.SUPPRESS)
    devices = made.add_argument_group("accelerators")
    text = (
        "numbers of the visible accelerators to take; with --local and --hosts divided among the "
        "processes of each host"
    )
    devices.add_argument("--local-devices", type=numbers, metavar="I,J", help=text)
    network = made.add_argument_group("network")
    network.add_argument("--interface", metavar="NAME", help="for collectives, like eth1")
    for name, seconds in Timeouts()._asdict().items():
        text = f"seconds until a silent process counts as missing ({seconds})"
        network.add_argument(f"--{name}-timeout", type=at_least(1), default=seconds, help=text)
    remote = made.add_argument_group("with --hosts")
    remote.add_argument("--ssh", default="ssh -o BatchMode=yes -o ConnectTimeout=10")
    remote.add_argument("--remote-python", default=sys.executable, metavar="PYTHON")
    remote.add_argument("--remote-folder", default=os.getcwd(), metavar="FOLDER")
    return made


def not_understood(args: Sequence[str], unknown: Sequence[str], program: Program) -> str:
    """What to write instead of arguments before `--` that are not the launcher's."""
    if "--" in args:
        return (
            f"{shlex.join(unknown)} before -- is unknown to the launcher; {program.own} come after "
            f"{program.place}, and python -m {program.module} --help lists its own options."
        )
    first = next((arg for arg in unknown if not arg.startswith("-")), unknown[0])
    at = args.index(first)
    command = shlex.join(["python", "-m", program.module, *args[:at], "--", *args[at:]])
    return f"no -- before the {program.noun} {first!r}; write {command}."


def at_least(minimum: int) -> Callable[[str], int]:
    """Makes a parser of numbers from a minimum on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number, {minimum} or more")
        return int(text)

    return read


def numbers(text: str) -> list[int]:
    """Parses different numbers separated by commas."""
    found = [at_least(0)(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a number twice")
    return found
