"""Which checkpoints of a directory are damaged, and which are only out of reach."""

import errno
import functools
import os

import pytest

from train import checks
from train.checkpoints import files


def save(directory, step):
    part = directory / f"{step}.orbax-checkpoint-tmp"
    for item in ("state", "metadata"):
        (part / item).mkdir(parents=True)
        (part / item / "d").write_bytes(b"1")
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
