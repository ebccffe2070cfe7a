"""Runs on hosts of several devices: as without them where codes are exact, and they go on."""

import dataclasses
import re

import numpy as np
import pytest

from jaxcomp import planner
from tests.helpers.tiny_runs import shared_tasks, tiny_config
from train import examples, loop, report
from train.config import Optimizer
from train.models.decoder import DecoderConfig
from train.plan import planning
from train.plan.arguments import Options
from train.task import make_task

pytestmark = pytest.mark.usefixtures("undrawn")

EXACT = "chain(compressed_mean(identity(), axis_name), adam(learning_rate, eps=1e-4))"
LOSSY = "chain(compressed_mean(quantize(4), axis_name), adam(learning_rate))"
DRIFTS = "cocktail_sgd(adam(learning_rate), axis_name, compressor=quantize(8))"


@pytest.fixture
def config_of(tmp_path):
    """Makes configs of tiny runs; 17 bytes of context do not divide evenly."""
    model = DecoderConfig(layers=2, width=16, heads=2, context=17, scan=True)
    fixed = {"model": model, "batch": 12, "log_every": 1, "checkpoint_every": 2}

    def make(update, replicas=4, fast=2, **changes):
        return tiny_config(tmp_path, update, replicas=replicas, fast=fast, **(fixed | changes))

    return make


def losses(config):
    return [row["loss"] for row in loop.run(config)[1:]]


@pytest.fixture
def compile_once(monkeypatch):
    """Runs that differ in their names share a program."""
    monkeypatch.setattr(loop, "make_task", shared_tasks(name="any", fast=2))


def test_exact_codes_train_as_on_one_device_a_host(config_of):
    one = losses(config_of(EXACT, 2, 1, name="one"))
    np.testing.assert_allclose(losses(config_of(EXACT, name="two")), one, rtol=1e-5)


def test_a_run_goes_on_bit_for_bit_and_on_more_hosts_but_not_on_other_hosts(
    config_of, compile_once
):
    config = config_of(DRIFTS, overlap=True, optimizer=Optimizer(DRIFTS, 1e-2, 1, "constant"))
    whole = losses(dataclasses.replace(config, name="whole"))
    assert losses(dataclasses.replace(config, steps=2)) == whole[:2]
    assert losses(config) == whole
    with pytest.raises(ValueError, match=r"trained with fast=2.* but fast=4; write --fast 2"):
        loop.run(dataclasses.replace(config, fast=4))
    more = losses(dataclasses.replace(config, replicas=6, steps=6))
    assert more[:4] == whole and np.all(np.isfinite(more))


def test_report_and_plan_count_what_goes_through_a_hosts_link(config_of, monkeypatch):
    monkeypatch.setattr(planning, "METHODS", {planning.DENSE: planning.METHODS[planning.DENSE]})
    planned, sent, factors = {}, {}, []
    for fast in (1, 2):
        config = config_of(LOSSY, 2 * fast, fast)
        task = make_task(config, read=examples.none)
        sent[fast], said = fast * task.sent_bytes, report.text(task)
        if fast > 1:
            assert f"through the link of {fast} go {sent[fast]:,.0f}," in said
            assert "bytes a step across the slow axis of 2 x 2 replicas," in said
        else:
            assert "through the link" not in said
        factors.append(float(re.search(r"([\d.]+)x fewer than a float32 ring", said)[1]))
        options = Options(link_rate=1e6, link_latency=1e-3, compute_seconds=0.01, codec_rate=1e9)
        plan, link = planning.make_plan(config, options)
        planned[fast] = {row.method.name: row for row in plan.rows}
        assert planned[fast][planning.OWN].sent_bytes == pytest.approx(sent[fast])
        assert link == planner.uniform_link(1e6, 1e-3, 2)
        # Each device codes its share.
        codec = planned[fast][planning.OWN].method.codec_seconds
        assert codec == pytest.approx(4 * planning.num_elements(config) / 1e9 / fast)
    # Two messages of half the size: no more than their padding comes on top.
    assert sent[1] <= sent[2] < 1.05 * sent[1]
    assert factors[1] == pytest.approx(factors[0], rel=0.05) and factors[0] > 2


def test_what_a_plan_measures_it_measures_of_shares(config_of, monkeypatch):
    short = ((1024, 4096), 1, 0.25, 0.0)
    monkeypatch.setattr(planning.link_probe.measure_link, "__defaults__", short)
    monkeypatch.setattr(planning, "METHODS", {planning.DENSE: planning.METHODS[planning.DENSE]})
    monkeypatch.setattr(planning, "REPEATS", 1)
    plan, link = planning.make_plan(config_of(LOSSY), Options(measure=True))
    assert plan.compute_seconds > 0 and len(plan.rows) == 2
    # Of two devices each: twice the bytes of the sizes asked for.
    assert link["all-reduce"].sent_bytes == (2048, 8192)
