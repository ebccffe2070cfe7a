"""Times whole runs over a slow network, including the dense steps at their start.

    sudo python -m benchmarks.studies.whole_run [--json FILE] [--steps 120] [--rates 100mbit]

1-bit Adam and 1-bit LAMB send dense gradients in the first 15% of their steps, as in their authors'
BERT runs. 0/1 Adam skips rounds and learns its variance in the first tenth, from 8-bit gradients:
in twice the share of steps of "few rounds" in benchmarks.convergence. SLAMB averages parameters
five times. Hosts, rates and bytes are those of benchmarks.slow_network.
"""

import argparse
import os
import pathlib
import sys
import tempfile

from benchmarks import network
from benchmarks import rows as rows_file
from benchmarks.slow_network import Team, rows_of
from benchmarks.worker import DENSE, MODELS, UPDATES
from jaxcomp.launch.exits import clean_exits

ONE_BIT, ZERO_ONE, ONE_BIT_LAMB = "1-bit Adam", "0/1 Adam", "1-bit LAMB"
RATES = (network.UNLIMITED, "500mbit", "100mbit")


def updates(steps: int) -> dict[str, str]:
    """The methods, as `optimizer.update` of a config, for runs of some steps."""
    freeze, together = max(1, round(0.15 * steps)), max(1, steps // 10)
    slamb = f"slamb(learning_rate, axis_name, sync_every={max(1, steps // 5)}, "
    return {
        DENSE: UPDATES[DENSE],
        ONE_BIT: f"one_bit_adam(learning_rate, axis_name, freeze_step={freeze})",
        ZERO_ONE: "zero_one_adam(learning_rate, axis_name, "
        f"sync_at=schedules.every(4, {steps}, after={together}), "
        f"variance_at=schedules.growing(4, until={together}), variance_compressor=quantize(8))",
        ONE_BIT_LAMB: f"one_bit_lamb(learning_rate, axis_name, freeze_step={freeze})",
        "SLAMB": f"{slamb}density=0.1)",
        "SLAMB, 8 bits": f"{slamb}compressor=compose(random_k(0.1), quantize(8)))",
    }


def table(rows: list[dict]) -> str:
    """The rows as Markdown: seconds and bytes of the whole run, as ratios to the 1-bit method.

    The Adams are compared with 1-bit Adam, the LAMBs with 1-bit LAMB.
    """
    seconds = lambda row: sum(row["step_seconds"]["all"])
    sent = lambda row: row["nic_bytes"]["sent"] * row["steps"] / 1e6
    found = {(row["rate"], row["method"]): row for row in rows}
    lines = []
    for row in rows:
        base = found.get((row["rate"], ONE_BIT_LAMB if "LAMB" in row["method"] else ONE_BIT))
        time, size = (f"{of(row) / of(base):.2f}" if base else "" for of in (seconds, sent))
        cells = f"{seconds(row):.0f}", time, f"{sent(row):,.0f}", size
        lines.append([row["rate"], row["method"], *cells])
    head = ["rate", "method", "seconds", "of 1 bit's", "MB sent", "of 1 bit's"]
    return rows_file.markdown(head, lines)


def main(args: list[str]) -> None:
    """Runs every method at every rate from its first step, saves after each, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--methods", nargs="+", default=list(updates(1)), choices=updates(1))
    parser.add_argument("--model", default="14M", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=1, help="of one host and step")
    parser.add_argument("--steps", type=int, default=120, help="of a run")
    options = parser.parse_args(args, argparse.Namespace(warmup=0))
    if (reason := network.unavailable()) is not None:
        if os.name == "posix" and os.geteuid():
            raise ValueError(reason)
        print(f"skipped: {reason}")
        return
    specs = {name: {"update": updates(options.steps)[name]} for name in options.methods}
    team = Team([sys.executable, "-m", "benchmarks.worker"], specs, connected=True)
    rows: list[dict] = []
    with network.network(options.hosts) as net, tempfile.TemporaryDirectory() as folder:
        for rate in options.rates:  # new hosts, otherwise a run would go on at the next rate
            for row in rows_of(team, net, [rate], options.model, options, pathlib.Path(folder)):
                rows.append(row)
                if options.json:
                    rows_file.write(options.json, rows)
    print(table(rows))


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
