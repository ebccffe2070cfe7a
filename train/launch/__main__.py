"""`python -m train.launch [options] -- CONFIG [overrides]`: one run on many processes."""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from train import __main__ as program
from train.launch import control, detect, local, restarts, ssh
from train.launch.supervise import PATIENCE, supervise
from train.processes import distributed, programs, seals
from train.processes.distributed import Timeouts
from train.processes.exits import Exit, clean_exits, say

_OPEN = (
    "this run has no --secret-file: anybody on its network can write to its processes, see "
    "docs/many_hosts.md"
)


def main(args: Sequence[str]) -> None:
    """Starts the processes of a run, or is one of them.

    Raises:
      SystemExit: With the status of the run, or of the process that failed first.
    """
    split = args.index("--") if "--" in args else len(args)
    options, train_args = parser().parse_args(args[:split]), args[split + 1 :]
    secret = control.obey() if options.obey_stdin else b""
    with clean_exits():
        if not train_args:
            raise ValueError("no config file; write python -m train.launch [options] -- CONFIG.")
        if options.local or options.hosts:
            sys.exit(start_all(options, train_args))
        secret = secret or seals.read_secret(options.secret_file)
    status = ended(lambda: be_one(options, train_args, secret))
    if status == Exit.DRAINED:  # all end the same way, as after the last step, and together
        sys.exit(status)
    if status:
        distributed.abandon(status)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the arguments before `--`."""
    made = argparse.ArgumentParser(
        prog="python -m train.launch",
        usage="%(prog)s [options] -- CONFIG.py [overrides]",
        description="Trains one run on many processes. Without --local, --hosts and --single this "
        "is one of them; mpirun, srun, a JobSet or the flags, which win, say which one.",
    )
    start = made.add_argument_group("start all processes").add_mutually_exclusive_group()
    start.add_argument("--local", type=at_least(1), metavar="N", help="N processes here")
    start.add_argument("--hosts", metavar="FILE", help="by ssh: one [user@]name [slots=K] per line")
    start.add_argument("--single", action="store_true", help="only this process, whatever is set")
    again = made.add_argument_group("with --local and --hosts, when processes are lost")
    text = "start the run again, N times at most"
    again.add_argument("--restarts", type=at_least(0), default=0, metavar="N", help=text)
    text = "continue without them if this many replicas are left; else wait for all"
    again.add_argument("--min-replicas", type=at_least(1), metavar="M", help=text)
    one = made.add_argument_group("be one of them")
    one.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    one.add_argument("--num-processes", type=at_least(1), metavar="N")
    one.add_argument("--process-id", type=at_least(0), metavar="I", help="in [0, N)")
    one.add_argument("--secret-file", metavar="FILE", help="file with the run's secret")
    one.add_argument("--local-devices", type=numbers, metavar="I,J", help="accelerators to take")
    one.add_argument("--local-id", type=at_least(0), help=argparse.SUPPRESS)
    one.add_argument("--local-count", type=at_least(1), help=argparse.SUPPRESS)
    one.add_argument("--obey-stdin", action="store_true", help=argparse.SUPPRESS)
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


def at_least(minimum: int) -> Callable[[str], int]:
    """Makes a parser of numbers from a minimum on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number, {minimum} or more")
        return int(text)

    return read


def numbers(text: str) -> list[int]:
    """Parses numbers separated by commas."""
    return [at_least(0)(part) for part in text.split(",")]


def start_all(options: argparse.Namespace, train_args: list[str]) -> int:
    """Starts the processes of a run here or by ssh, and waits for them; returns the status."""
    for name in ("num_processes", "process_id", "local_devices", "secret_file"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is for one process; leave it out with --local and --hosts.")
    if options.local and options.coordinator:
        raise ValueError("--local finds a free port of 127.0.0.1; leave out --coordinator.")
    config, _ = program.read(train_args)
    if options.min_replicas is not None and not (options.restarts and config.replicas):
        raise ValueError("--min-replicas needs --restarts, and a config with a number of replicas.")
    timeouts = Timeouts(options.start_timeout, options.heartbeat_timeout)
    folder = pathlib.Path(config.runs_dir, config.name)
    network, hurry = (options.interface, timeouts), options.restarts > 0
    if hurry:  # the processes inherit it, or ssh passes it on
        for name, value in programs.kept(folder.absolute() / "programs").items():
            os.environ.setdefault(name, value)

    def run(commands, is_wanted):
        # The others notice a dead process after the heartbeat's timeout, and need a moment to end.
        grace = timeouts.heartbeat + 5
        grace = PATIENCE if hurry else grace
        return supervise(commands, folder / "logs", grace, hurry, is_wanted)

    if options.local:
        group = restarts.Group(
            range(options.local),
            lambda places, more, is_wanted: run(
                local.commands(places, *network, [*train_args, *more]), is_wanted
            ),
            lambda places, lost: [place for i, place in enumerate(places) if i not in lost],
        )
    else:
        places = ssh.places(ssh.read_hosts(pathlib.Path(options.hosts).read_text()))
        how = dict(ssh=options.ssh, python=options.remote_python, folder=options.remote_folder)

        def run_there(places, more, is_wanted):
            hosts, args = ssh.hosts_of(places), [*train_args, *more]
            where = (hosts, options.coordinator, *network)
            return run(ssh.commands(*where, args, **how, environ=os.environ), is_wanted)

        there = lambda: ssh.answering(places, options.ssh)
        group = restarts.Group(places, run_there, lambda _, lost: there(), there)
    return restarts.keep_running(group, config, options.restarts, options.min_replicas)


def be_one(options: argparse.Namespace, train_args: list[str], secret: bytes) -> None:
    """Finds this process's place, connects it to the others, and trains."""
    if options.single:
        program.main(train_args)
        return
    fields = ("coordinator", "num_processes", "process_id", "local_id", "local_count")
    given = {field: getattr(options, field) for field in fields}
    cluster = detect.detect(os.environ, **given)
    if cluster is None:
        raise ValueError(
            "it is unknown which process of the run this is: neither mpirun, srun nor a JobSet has "
            "started it. Write --local N to start N processes here, --hosts FILE to start them by "
            "ssh, --coordinator, --num-processes and --process-id, or --single."
        )
    devices = options.local_devices or detect.local_devices(cluster, os.environ)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("NPROC", str(detect.threads(cluster, allowed, os.cpu_count())))
    print(detect.line(cluster, options.interface, devices, os.environ), file=sys.stderr, flush=True)
    if cluster.num_processes > 1:
        timeouts = Timeouts(options.start_timeout, options.heartbeat_timeout)
        if not secret and cluster.process_id == 0:
            say(_OPEN)
        distributed.connect(cluster, options.interface, timeouts, devices, secret)
        programs.keep_own(cluster.process_id)
    program.main(train_args, cluster.num_processes)


def ended(function: Callable[[], None]) -> int:
    """Calls a function, and returns its exit status."""
    try:
        with clean_exits():
            function()
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or Exit.DONE
        say(end.code)
        return Exit.UNFORESEEN
    return Exit.DONE


if __name__ == "__main__":
    main(sys.argv[1:])
