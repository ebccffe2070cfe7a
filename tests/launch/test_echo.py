"""The first process's output on the launcher's terminal: text, and a bar made of progress."""

import io
import sys

from jaxcomp.launch import echo


class Terminal(io.TextIOWrapper):
    """A stream that says whether it is a terminal, and keeps what is written."""

    def __init__(self, is_terminal):
        super().__init__(io.BytesIO(), "utf-8", write_through=True)
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def text(self):
        return self.buffer.getvalue().decode()


LINES = (
    "tiny: step 20/100, loss 2.500, 0.010 s/step, sends 1.2 MB/s, 00:08 left\n",
    "tiny: step 60/100, loss 2.250, 0.010 s/step, sends 1.2 MB/s, 00:04 left\n",
)


TEXTS = ("process 0 of 2\nno", f"te\n{LINES[0]}", LINES[1], "the end")


def shown(tmp_path, monkeypatch, is_terminal, texts=TEXTS, both=None):
    """What standard output and error show of a log that grows."""
    out, error = both or Terminal(is_terminal), both or Terminal(is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    log = tmp_path / "process_0.log"
    with open(log, "wb") as file:
        file.write(b"an earlier start\n")
        file.flush()
        with echo.echo(log, file.tell()) as copy:
            for text in texts:
                file.write(text.encode())
                file.flush()
                copy()
    return out.text(), error.text()


def test_a_terminal_shows_one_bar_and_all_other_text(tmp_path, monkeypatch):
    out, error = shown(tmp_path, monkeypatch, True)
    assert out == "process 0 of 2\nnote\nthe end"
    assert "tiny:  60%" in error and "60/100" in error
    assert "loss 2.250, 0.010 s/step, sends 1.2 MB/s, 00:04 left]" in error
    assert "\n" not in error.rstrip("\n")  # one bar, drawn anew in its place


def test_the_bar_of_a_run_that_is_done_stays_above_its_summary(tmp_path, monkeypatch):
    done = "tiny: step 100/100, loss 2.000, 0.010 s/step, 00:00 left\n"
    one = Terminal(True)
    _, error = shown(tmp_path, monkeypatch, True, (LINES[0] + done, "sent 3 MB\n"), both=one)
    bar, _, rest = error.rpartition("00:00 left]")
    assert "100%" in bar and rest.strip("\r\n ") == "sent 3 MB"


def test_a_file_gets_the_text_as_it_is(tmp_path, monkeypatch):
    out, error = shown(tmp_path, monkeypatch, False)
    assert out == f"process 0 of 2\nnote\n{LINES[0]}{LINES[1]}the end"
    assert error == ""
