"""Where the objects of a run lie: a bucket or a folder, opened by its URL through `obstore`."""

import contextlib
import datetime
import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

SCHEMES = {  # and what holds the credentials
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "the right to write there",
    "memory": "",
}
_NO_KEYS = ("169.254.169.254", "metadata.google.internal", "credential", "Account must be")
_PART = 2**24  # bytes of one request of a large object, so that a slow link needs minutes for it
_memories: dict[str, Any] = {}  # `memory://NAME` is one store for the whole process


class Bucket(NamedTuple):
    """The objects below one URL; what a store refuses is an error that says what to do."""

    url: str
    store: Any

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object that is new; False if there is one already."""
        with _named(self.url) as obstore:
            try:
                obstore.put(self.store, path, data, mode="create")
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                return False
        return True

    def upload(self, path: str, pieces: Iterable[Any]) -> None:
        """Writes an object of any size, in parts that are tried again one by one.

        S3 takes 5 GiB in one request. No store creates an object of several parts conditionally:
        its name must be one that nobody else writes.
        """
        with _named(self.url) as obstore:
            parts = {"use_multipart": True, "chunk_size": _PART, "max_concurrency": 4}
            obstore.put(self.store, path, iter(pieces), **parts)

    def get(self, path: str, sizes: range) -> bytes | bytearray | None:
        """The bytes of an object, or None if there is none.

        Raises:
          ValueError: If its size is not one of `sizes`, before it is read.
        """
        with _named(self.url) as obstore:
            try:
                found = obstore.get(self.store, path)
                if (size := found.meta["size"]) not in sizes:
                    raise ValueError(f"has {size} bytes; needs {sizes.start} to {sizes.stop - 1}")
                if size <= _PART:
                    return bytes(found.bytes())
                data = bytearray(size)
                for start in range(0, size, _PART):
                    end = min(start + _PART, size)
                    data[start:end] = obstore.get_range(self.store, path, start=start, end=end)
                return data
            except FileNotFoundError:  # perhaps deleted between two parts
                return None

    def paths(self, folder: str = "") -> list[str]:
        """Where there are objects, below a folder."""
        with _named(self.url) as obstore:
            found = obstore.list(self.store, prefix=folder or None).collect()
            return [meta["path"] for meta in found]

    def delete(self, paths: list[str]) -> None:
        """Deletes objects, many in one request; some may stay if others are not there."""
        with _named(self.url) as obstore, contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, paths)


def opened(url: str, options: dict[str, Any] | None = None) -> Bucket:
    """Opens a bucket or folder, and tries whether it creates objects conditionally.

    Args:
      url: `s3://bucket/run`, `gs://...`, `az://...`, `file:///folder/run` or `memory://run`.
      options: Arguments of `obstore.store.from_url`, such as `endpoint`; keys may come
        from the environment.

    Raises:
      ModuleNotFoundError: Without `obstore`.
      ValueError: For an unknown scheme, or a store without conditional create.
      OSError: If the store refuses, or cannot be reached.
    """
    url = url if isinstance(url, str) else repr(url)  # a Path has no scheme
    scheme, colon, rest = url.partition("://")
    is_relative = scheme == "file" and not rest.startswith("/")
    # A store would drop what follows '?' or '#', and two runs would lie at one place.
    if scheme not in SCHEMES or not rest.strip("/") or is_relative or {*rest} & {*"?#"}:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(
            f"got the URL {url!r}; needs one of {known}, no '?' or '#', and of a folder the whole "
            "path; write 's3://bucket/run' or 'file:///shared/run'."
        )
    given = dict(options or {})
    if scheme == "file":
        given.setdefault("mkdir", True)
    elif scheme != "memory":
        # A slow upload is no failure, and the courier asks a store that is away again.
        names = "AWS_ENDPOINT_URL", "AWS_ENDPOINT"
        endpoints = [given.get("endpoint", ""), *(os.environ.get(name, "") for name in names)]
        is_plain = next(filter(None, endpoints), "").startswith("http://")
        client = {"timeout": "900s", "connect_timeout": "10s", "allow_http": is_plain}
        given.setdefault("client_options", client)
        wait = datetime.timedelta(seconds=10)
        given.setdefault("retry_config", {"max_retries": 2, "retry_timeout": wait})
    with _named(url) as obstore:
        if scheme == "memory":
            store = _memories.setdefault(rest.strip("/"), obstore.store.MemoryStore())
        else:
            store = obstore.store.from_url(url, **given)
    bucket, probe = Bucket(url, store), f"probes/{uuid.uuid4().hex}"
    if not bucket.create(probe, b"") or bucket.create(probe, b""):
        raise _unconditional(url)
    bucket.delete([probe])
    return bucket


@contextlib.contextmanager
def _named(url: str) -> Iterator[Any]:
    """Gives `obstore`, and turns its errors into errors by name."""
    try:
        import obstore
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "jaxcomp.islands needs obstore, its extra 'islands', which is not installed; write "
            "pip install obstore, or pip install '.[islands]' in a checkout."
        ) from error
    kinds = obstore.exceptions
    try:
        yield obstore
    except (kinds.NotSupportedError, NotImplementedError) as error:
        raise _unconditional(url) from error
    except (kinds.BaseError, OSError) as error:
        refused = isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError)
        raise _named_error(url, error, refused) from None


def _named_error(url: str, error: Exception, refused: bool) -> OSError:
    text = (str(error).splitlines() or [""])[0][:300]
    number = re.search(r"\(os error (\d+)\)", text)
    if number and url.startswith("file://") and int(number[1]) != errno.ENOSPC:
        needs = "needs a folder in which this user may write"
        return OSError(int(number[1]), f"{url}: {needs}: {text}")
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
        return FileNotFoundError(f"{url}: no such bucket or folder; make it first: {text}")
    if "os error 28" in text or "No space left" in text:
        return OSError(errno.ENOSPC, f"{url}: the disk is full; delete something: {text}")
    if refused or any(word.lower() in text.lower() for word in _NO_KEYS):
        what = "the store refuses these credentials" if refused else "found no credentials"
        needs = SCHEMES[url.partition("://")[0]]
        return PermissionError(f"{url}: {what}; needs {needs}, or options={{...}}: {text}")
    return ConnectionError(f"{url}: {text}")


def _unconditional(url: str) -> ValueError:
    return ValueError(
        f"{url}: the store does not create objects conditionally (If-None-Match), so that two "
        "islands could decide one round in two ways; write a URL of S3, GCS, Azure or a folder."
    )
