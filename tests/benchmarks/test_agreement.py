"""How a device's results are compared with the CPU's."""

import numpy as np
import pytest

from benchmarks.studies import agreement
from benchmarks.studies.agreement import Result
from jaxcomp.compressors.sign import sign


def test_changed_gradients_differ_in_their_last_bits_everywhere():
    for one, other in zip(
        agreement.gradients(2), agreement.gradients(2, changed=True), strict=True
    ):
        for name, x in one.items():
            assert np.all(x != other[name])
            np.testing.assert_allclose(x, other[name], rtol=1.2e-7)


def test_a_mesh_of_one_and_simulated_replicas_take_the_same_dense_steps(monkeypatch):
    monkeypatch.setattr(agreement, "SHAPES", {"matrix": (40, 32), "bias": (5,)})
    alone = agreement.trained("dense Adam", 1)
    assert alone.shape == (40 * 32 + 5,)
    # Adam's first steps have its rate: two replicas with the gradients of one take the same.
    same = lambda replicas, changed: [
        {name: np.repeat(x, replicas, 0) for name, x in step.items()} for step in once
    ]
    once = agreement.gradients(1)
    monkeypatch.setattr(agreement, "gradients", same)
    np.testing.assert_allclose(agreement.trained("dense Adam", 2), alone, rtol=1e-5)
    assert np.all(np.abs(alone) < 1.1 * agreement.STEPS * agreement.RATE)


def test_a_code_has_a_payload_and_what_it_decodes_to(monkeypatch):
    monkeypatch.setattr(agreement, "NUMEL", 256)
    payload, decoded = agreement.coded(sign(block=128))
    assert [part.size for part in payload] == [32, 2]
    assert np.unique(np.abs(decoded)).size == 2


def test_the_rows_have_distances_and_the_share_of_a_payload_that_differs():
    ones, bits = np.ones(4), np.array([1, 2, 3], np.uint8)
    here = Result({"code": "c"}, [bits, ones], np.array([2.0, 0, 0, 0]))
    cpu = Result({"code": "c"}, [bits + np.array([0, 0, 1], np.uint8), ones], 2 * ones)
    row = agreement.compared(here, cpu, cpu)
    assert row == {"code": "c", "distance": pytest.approx(12**0.5 / 4), "differing": 1 / 7}
    told = {"method": "m", "replicas": 4}
    values = [Result(told, [], x) for x in (1.5 * ones, ones, 0.75 * ones)]
    other = agreement.compared(*values)
    assert other == told | {"distance": 0.5, "last_bits": 0.25}
    lines = agreement.table([row, other]).splitlines()[2:]
    assert lines == ["| `c` |  | 9e-01 |  | 14.29% |", "| m | 4 | 5e-01 | 2e-01 |  |"]
