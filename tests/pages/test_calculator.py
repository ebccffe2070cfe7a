"""The calculator of the pages predicts what the planner does."""

import json
import math
import shutil
import subprocess

import pytest

from jaxcomp import planner
from tests.helpers.snippets import ROOT

SCRIPT = ROOT / "docs" / "_static" / "calculator.js"
SETTINGS = [
    {"replicas": r, "parameters": n, "rate": rate, "latency": late, "compute": s, "codecRate": 2e9}
    for r, n, rate, late, s in (
        (4, 124e6, 1e9, 1e-3, 20.0),
        (2, 1e6, 25e9, 1e-5, 0.3),
        (64, 7e9, 1e8, 0.05, 20.0),
        (3, 5e6, 5e8, 0.5, 0.0),
    )
]
PROGRAM = f"""
const {{ METHODS, plan }} = require({json.dumps(str(SCRIPT))});
const settings = {json.dumps(SETTINGS)}, short = settings.map((s) => plan({{ ...s, steps: 2000 }}));
console.log(JSON.stringify([METHODS, settings.map(plan), short]));
"""


def method_of(row, settings):
    """A row of the script's table, as the planner has it."""
    r, n, times = settings["replicas"], settings["parameters"], row["times"]
    half = n * row["bits"] / 8 * (r - 1) / r
    if row.get("exact"):
        return planner.Method(row["name"], (planner.Message("all-reduce", 2 * half),))
    halves = [planner.Message(op, half, times) for op in ("all-to-all", "all-gather")]
    codec = times * 4 * n / settings["codecRate"]
    return planner.Method(row["name"], tuple(halves), codec, changes="something")


@pytest.mark.skipif(
    shutil.which("node") is None, reason="the script runs in node, which this machine lacks"
)
def test_the_calculator_predicts_what_the_planner_does():
    done = subprocess.run(["node", "-e", PROGRAM], capture_output=True, text=True, check=True)
    methods, plans, short = json.loads(done.stdout)
    local = methods[-1]["name"]
    assert local in {found["best"] for found in plans}
    assert local not in {found["best"] for found in short}
    assert all(method["loss"] for method in methods[1:])
    for settings, found in zip(SETTINGS, plans, strict=True):
        link = planner.uniform_link(settings["rate"], settings["latency"], settings["replicas"])
        wanted = planner.plan(
            [method_of(row, settings) for row in methods], link, settings["compute"]
        )
        assert found["best"] == wanted.recommended.method.name
        for mine, theirs in zip(found["rows"], wanted.rows, strict=True):
            assert math.isclose(mine["step"], theirs.step_seconds, rel_tol=1e-9)
            assert math.isclose(mine["network"], theirs.network_seconds, rel_tol=1e-9)
            assert math.isclose(mine["sent"], theirs.sent_bytes, rel_tol=1e-9)
    assert len({found["best"] for found in plans}) > 2
