"""How far a run is: lines, a bar, and lines that become one."""

import pytest

from jaxcomp.launch import progress as lines
from train.output import progress

FIRST = {"step": 50, "sent_bytes": 50_000_000}


def row(step, loss, seconds):
    """A row of a run that sends 1 MB a step."""
    return {"step": step, "loss": loss, "step_seconds": seconds, "sent_bytes": step * 1_000_000}


def test_progress_prints_plain_lines_where_there_is_no_terminal(capsys):
    with progress.progress("small", FIRST, 100) as show:
        show(row(60, 2.5, 0.5))
        show(row(100, 1.25, 0.25))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        "small: step 100/100, loss 1.250, 0.250 s/step, sends 4 MB/s, 00:00 left"
    )


def test_plain_progress_comes_every_ten_seconds_with_the_time_left(capsys, monkeypatch):
    clock = iter([0, 4, 11, 12, 22])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.progress("small", FIRST, 150) as show:
        for step in (51, 61, 62, 72):
            show(row(step, 2.0, 0.5))
    assert capsys.readouterr().err.splitlines() == [
        "small: step 61/150, loss 2.000, 0.500 s/step, sends 2 MB/s, 01:29 left",
        "small: step 72/150, loss 2.000, 0.500 s/step, sends 2 MB/s, 01:18 left",
    ]


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.progress("small", FIRST, 100) as show:
        show(row(100, 1.25, 0.5))
    text = capsys.readouterr().err
    assert "50/100" in text and "small: 100%" in text
    assert (
        text.rstrip().endswith(", loss 1.250, 0.500 s/step, sends 2 MB/s]") and "step/s" not in text
    )


def test_nothing_is_said_of_bytes_where_none_are_sent(capsys):
    with progress.progress("small", {"step": 0, "sent_bytes": 0}, 10) as show:
        show(row(10, 2.0, 0.5) | {"sent_bytes": 0})
    assert "loss 2.000, 0.500 s/step, 00:00 left" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["small", "a: b/c, 1"])
def test_a_line_is_read_as_it_was_printed(name):
    line = lines.Line(name, 3, 20, "loss nan, 0.500 s/step, sends 2 MB/s", "1:02:03")
    assert lines.read(f"{line}\n") == line
    for other in ("", "note: a step 3/4", "loss 3", f"  {name}: step 3 of 4"):
        assert lines.read(other) is None


def test_bytes_a_second_are_those_since_the_last_row(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 0)
    with progress.progress("small", FIRST, 100) as show:
        show(row(60, 2.0, 0.5))
        show(row(70, 2.0, 0.5) | {"sent_bytes": 61_000_000})
    first, second = capsys.readouterr().err.splitlines()
    assert "sends 2 MB/s" in first and "sends 200 kB/s" in second
