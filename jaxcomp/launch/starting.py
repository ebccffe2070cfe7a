"""Starts all processes of a run, here or by ssh, and starts them again."""

import argparse
import functools
import os
from collections.abc import Mapping

from jaxcomp.launch import detect, local, programs, restarts, ssh, variables
from jaxcomp.launch.distributed import Timeouts
from jaxcomp.launch.program import Plan, Program
from jaxcomp.launch.supervise import PATIENCE, supervise


def start_all(options: argparse.Namespace, args: list[str], program: Program) -> int:
    """Starts the processes of a run here or by ssh, and waits for them; returns the status."""
    for name in ("num_processes", "process_id", "secret_file"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is for one process; leave it out with --local and --hosts.")
    if options.local and options.coordinator:
        raise ValueError("--local finds a free port of 127.0.0.1; leave out --coordinator.")
    plan = program.plan(options, args)
    more = variables.given(options.env, os.environ)
    os.environ.update(more)  # processes here inherit it
    if options.restarts:  # the processes inherit it, or ssh passes it on
        for name, value in programs.kept(plan.logs.parent.absolute() / "programs").items():
            os.environ.setdefault(name, value)
    group = _here if options.local else functools.partial(_there, more=more)
    places = group(options, [*program.command, *args], plan)
    return restarts.keep_running(places, plan, options.restarts, options.min_replicas)


def _network(options: argparse.Namespace) -> tuple[str | None, Timeouts]:
    return options.interface, Timeouts(options.start_timeout, options.heartbeat_timeout)


def _run(options: argparse.Namespace, plan: Plan, commands, is_wanted, private=None):
    # The others notice a dead process after the heartbeat's timeout, and need a moment to end.
    hurry = options.restarts > 0
    grace = PATIENCE if hurry else options.heartbeat_timeout + 5
    return supervise(commands, plan.logs, grace, hurry, is_wanted, private)


def _here(options: argparse.Namespace, command: list[str], plan: Plan) -> restarts.Group:
    """The places of `--local`; processes inherit all variables."""
    devices = options.local_devices and detect.shares(options.local_devices, options.local)

    def start(places, more, is_wanted):
        made = local.commands(places, *_network(options), [*command, *more], devices)
        return _run(options, plan, made, is_wanted)

    left = lambda places, lost: [place for i, place in enumerate(places) if i not in lost]
    return restarts.Group(range(options.local), start, left)


def _there(
    options: argparse.Namespace, command: list[str], plan: Plan, more: Mapping[str, str]
) -> restarts.Group:
    """The places of `--hosts`, where the variables `more` go beside those that always do."""
    hosts = ssh.hosts_of_file(options.hosts)
    places = ssh.places(hosts)
    given = options.local_devices
    devices = given and {host.target: detect.shares(given, host.slots) for host in hosts}
    passed = variables.passed(os.environ, more)
    private = {name: value for name, value in passed.items() if variables.is_secret(name)}

    def start(places, words, is_wanted):
        made = ssh.commands(
            ssh.hosts_of(places),
            options.coordinator,
            *_network(options),
            [*command, *words],
            ssh=options.ssh,
            python=options.remote_python,
            folder=options.remote_folder,
            environ=os.environ,
            more=more,
            devices=devices,
        )
        return _run(options, plan, made, is_wanted, private)

    back = lambda: ssh.answering(places, options.ssh)
    return restarts.Group(places, start, lambda _, lost: back(), back)
