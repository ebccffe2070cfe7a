"""Rows for other programs: TensorBoard, and Weights & Biases with a stand-in of its three calls."""

import errno
import math
import os
import re
import sys
import types

import jax.numpy as jnp
import pytest

from train.output import trackers


def test_tensorboard_gets_the_numbers_of_a_row(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with trackers.tensorboard(tmp_path, step=4) as write:
        write({"step": 5, "loss": jnp.float32(0.5), "val_loss": math.nan, "sent_bytes": 2**40})
    (file,) = tmp_path.iterdir()
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events_of(file.read_bytes(), Event)
        for value in event.summary.value
    ]
    assert scalars == [(5, "loss", 0.5), (5, "sent_bytes", 2.0**40)]


def test_tensorboard_on_a_full_disk_is_an_error(tmp_path, monkeypatch):
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    folder = tmp_path / "events"

    def flush():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = types.SimpleNamespace(write=lambda content: None, flush=flush)
    monkeypatch.setattr(record_writer, "open_file", lambda path: full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{folder}'")):
        with trackers.tensorboard(folder, step=0) as write:
            for step in range(100):
                write({"step": step, "loss": 1.0})


def events_of(content, event):
    """Reads TFRecord: length u64, its checksum u32, the record, its checksum u32."""
    while content:
        size = int.from_bytes(content[:8], "little")
        yield event.FromString(content[12 : 12 + size])
        content = content[16 + size :]


@pytest.mark.parametrize(
    ("extra", "opened"),
    [
        ("tensorboard", lambda folder: trackers.tensorboard(folder, step=0)),
        ("wandb", lambda folder: trackers.wandb(folder, {}, step=0)),
    ],
)
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, extra, opened):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"pip install -e '\.\[{extra}\]'"):
        opened(tmp_path).__enter__()


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, which is too large for the tests: init, log and finish."""
    calls = []

    class Run:
        id = "abc123"

        def log(self, values, step):
            calls.append(("log", values, step))

        def finish(self):
            calls.append(("finish",))

    def init(**settings):
        calls.append(("init", settings))
        return Run()

    names = "UsageError", "CommError"
    errors = types.SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
    module = types.SimpleNamespace(init=init, errors=errors, __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_weights_and_biases_gets_the_numbers_of_a_row_and_an_end(tmp_path, wandb, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tmp_path / "run").mkdir()
    with pytest.raises(OSError), trackers.wandb(tmp_path / "run", {"steps": 9}, step=0) as log:
        log({"step": 5, "loss": jnp.float32(0.5), "val_loss": math.nan, "note": "a"})
        raise OSError("a full disk")
    (_, settings), *rest = wandb
    assert settings.pop("dir") == str(tmp_path / "run")
    assert settings == {
        **{"project": "jaxcomp", "name": "run", "config": {"steps": 9}},
        **{"id": None, "resume": "allow"},
    }
    assert rest == [("log", {"loss": 0.5}, 5), ("finish",)]


def test_a_disk_that_is_full_at_the_end_hides_no_error_and_is_named(tmp_path, wandb, monkeypatch):
    def finish():
        raise OSError(errno.ENOSPC, "No space left on device")

    run = sys.modules["wandb"].init(dir=str(tmp_path))
    run.finish = finish
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **settings: run)
    with pytest.raises(OSError, match="no space for a checkpoint"):
        with trackers.wandb(tmp_path, {}, step=0):
            raise OSError(errno.ENOSPC, "no space for a checkpoint")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/wandb'"):
        with trackers.wandb(tmp_path, {}, step=0):
            pass


def test_a_resumed_run_goes_on_there_and_a_new_one_begins(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for step in (0, 4, 0):
        with trackers.wandb(tmp_path, {}, step=step):
            pass
    settings = [call[1] for call in wandb if call[0] == "init"]
    assert [call["id"] for call in settings] == [None, "abc123", None]
    assert {call["project"] for call in settings} == {"mine"}


@pytest.mark.parametrize(("name", "kind"), [("UsageError", ValueError), ("CommError", OSError)])
def test_a_service_that_takes_nothing_is_told(tmp_path, wandb, monkeypatch, name, kind):
    def init(**settings):
        raise getattr(module.errors, name)("No API key configured. Use `wandb login`.")

    module = sys.modules["wandb"]
    monkeypatch.setattr(module, "init", init)
    with pytest.raises(kind, match="Use `wandb login`; or write WANDB_MODE=offline"):
        trackers.wandb(tmp_path, {}, step=0).__enter__()
