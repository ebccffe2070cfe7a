"""What is read from programs that were compiled for accelerators, and from small real ones.

Those are steps of a GPT for eight H100 and eight TPU v5e: compiled where the compilers are, and
run nowhere.
"""

import contextlib
import dataclasses
import fcntl
import functools
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks import accelerators, accelerators_devices, accelerators_step, accelerators_tables
from benchmarks.accelerators import COMPILING, time_step
from benchmarks.accelerators_devices import DEVICES, mesh_from, mesh_of, unavailable
from benchmarks.accelerators_program import Program
from benchmarks.accelerators_step import METHODS, MODELS, batch_of, build_step
from jaxcomp.compressors.base import Key
from jaxcomp.compressors.largest import find_largest
from jaxcomp.exchange.decoding import total_of_all
from jaxcomp.exchange.messages import message_bytes

# Of the `tiny` model's step: most copies of the parameters that kernels move (TPUs: that XLA says
# are accessed), most kernels, most messages between hosts, and those of them in a branch: 0/1 Adam
# learns its variance now and then, and its embeddings have a code, and so messages, of their own.
TABLE = {
    ("h100", "q4"): (38, 165, 3, 0),
    ("h100", "cocktail"): (40, 155, 2, 0),
    ("h100", "zero_one_adam"): (47, 215, 5, 1),
    ("v5e", "q4"): (78, 475, 3, 0),
    ("v5e", "cocktail"): (107, 610, 2, 0),
    ("v5e", "zero_one_adam"): (109, 900, 5, 1),
}

TPU_LOCK = pathlib.Path("/tmp/libtpu_lockfile")

needs_h100 = pytest.mark.skipif(unavailable("h100") is not None, reason=f"{unavailable('h100')}")

WORK = accelerators_devices.Work(
    flops=989e12,
    moved=3_352_320_000_000,
    kernels=500_000,
    fast_bytes=450e9,
    nic_bytes=1e9,
    beside=0,
    asynchronous=1,
)


def test_the_roofline_adds_products_memory_launches_and_what_no_product_hides():
    h100 = DEVICES["h100"]
    assert accelerators_devices.local_seconds(h100, WORK) == 4
    predict = accelerators_devices.predicted_seconds
    assert predict(h100, WORK, 1e9) == 4 + 8
    assert predict(h100, WORK._replace(beside=0.5), 1e9) == 4 + 7.5
    assert predict(h100, WORK._replace(beside=0.5), 1e12) == 4
    # Nothing hides what is not asynchronous, however much is computed beside the rest.
    assert predict(h100, WORK._replace(beside=0.5, asynchronous=0.03125), 1e9) == 4 + 7.75


def row_of(method, **more):
    key = {"device": "h100", "model": "tiny", "method": method, "mesh": "8"}
    return key | more


def test_a_new_row_replaces_the_old_one_and_what_was_measured_stays():
    measured = {
        "seconds": 1.0,
        "predicted_seconds": 0.5,
        "slowest_seconds": 2.0,
        "peak_bytes": None,
        "compiler_peak_bytes": 3e9,
    }
    rows = accelerators.merged([row_of("q4", kernels=1), row_of("dense")], row_of("q4", kernels=2))
    assert rows == [row_of("dense"), row_of("q4", kernels=2)]
    rows = accelerators.merged(rows, row_of("q4", measured=measured))
    rows = accelerators.merged(rows, row_of("q4", error="why"))
    assert rows[1] == row_of("q4", error="why", measured=measured)
    assert "not compiled: why" in accelerators_tables.table(rows[1:])
    line = "| h100 | tiny | 8 | q4 | 1000.0 | 500.0 |  |  | 2000.0 |  | 3.00 |"
    assert line in accelerators_tables.measured_table(rows[1:])


def test_a_step_runs_and_is_timed_on_the_devices_at_hand(monkeypatch):
    def short(built, step, **options):
        assert built.batch == batch_of(built.mesh)
        assert dict(built.mesh.shape) == {"replica": 4}
        return time_step(built, step, warm_up=1, single=2, **options)

    monkeypatch.setattr(accelerators, "time_step", short)
    monkeypatch.setitem(MODELS, "tiny", SMALL)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:4])
    found = accelerators.measured("h100", "tiny", "q4", (4,), True)["measured"]
    assert found["seconds"] > 0 and found["slowest_seconds"] > 0
    assert found["mocked"]


def test_one_gpu_runs_the_programs_of_many_hosts(monkeypatch):
    steps = []

    def apart(function, *arguments, environment):
        if function is accelerators.at_hand:
            return accelerators.AtHand("h200", 1)
        steps.append((arguments, environment))
        return {"measured": {"error": "why", "mocked": True}}

    monkeypatch.setattr(accelerators, "has_driver", lambda: True)
    monkeypatch.setattr(accelerators, "apart", apart)
    rows = list(accelerators.run_at_hand(["tiny"], ["q4"], ["8", "2x8"]))
    hosts = lambda topology: {"CUDA_VISIBLE_DEVICES": "0", "JAX_MOCK_GPU_TOPOLOGY": topology}
    assert steps == [
        (("h200", "tiny", "q4", (8,), True), hosts("1x8x1")),
        (("h200", "tiny", "q4", (2, 8), True), hosts("1x16x1")),
    ]
    table = accelerators_tables.measured_table(rows)
    assert "| h200 | tiny | 2x8, mocked | q4 | not measured: why |" in table
    steps.clear()
    list(accelerators.run_at_hand(["tiny"], ["q4"]))
    assert steps == [(("h200", "tiny", "q4", (1,), False), {})]


SMALL = dataclasses.replace(MODELS["tiny"], layers=1, width=32, heads=2, vocab=256)


@pytest.mark.parametrize(
    ("method", "in_shards"),
    [("q4", False), ("qsdp", False), ("cocktail_lean", True)],
)
def test_steps_are_lowered_for_hosts_of_several_devices(method, in_shards):
    hosts = mesh_from(jax.devices(), (4, 2))
    model = dataclasses.replace(SMALL, layers=2, scan=True, stacks=2)
    built = build_step(model, METHODS[method], hosts, in_shards)
    built.step.lower(built.params, built.state, built.batch)
    axes = {
        axis for x in jax.tree.leaves(built.params) for axis in jax.tree.leaves(x.sharding.spec)
    }
    assert ("fast" in str(axes)) == (in_shards or method == "qsdp")
    assert built.mesh.size == 8


def test_more_devices_than_a_slice_has_are_refused_before_the_compiler_ends_its_process():
    with pytest.raises(ValueError, match="got 1024 devices of v5e, need at most 256"):
        mesh_of("v5e", (128, 8))


def test_a_device_without_its_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(
        accelerators.unavailable.__globals__["PACKAGES"], "tpu", ("no_such_package.at_all",)
    )
    assert "pip install '.[accelerators]'" in unavailable("v5e")


@functools.cache
def rows_of(device):
    """The rows of the table's methods, made in one process of its own."""
    methods = [method for name, method in TABLE if name == device]
    made = made_apart(device, "tiny", methods, (8,))
    return {row["method"]: row for row in made}


def made_apart(*step):
    with locked():
        return accelerators.apart(accelerators_step.rows, *step, environment=COMPILING)


@contextlib.contextmanager
def locked():
    """Holds the TPU's lock, as another program that compiles at the same time would."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is such a program
            file = stack.enter_context(TPU_LOCK.open("a"))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@pytest.mark.parametrize(("device", "method"), TABLE)
def test_programs_for_accelerators_have_the_structure_that_the_page_says(device, method):
    if (reason := unavailable(device)) is not None:
        pytest.skip(reason)
    row = rows_of(device)[method]
    most_copies, most_kernels, most_messages, in_branches = TABLE[device, method]
    accessed = row["accessed_bytes"]
    copies = row["moved_copies"] if accessed is None else accessed / (4 * row["parameters"])
    assert copies <= most_copies
    assert row["kernels"] <= most_kernels
    found = [kind["all"] for kind in row["messages"].values()]
    assert 0 < sum(found) <= most_messages
    assert row["messages_inside"] == in_branches
    assert row["unknown_loops"] == 0
    if method == "cocktail":
        # XLA makes all-reduces of the gathers of a TPU that have no whole rows of 128 words.
        assert set(row["messages"]) == {"all-to-all", "all-gather"}
    if (device, method) == ("h100", "cocktail"):
        assert row["products_in_span"] == 1.0  # the gradient, between the first start and last end


@needs_h100
def test_messages_of_parameters_in_shards_travel_beside_the_whole_gradient():
    (row,) = made_apart("h100", "tiny-in-shards", ["cocktail"], (2, 4))
    # Arrays that the devices of a host hold alike are a bucket, and those in shards another one.
    assert row["messages"] == {op: {"all": 2, "async": 2} for op in ("all-to-all", "all-gather")}
    assert row["bytes_asynchronous"] == 1.0
    assert row["products_in_span"] == row["products_beside"] == 1.0


@needs_h100
def test_messages_of_a_mean_travel_beside_the_backward_pass():
    (row,) = made_apart("h100", "toy", ["q4"], (8,))
    assert row["products_beside"] > 0.45  # of all; two thirds are the backward pass's
    assert all(kind["async"] == kind["all"] for kind in row["messages"].values())


def selection(n):
    """Kernels in which an H100 chooses an eighth of each n entries, and copies of them it moves."""
    mesh, x = mesh_of("h100", (1,)), jax.ShapeDtypeStruct((2**18 // n, n), jnp.float32)
    choose = lambda x: find_largest(x, n // 8)[::2]
    whole = jax.shard_map(choose, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    place = NamedSharding(mesh, P())
    text = jax.jit(whole, in_shardings=place, out_shardings=place).lower(x).compile().as_text()
    cost = Program(text).cost
    return cost.kernels, cost.moved / (4 * x.size)


@needs_h100
def test_an_h100_finds_the_largest_of_a_row_in_one_kernel():
    with locked():
        found = accelerators.apart(selections, environment=COMPILING)
    # Rounds of their own would be 63 kernels, which read a row 36 times.
    assert all(kernels < 10 and copies < 4 for kernels, copies in found)


def selections():
    return [selection(n) for n in (128, 4096)]


def sums(hosts):
    """How many copies of a bucket an H100 needs to sum the messages of all hosts."""
    code, x = jaxcomp.top_k(1 / 128, block=4096), jax.ShapeDtypeStruct((2**20,), jnp.float32)
    size, place = message_bytes(code, x.size) // 4, NamedSharding(mesh_of("h100", (1,)), P())
    sum_all = lambda messages: total_of_all(messages, code, Key(0, 0), x)
    jitted = jax.jit(sum_all, in_shardings=place, out_shardings=place)
    compiled = jitted.lower(jax.ShapeDtypeStruct((hosts, size), jnp.uint32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * x.size)


@needs_h100
def test_an_h100_sums_sparse_messages_in_place():
    with locked():
        copies = accelerators.apart(sums, 64, environment=COMPILING)
    assert copies < 1.5  # a whole array for each message would be 64


def program_of(method, moved, kernels, **more):
    figures = {"moved_copies": moved, "kernels": kernels, "memory": {"temp_copies": 2.0}}
    predicted = {"500mbit": 1.2, "unlimited": 1.0}
    made = row_of(method, **figures, nic_bytes=1e9, predicted=predicted)
    return made | {"model": "124m"} | more


def test_targets_are_beside_what_was_reached_and_bold_where_missed():
    rows = [
        program_of("dense", 20.0, 1000),
        program_of("q4", 24.0, 1151),
        program_of("cocktail", 40.0, 1250, nic_bytes=1e7),
        program_of("sign", 20.0, 1000),  # without the dense step of its optimizer
    ]
    text = accelerators_tables.targets_table(rows)
    assert "| h100 | 124m | q4 | +4.0 of +8.0 | **+151 of +150** | +0.0 of +2.0 |  |  |" in text
    assert "| **+20.0 of +12.0** | +250 of +250 | +0.0 of +2.5 |  | **1.20 of 1.10** |" in text
    assert "| h100 |  | sign | not compiled |" in text


def test_a_profile_sums_the_kernels_of_devices_alone():
    event = lambda name, ns: SimpleNamespace(name=name, duration_ns=ns)
    line = lambda name, *events: SimpleNamespace(name=name, events=events)
    kernels = event("pack", 4e9), event("sum", 2e9), event("pack", 2e9)
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=[line("Stream #7", *kernels)]),
        SimpleNamespace(name="/device:GPU:0", lines=[line("Source code", event("step", 9e9))]),
        SimpleNamespace(name="/host:CPU", lines=[line("Stream", event("wait", 9e9))]),
    ]
    assert accelerators.summary(planes) == {
        "kernel_seconds": 2.0,
        "slowest_kernels": [["pack", 0.5, 1.5], ["sum", 0.25, 0.5]],
    }


def test_measured_steps_are_compared_with_the_dense_step_of_their_optimizer():
    held = {"slowest_seconds": 1.0, "peak_bytes": 2e9, "compiler_peak_bytes": 1e9}
    measured = lambda s, p: {"measured": {"seconds": s, "predicted_seconds": p} | held}
    rows = [
        row_of("dense", **measured(0.001, 0.002)),
        row_of("dense_sgd", **measured(0.002, 0.003)),
        row_of("sign, trial: other", **measured(0.005, 0.003)),
        row_of("q4", **measured(0.002, 0.005)),
        row_of("q8", measured={"error": "why"}),
    ]
    lines = [
        line.split(" | ")[4:8] for line in accelerators_tables.measured_table(rows).splitlines()[2:]
    ]
    assert lines == [
        ["1.0", "2.0", "", ""],
        ["2.0", "3.0", "", ""],
        ["5.0", "3.0", "+3.0", "+0.0"],
        ["2.0", "5.0", "+1.0", "+3.0"],
        ["not measured: why", "", "", ""],
    ]


def test_an_accelerator_without_a_description_is_refused(monkeypatch):
    assert accelerators.at_hand() is None  # CPUs
    other = SimpleNamespace(platform="gpu", device_kind="GeForce 256")
    monkeypatch.setattr(jax, "local_devices", lambda: [other])
    with pytest.raises(ValueError, match="got GeForce 256, need one of h100"):
        accelerators.at_hand()
    monkeypatch.setattr(jax, "local_devices", lambda: 2 * [other])
    other.device_kind = "NVIDIA H200"
    assert accelerators.at_hand() == ("h200", 2)


def test_the_picture_has_a_panel_where_methods_are_compared(monkeypatch, tmp_path):
    panels = []
    draw_panel = lambda axes, rows: panels.append([row["method"] for row in rows])
    monkeypatch.setattr(accelerators_tables, "_panel", draw_panel)
    large = {"parameters": accelerators_tables.DRAWN_FROM}
    rows = [program_of(method, 30, 1500, **large) for method in ("dense", "q4", "slamb")]
    rows.append(program_of("dense", 30, 1500, **large, mesh="64"))
    accelerators_tables.draw(rows, tmp_path / "picture.svg")
    assert panels == [["dense", "q4"]]  # slamb has no curve, and the dense step alone no panel
    assert (tmp_path / "picture.svg").exists()
