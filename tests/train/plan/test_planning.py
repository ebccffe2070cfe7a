"""`python -m train CONFIG --plan`: what is given, what is measured, and what is said of it."""

import contextlib
import dataclasses
import re

import jax
import pytest

from jaxcomp import planner
from jaxcomp.compressors.policies import path_of
from tests.helpers.launching import write_config
from train import examples, program, report, task
from train.config import run as configs
from train.output import progress
from train.placement import build, devices
from train.plan import arguments, planning
from train.plan.arguments import Options

DENSE = planning.DENSE
GIVEN = ["--link-rate", "1e6", "--link-latency", "1e-3", "--compute-seconds", "0.01"]
GIVEN += ["--codec-rate", "1e9"]


@pytest.fixture(autouse=True)
def devices_of_the_tests(monkeypatch):
    """They are there already."""
    monkeypatch.setattr(devices, "start", lambda replicas, num_processes=1: None)


@pytest.fixture
def one_method(monkeypatch):
    """Compiling every method takes a minute; what is tested here is the same for one."""
    monkeypatch.setattr(planning, "METHODS", {DENSE: planning.METHODS[DENSE]})


def test_islands_send_what_diloco_sends_but_whole_and_rarely():
    half = [planner.Message(op, 3e6, 1 / 16) for op in ("all-to-all", "all-gather")]
    diloco = planner.Method(planning.DILOCO, tuple(half), codec_seconds=0.1)
    made = planning.islands_of(diloco, 4)
    assert made.messages == planner.over_bucket(4e6, 4, 100).messages
    assert made.overlaps == 10 and made.codec_seconds == pytest.approx(0.1 * 16 / 100)


def test_a_plan_of_given_figures_measures_nothing(one_method, tmp_path, capsys, monkeypatch):
    def refuse(*args):
        raise AssertionError("something was measured")

    for name in ("update_timer", "gradient_timer"):
        monkeypatch.setattr(planning, name, refuse)
    compiled, count = [], planning.counts.rounds
    monkeypatch.setattr(
        planning.counts, "rounds", lambda tx, *few: compiled.append(tx) or count(tx, *few)
    )
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(planning.link_probe, "measure_link", refuse)
    config = configs.load(str(write_config(tmp_path)))
    program.main([str(tmp_path / "tiny.py"), "--plan", *GIVEN])
    out, err = capsys.readouterr()
    assert err == "plan: 50%\nplan: 100%\n" and len(compiled) == 2  # each method once
    lines = out.splitlines()
    rows = {re.split(r"\s{2,}", line)[0]: line for line in lines}
    assert list(rows)[:3] == ["method", DENSE, planning.OWN]
    assert rows[DENSE].endswith("nothing") and "MiB" in rows[DENSE]
    # At 1 Mbit/s the network is all that counts.
    assert lines[-4].startswith("this config: ") and "times as fast" in lines[-4]
    assert lines[-3] == "all-reduce of 1 kB 10.00 ms, of 100 kB 802.00 ms, of 10 MB 80,002.00 ms"
    assert not (tmp_path / "runs").exists()
    said = report.text(task.make_task(config, read=examples.none))
    sent = re.search(r"one replica sends ([\d,]+) bytes", said)[1]
    assert f"  {sent}  " in rows[planning.OWN]


@pytest.mark.parametrize("name", [DENSE, "SparseLoCo"])
def test_a_program_that_is_only_read_is_compiled_quickly_to_the_same_messages(
    name, tmp_path, optimized, monkeypatch
):
    config = configs.load(str(write_config(tmp_path)))
    mesh = planning._mesh(config, Options(measure=True))
    run = planning.with_update(config, planning.METHODS[name][0])
    quick = planning.make_method(name, run, mesh, "")
    monkeypatch.setattr(planning, "_UNOPTIMIZED", {})
    whole = planning.make_method(name, run, mesh, "")
    assert quick.messages == whole.messages
    assert quick.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-2)


def test_everything_is_measured_on_two_devices(one_method, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "REPEATS", 1)
    short = ((1024, 4096), 1, 0.25, 0.0)
    monkeypatch.setattr(planning.link_probe.measure_link, "__defaults__", short)
    shown = []

    @contextlib.contextmanager
    def counted(what, total):
        yield shown.append
        assert sum(shown) == total and callable(timers.pop())  # timed while it is shown

    timers, update_timer = [], planning.update_timer
    keep = lambda *args: timers.append(update_timer(*args)) or timers[-1]
    monkeypatch.setattr(planning, "update_timer", keep)
    monkeypatch.setattr(planning.progress, "counted", counted)
    program.main([str(write_config(tmp_path)), "--plan", "--measure"])
    said = capsys.readouterr().out
    alone = float(re.search(r"without an exchange a step takes ([\d.]+) ms", said)[1])
    steps = re.findall(r"^\S.*?  +([\d,.]+) ms  +[\d,.]+ ms", said, re.MULTILINE)
    assert len(steps) == 2 and alone > 0
    assert all(float(step.replace(",", "")) >= alone for step in steps)
    assert re.search(r"^all-reduce of 1 kB [\d.]+ ms, of 100 kB", said, re.MULTILINE)


def test_codecs_of_skipped_rounds_cost_their_share(tmp_path):
    config = configs.load(str(write_config(tmp_path)), ["--steps", "8"])
    size = 4 * planning.num_elements(config)
    assert planning.codec_seconds(config, 1e6) == pytest.approx(size / 1e6)
    update = (
        "zero_one_adam(learning_rate, axis_name, sync_at=schedules.every(4, steps, after=2), "
        "variance_at=schedules.until(2))"
    )
    # Of 8 steps the first two exchange, the fourth and the last.
    seldom = planning.with_update(config, update)
    assert planning.codec_seconds(seldom, 1e6) == pytest.approx(size / 1e6 / 2)


def test_codecs_do_not_see_frozen_parameters(tmp_path):
    config = configs.load(str(write_config(tmp_path)), ["--steps", "8"])
    frozen = dataclasses.replace(config, trainable="embed/")
    leaves = jax.tree.leaves_with_path(build.param_shapes(config))
    numel = sum(x.size for key, x in leaves if "embed/" in path_of(key))
    assert planning.codec_seconds(frozen, 1e6) == pytest.approx(4 * numel / 1e6)
    assert 0 < numel < planning.num_elements(config)


@pytest.mark.parametrize("name", [planning.DILOCO, "SparseLoCo"])
def test_a_short_run_is_planned_with_a_whole_round(name, tmp_path):
    config = configs.load(str(write_config(tmp_path)), ["--steps", "3"])
    runs, _ = planning.runs_of(config)
    rounds = planning.rounds_of(runs[name])
    assert rounds and all(count >= 1 for count in rounds.values())
    assert runs[planning.OWN] is config


def test_work_alone_is_scaled_to_that_among_replicas():
    messages = planner.Message("all-to-all", 1.0), planner.Message("all-gather", 1.0)
    method = planner.Method("two-shot", messages)
    assert planning.codec(method, 0.6, 2) == pytest.approx(0.5)
    assert planning.codec(method, -0.6, 2) == 0.0


def test_what_overlaps_is_planned_beside_the_same_method_that_does_not(tmp_path):
    update = planning.METHODS["CocktailSGD"][0]
    config = planning.with_update(configs.load(str(write_config(tmp_path))), update)
    assert planning.OWN not in planning.runs_of(config)[0]
    runs, changes = planning.runs_of(dataclasses.replace(config, overlap=True))
    assert runs[planning.OWN].overlap and not runs["CocktailSGD"].overlap
    assert set(changes) == set(runs)


def test_options_are_taken_out_of_the_overrides():
    args = ["x.py", "--plan", "--link-rate", "500e6", "--steps", "3", "--measure"]
    options, rest = arguments.parse(args)
    assert options == Options(measure=True, link_rate=5e8)
    assert rest == ["x.py", "--steps", "3"]
    assert arguments.parse(["x.py", "--steps", "3"]) == (None, ["x.py", "--steps", "3"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--measure"], "--measure is for a plan; write --plan as well"),
        (["--link-latency", "1e-3"], "--link-latency is for a plan"),
        (["--plan", "--report"], "--plan and --report"),
        (["--plan"], "a plan needs --link-rate, .*--codec-rate; write them, or --measure"),
        (["--plan", *GIVEN[:2]], "needs --link-latency, --compute-seconds, --codec-rate; write"),
        (["--plan", "--measure", *GIVEN[:2]], "a link has a rate and a latency"),
        (["--plan", *GIVEN[:4]], "a plan needs --compute-seconds, --codec-rate; write them"),
        (["--plan", "--measure", "--replicas", "1"], "one replica has nobody to send to"),
        (["--plan", "--measure", "--qsdp", "qsdp(axis_name)"], "not for qsdp="),
        (["--plan", "--link-rate", "-1"], "'-1' must be a positive number, like 500e6"),
        (["--plan", "--link-rate", "fast"], "'fast' must be a positive number, like 500e6"),
    ],
)
def test_what_cannot_be_planned_is_explained(args, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        program.main([str(write_config(tmp_path)), *args])
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
