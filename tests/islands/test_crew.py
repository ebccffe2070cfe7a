"""An island of two real processes beside one of a single process: all take the same outer steps."""

import re
import sys
import threading
import time

import jax
import numpy as np
import optax

import jaxcomp
from jaxcomp import islands
from tests.helpers.launching import environment, run

PAIR = """
import os, pathlib, sys, time
import jax
jax.distributed.initialize()
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.islands import test_crew as both

url, folder, me = sys.argv[1], pathlib.Path(sys.argv[2]), jax.process_index()
mesh = jax.make_mesh((4,), ("fsdp",))
specs = {"bias": P(), "kernel": P("fsdp")}
put = lambda x, spec: jax.make_array_from_callback(
    x.shape, NamedSharding(mesh, spec), lambda index: x[index]
)
params = {name: put(x, specs[name]) for name, x in both.START.items()}
for wrong in ({"name": f"host-{me}"}, {"params": both.START}, {"url": "ftp://x/y"}):
    try:
        both.join(**{"url": url, "name": "pair", "params": params, **wrong})
    except ValueError as error:
        print("refused:", error)
once, without = folder / "once", folder / "without"
while once.exists() and not without.exists():  # it is back before the deadline on a fast machine
    time.sleep(0.05)
island = both.join(url, params, name="pair")
params, seen = island.params, island.rounds
print("began at", seen)
counted = 0
while counted < 4:
    params = island.step(both.moved(params))
    if island.rounds > seen:
        seen = island.rounds
        counted += island.last.members == ("alone", "pair")
        whole = multihost_utils.process_allgather(island.params, tiled=True)
        np.savez(folder / f"{seen}.{me}.npz", **whole)
        if counted == 3 and me == 1 and not once.exists():
            once.touch()
            os.kill(os.getpid(), 9)
assert params["kernel"].sharding.is_equivalent_to(NamedSharding(mesh, specs["kernel"]), 2)
island.leave(params)
"""

HEARERS = """
import types
import jax
jax.distributed.initialize()
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxcomp.islands import courier, crew

long = bytes(range(256)) * 2**17  # in several pieces
assert crew.from_first(lambda: long) == long
assert (crew.on_first(lambda: "the room") is None) != crew.is_first()
try:
    crew.from_first(lambda: {}["lost"])
except KeyError as error:
    print("found: hears of", error)

posted = []
rules = courier.Rules(quorum=1, deadline=1e-9, snapshots=25, poll=1e-9)
seen = types.SimpleNamespace(opened=7, ready=3, trains=False, post=posted.append, rules=rules)
heard = crew.Crew(seen if crew.is_first() else None, poll=1e-9)
sharding = NamedSharding(jax.make_mesh((4,), ("fsdp",)), P("fsdp"))
rows = np.arange(8, dtype=np.float32)
shards = jax.make_array_from_callback((8,), sharding, lambda index: rows[index])
for _ in range(3):  # the answer to a look is read at the next one
    news = heard.look(shards)
print("found: has seen", int(news.opened), int(news.ready), int(news.is_slow))
heard.post(courier.Post(0, [shards], 1, shards))
for post in posted:
    assert all((np.asarray(x) == rows).all() for x in (*post.messages, post.sums))
print("found: all is sent")
"""

START = {
    "bias": np.zeros(6, np.float32),
    "kernel": np.arange(64, dtype=np.float32).reshape(8, 8) / 64,
}


def join(url, params, name):
    """Rates are powers of two, so that any program rounds their products alike."""
    return islands.join(
        url,
        params,
        name=name,
        every=6,
        delay=2,
        code=jaxcomp.quantize(4, block=8),
        error_decay=0.5,
        outer=optax.sgd(lambda count: 0.5, momentum=0.5),  # with a count
        fragments=2,
        snapshots=2,
        deadline=2.0,
        poll=0.05,
        patience=60.0,
    )


@jax.jit
def moved(params):
    return jax.tree.map(lambda x: x + (x - 1) / 8, params)


def test_all_processes_hear_what_the_first_one_has(tmp_path):
    (tmp_path / "hearers.py").write_text(HEARERS)
    command = [sys.executable, "-m", "jaxcomp.launch", "--local", "2", "--heartbeat-timeout", "5"]
    environ = environment(JAX_NUM_CPU_DEVICES="2")
    done = run([*command, "--", "python", "hearers.py"], 60.0, cwd=tmp_path, env=environ)
    logs = [log.read_text() for log in tmp_path.rglob("process_*.log")]
    found = [re.findall("^found: (.*)$", log, re.MULTILINE) for log in logs]
    assert found == [["hears of 'lost'", "has seen 7 3 1", "all is sent"]] * 2, done.stdout


def test_an_island_of_two_processes_joins_loses_one_and_returns(tmp_path):
    """It comes late and reads a snapshot; the other goes on without it until it is back."""
    url, over, outputs = f"file://{tmp_path}/run", threading.Event(), []
    alone = join(url, START, "alone")
    params, seen, members = alone.params, {}, []  # the consensus after each round
    together = "alone", "pair"

    def pair():
        (tmp_path / "pair.py").write_text(PAIR)
        command = [sys.executable, "-m", "jaxcomp.launch", "--local", "2", "--restarts", "1"]
        command += ["--heartbeat-timeout", "5", "--", "python", "pair.py", url, str(tmp_path)]
        environ = environment(JAX_NUM_CPU_DEVICES="2")
        outputs.append(run(command, cwd=tmp_path, env=environ))
        over.set()

    others = threading.Thread(target=pair, daemon=True)
    while not over.is_set():
        params = alone.step(moved(params))
        if alone.last is not None and alone.rounds not in seen:
            seen[alone.rounds] = jax.device_get(alone.params)
            members.append(alone.last.members)
            if together in members and members[-1] == ("alone",):
                (tmp_path / "without").touch()
        if alone.rounds >= 5 and others.ident is None:
            others.start()
        time.sleep(0.05)
    alone.leave()
    said = outputs[0].stdout
    assert outputs[0].returncode == 0, said
    refused = re.findall("refused: (.*)", said)
    assert "the same arguments" in refused[0] and "needs arrays of all" in refused[1]
    assert "needs one of s3://" in refused[2]
    began = {int(found) for found in re.findall(r"began at (\d+)", said)}
    assert len(began) == 2 and min(began) >= 5
    for file in tmp_path.glob("*.npz"):
        if (number := int(file.name.partition(".")[0])) in seen:
            with np.load(file) as found:
                jax.tree.map(np.testing.assert_array_equal, {**found}, seen[number])
    without = members.index(("alone",), members.index(together))
    assert together in members[without:]
