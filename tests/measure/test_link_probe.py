"""What a link costs, measured by collectives of two devices of one process."""

import jax
import pytest

from jaxcomp import planner, report
from jaxcomp.measure import link_probe
from tests.helpers.replicas import mesh_of

AXIS = "replica"


def test_a_larger_message_never_takes_less():
    cost = link_probe.cost_of([(1e3, 5e-3), (4e3, 2e-3), (16e3, 3e-3), (64e3, 9e-3)])
    assert cost == planner.Cost((1e3, 4e3, 16e3, 64e3), (2e-3, 2e-3, 3e-3, 9e-3))


def test_a_link_is_measured_by_three_collectives():
    link = link_probe.measure_link(mesh_of(2), AXIS, sizes=(2**10, 2**12), repeats=1)
    assert set(link) == {"all-reduce", "all-gather", "all-to-all"}
    for cost in link.values():
        assert cost.sent_bytes == (2**10, 2**12) and cost.seconds[0] > 0


@pytest.mark.parametrize("make", link_probe.COLLECTIVES.values(), ids=link_probe.COLLECTIVES)
def test_a_sweep_sends_the_bytes_it_is_asked_for(make):
    mesh = mesh_of(3)
    program, x = link_probe.collective(make, 2400, mesh, AXIS)
    (row,) = report.collectives(program, mesh)
    assert row.sent_bytes == 2400
    jax.block_until_ready(program(x))


def test_no_larger_size_is_tried_when_one_takes_long(monkeypatch):
    asked = []

    def seconds_of(call, repeats, pause):
        asked.append((repeats, pause))
        return 1.0

    monkeypatch.setattr(link_probe, "seconds_of", seconds_of)
    link_probe.measure_link(mesh_of(2), AXIS, sizes=(64, 128, 256, 512), repeats=3, pause=0.5)
    assert asked == [(3, 0.5)] * 2 * 3


@pytest.mark.parametrize(("replicas", "sizes"), [(1, (64, 128)), (2, (64,))])
def test_what_cannot_be_measured_is_refused(replicas, sizes):
    with pytest.raises(ValueError, match="need two or more of both"):
        link_probe.measure_link(mesh_of(replicas), AXIS, sizes=sizes)
