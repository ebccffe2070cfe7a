"""The page of results: the figures of its sentences are those of the rows in `results/`."""

import re
import statistics

from benchmarks import figures, rows
from benchmarks.studies import fine_tune_network
from tests.helpers.snippets import ROOT

SIZES = {"0.84", "14.3", str(fine_tune_network.NEAR)}  # millions of parameters; what is near


def read(name):
    return rows.read(rows.RESULTS / f"{name}.json")


def compared(file, task, steps, method, dense="dense Adam"):
    """Losses of a method and of dense training, their gap, and the factor of bytes saved."""
    found = {each.method: each for each in figures.summarize(read(file), task, steps)}
    ours, theirs = figures.mean(found[method]), figures.mean(found[dense])
    ratio = found[dense].sent_bytes_per_step / found[method].sent_bytes_per_step
    for digits in (2, 3):
        yield from (f"{x:.{digits}f}" for x in (ours, theirs, ours - theirs))
    yield from (f"{ratio:.0f}", f"{ratio:.1f}")


def losses():
    yield from compared("convergence", "nano", 1000, "CocktailSGD, no delay, 10x")
    for steps in (300, 3000):
        yield from compared("convergence", "nano_fine_tune", steps, "CocktailSGD, 1 bit of 1/8")
    yield from compared("convergence", "nano_bert", 3000, "0/1 Adam, warm-up, kappa 256")
    yield from compared("convergence", "digits", 400, "SLAMB", "LAMB")
    yield from compared("pico", "pico", 8000, "DiLoCo, Muon, 4 bits", "dense Muon")
    yield from compared("micro", "micro", 2000, "MuLoCo", "dense Muon")


def times():
    yield from re.findall(r"[\d.]+", fine_tune_network.finding(read("fine_tune_network")))
    cases = read("planner")
    errors = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in cases]
    yield f"{100 * statistics.median(errors):.1f}"
    yield from (f"{row['ratio']:.1f}" for row in read("codec") if row["name"] in CODES)
    yield from (f"{abs(row['gradients']):.1f}" for row in read("memory") if row["replicas"] == 4)


CODES = "sign()", "quantize(4)"


def test_each_figure_of_the_page_is_that_of_a_row():
    text = (ROOT / "docs" / "results.md").read_text()
    prose = re.sub(r"^( {4}|\|).*$|\]\(.*?\)|`.*?`", "", text, flags=re.MULTILINE)
    found = set(re.findall(r"\d+\.\d+|\d+(?= times)", prose))
    assert len(found) > 15 and found - {*losses(), *times()} - SIZES == set()
