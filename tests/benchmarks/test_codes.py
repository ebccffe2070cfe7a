"""The benchmark of updates: which steps it times, and what it makes of their seconds."""

import os
import subprocess
import sys

import pytest

from benchmarks import codes
from benchmarks.worker import UPDATES, config_of
from tests.benchmarks.test_accelerators import needs_h100

MODEL = {"layers": 1, "width": 16, "heads": 2, "context": 8}


def test_every_kind_of_step_of_a_method_is_timed_once():
    kinds = lambda name: codes.kinds(config_of(UPDATES[name], MODEL, 1, 1))
    assert kinds("dense float32") == {"all": None}
    assert kinds("SLAMB") == {"momentum": 0, "momentum and synchronize": 7}
    assert kinds("1-bit LAMB") == {"variance": 0, "synchronize": 2}
    assert kinds("0/1 Adam, every 4th")["nothing"] == 2


def test_an_update_is_compared_with_that_of_its_own_family():
    assert {name: codes.dense_of(name) for name in ("1-bit LAMB", "SLAMB", "4 bits")} == {
        "1-bit LAMB": "LAMB",
        "SLAMB": "LAMB",
        "4 bits": "dense float32",
    }
    assert {codes.dense_of(name) for name in codes.TIMED} <= set(codes.TIMED)


def test_ratios_are_medians_over_turns_and_not_of_medians():
    row = codes.update_row(
        "SLAMB", "momentum", [(1.0, 2.0, 8.0), (4.0, 4.0, 4.0), (10.0, 15.0, 5.0)]
    )
    # Quotients of the updates 2, 1 and 1.5; of whole steps 10/9, 1 and 20/15.
    assert row["ratio"] == 1.5 and row["ratio_range"] == [1.0, 2.0]
    assert row["step_ratio"] == pytest.approx(10 / 9)
    assert row["share_of_step"] == 0.5
    line = codes.table([row]).splitlines()[2]
    assert line == "| SLAMB | momentum | LAMB | 1.50 | 1.11 | 50% |"


def test_the_least_bytes_are_those_of_one_read_and_one_write():
    numel = 2**16
    payload = numel + 2 * numel // 128  # a byte a value, and a bfloat16 scale a block
    assert codes.least_bytes(codes.quantize(8), None, numel) == (
        4 * numel + payload,
        4 * numel + payload,
    )
    few = codes.random_k(0.25)
    assert codes.least_bytes(few, few, numel) == (2 * numel, 5 * numel)
    row = {"code": "a", "numel": 10, "ratio": 1.4, "target": 1.3}
    row |= {"encode_kernels": 4, "encode_bytes": 90, "encode_least_bytes": 50}
    row |= {"decode_kernels": 1, "decode_bytes": 50, "decode_least_bytes": 50}
    line = "| `a` | 10.00 | 14.00 | 4 + 1 | 1.80 | 1.00 | **1.40** |"
    assert codes.moved_table([row]).splitlines()[2] == line


@needs_h100
def test_codes_are_compiled_for_an_h100_where_no_driver_is():
    # As a person types it: the compiler's plug-in looks for a driver.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "benchmarks.codes", "moved", "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) == len(codes.MOVED)
