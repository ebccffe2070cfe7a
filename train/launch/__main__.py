"""`python -m train.launch [options] -- CONFIG [overrides]`: one run on many processes."""

import argparse
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence

from train import __main__ as program
from train.launch import control, detect, local, restarts, ssh, variables
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
    (options, unknown), train_args = parser().parse_known_args(args[:split]), args[split + 1 :]
    secret = control.obey() if options.obey_stdin else b""
    with clean_exits():
        if unknown:
            raise ValueError(not_understood(args, unknown))
        if not train_args:
            raise ValueError("no config file; write python -m train.launch [options] -- CONFIG.")
        if options.local or options.hosts:
            sys.exit(start_all(options, train_args))
        if options.env:
            raise ValueError("--env is for --local and --hosts; write NAME=VALUE before python.")
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
    text = "by ssh to the hosts of a file: one [user@]name [slots=K] per line"
    start.add_argument("--hosts", metavar="FILE", help=text)
    start.add_argument("--single", action="store_true", help="only this process, whatever is set")
    again = made.add_argument_group("with --local and --hosts, when processes are lost")
    text = "start the run again, N times at most"
    again.add_argument("--restarts", type=at_least(0), default=0, metavar="N", help=text)
    text = "continue without them if this many replicas are left; else wait for all"
    again.add_argument("--min-replicas", type=at_least(1), metavar="M", help=text)
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


def not_understood(args: Sequence[str], unknown: Sequence[str]) -> str:
    """What to write instead of arguments before `--` that are not the launcher's."""
    if "--" in args:
        return (
            f"{shlex.join(unknown)} before -- is unknown to the launcher; overrides of the config "
            "come after CONFIG, and python -m train.launch --help lists its own options."
        )
    config = next((arg for arg in unknown if not arg.startswith("-")), unknown[0])
    at = args.index(config)
    command = shlex.join(["python", "-m", "train.launch", *args[:at], "--", *args[at:]])
    return f"no -- before the config file {config!r}; write {command}."


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


def start_all(options: argparse.Namespace, train_args: list[str]) -> int:
    """Starts the processes of a run here or by ssh, and waits for them; returns the status."""
    for name in ("num_processes", "process_id", "secret_file"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is for one process; leave it out with --local and --hosts.")
    if options.local and options.coordinator:
        raise ValueError("--local finds a free port of 127.0.0.1; leave out --coordinator.")
    config, _ = program.read(train_args)
    if options.min_replicas is not None and not (options.restarts and config.replicas):
        raise ValueError("--min-replicas needs --restarts, and a config with a number of replicas.")
    timeouts = Timeouts(options.start_timeout, options.heartbeat_timeout)
    more = variables.given(options.env, os.environ)
    os.environ.update(more)  # processes here inherit it
    folder = pathlib.Path(config.runs_dir, config.name)
    network, hurry = (options.interface, timeouts), options.restarts > 0
    if hurry:  # the processes inherit it, or ssh passes it on
        for name, value in programs.kept(folder.absolute() / "programs").items():
            os.environ.setdefault(name, value)

    def run(commands, is_wanted, private=None):
        # The others notice a dead process after the heartbeat's timeout, and need a moment to end.
        grace = timeouts.heartbeat + 5
        grace = PATIENCE if hurry else grace
        return supervise(commands, folder / "logs", grace, hurry, is_wanted, private)

    group = (here if options.local else there)(options, train_args, network, more, run)
    return restarts.keep_running(group, config, options.restarts, options.min_replicas)


def here(options, train_args: list[str], network, more, run) -> restarts.Group:
    """The places of `--local`; processes inherit all variables."""
    devices = options.local_devices and detect.shares(options.local_devices, options.local)

    def start(places, overrides, is_wanted):
        args = [*train_args, *overrides]
        return run(local.commands(places, *network, args, devices), is_wanted)

    left = lambda places, lost: [place for i, place in enumerate(places) if i not in lost]
    return restarts.Group(range(options.local), start, left)


def there(options, train_args: list[str], network, more, run) -> restarts.Group:
    """The places of `--hosts`, where the variables `more` go beside those that always do."""
    hosts = ssh.hosts_of_file(options.hosts)
    places = ssh.places(hosts)
    how = dict(ssh=options.ssh, python=options.remote_python, folder=options.remote_folder)
    how |= dict(environ=os.environ, more=more)
    if given := options.local_devices:
        how["devices"] = {host.target: detect.shares(given, host.slots) for host in hosts}
    passed = variables.passed(os.environ, more)
    private = {name: value for name, value in passed.items() if variables.is_secret(name)}

    def start(places, overrides, is_wanted):
        where = (ssh.hosts_of(places), options.coordinator, *network)
        commands = ssh.commands(*where, [*train_args, *overrides], **how)
        return run(commands, is_wanted, private)

    back = lambda: ssh.answering(places, options.ssh)
    return restarts.Group(places, start, lambda _, lost: back(), back)


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
    devices = detect.local_devices(cluster, os.environ, options.local_devices)
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
