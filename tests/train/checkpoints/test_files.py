"""Which checkpoints of a directory are damaged, and which are only out of reach."""

import errno
import functools
import os
import shlex

import pytest

from train import checks
from train.checkpoints import files


def save(directory, step, content=b"1"):
    part = directory / f"{step}.orbax-checkpoint-tmp"
    for item in ("state", "metadata"):
        (part / item).mkdir(parents=True)
        (part / item / "d").write_bytes(content)
    files.write_checksums(directory)
    part.rename(directory / str(step))


@pytest.mark.parametrize("hidden", ["checksums.json", "state", "metadata"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(tmp_path, monkeypatch, hidden):
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert files.intact(tmp_path) == tmp_path / "20"

    def guarded(real, path):
        if str(path) == str(tmp_path / "20" / hidden):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    for module, name in (checks, "open_file"), (os, "scandir"):
        monkeypatch.setattr(module, name, functools.partial(guarded, getattr(module, name)))
    for look in files.intact, files.pass_over_damaged:
        with pytest.raises(PermissionError):
            look(tmp_path)
    assert files.steps(tmp_path) == [10, 20]


def test_harm_to_the_first_bytes_of_a_large_file_is_noticed(tmp_path):
    save(tmp_path, 20, bytes(2**24 + 1))  # a file is summed up in pieces of 16 MiB
    assert files.intact(tmp_path) == tmp_path / "20"
    with (tmp_path / "20" / "state" / "d").open("r+b") as file:
        file.write(b"1")
    with pytest.raises(ValueError, match="the bytes of state/d have changed"):
        files.intact(tmp_path)


def test_the_command_that_removes_a_damaged_checkpoint_removes_nothing_else(tmp_path):
    directory = tmp_path / "my runs"
    save(directory, 10)
    save(directory, 20)
    (directory / "20" / "state" / "d").unlink()
    with pytest.raises(ValueError, match=r"state/d is missing. Step 10 is good; .*: rm") as damage:
        files.intact(directory)
    command = str(damage.value).partition("resume from it: ")[2]
    assert shlex.split(command) == ["rm", "-r", str(directory / "20")]
