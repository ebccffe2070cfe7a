"""Where the objects of a run lie: a bucket or a folder, opened by its URL through `obstore`."""

import contextlib
import datetime
import errno
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "",
    "memory": "",
}
_NO_KEYS = ("169.254.169.254", "metadata.google.internal", "credential", "Account must be")
_memories: dict[str, Any] = {}  # `memory://NAME` is one store for the whole process


def _obstore() -> Any:
    try:
        import obstore
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "jaxcomp.islands needs obstore, which is not installed; write "
            "pip install 'jaxcomp[islands]'."
        ) from error
    return obstore


class Bucket(NamedTuple):
    """The objects below one URL; what a store refuses is an OSError that says what to do."""

    url: str
    store: Any

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object that is new; False if there is one already."""
        obstore = _obstore()
        with self._named():
            try:
                obstore.put(self.store, path, data, mode="create")
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                return False
        return True

    def get(self, path: str, sizes: range) -> bytes | None:
        """The bytes of an object, or None if there is none.

        Raises:
          ValueError: If its size is not one of `sizes`, before it is read.
        """
        with self._named():
            try:
                found = _obstore().get(self.store, path)
            except FileNotFoundError:
                return None
            if found.meta["size"] not in sizes:
                raise ValueError(
                    f"has {found.meta['size']} bytes; needs {sizes.start} to {sizes.stop - 1}"
                )
            return bytes(found.bytes())

    def paths(self) -> list[str]:
        """Where there are objects."""
        with self._named():
            return [meta["path"] for meta in _obstore().list(self.store).collect()]

    def delete(self, paths: list[str]) -> None:
        """Deletes objects, those among them that are there."""
        for path in paths:
            with self._named(), contextlib.suppress(FileNotFoundError):
                _obstore().delete(self.store, path)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turns the errors of `obstore` into errors by name."""
        errors = _obstore().exceptions
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.url}: no such bucket or folder; make it first: {_line(error)}"
            ) from None
        except (errors.NotSupportedError, NotImplementedError) as error:
            raise ValueError(_unconditional(self.url)) from error
        except errors.BaseError as error:
            raise _named_error(self.url, error) from None


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
    scheme, colon, rest = url.partition("://")
    if scheme not in SCHEMES or not colon or not rest.strip("/"):
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"got the URL {url!r}; needs one of {known}; write 's3://bucket/run'.")
    from_url, given = _obstore().store.from_url, dict(options or {})
    if scheme == "memory":
        store = _memories.setdefault(rest, None) or _obstore().store.MemoryStore()
        _memories[rest] = store
    elif scheme == "file":
        store = _made(url, lambda: from_url(url, mkdir=True, **given))
    else:
        # A slow upload is no failure, and the courier asks a store that is away again.
        given.setdefault("client_options", {"timeout": "900s", "connect_timeout": "10s"})
        wait = datetime.timedelta(seconds=10)
        given.setdefault("retry_config", {"max_retries": 2, "retry_timeout": wait})
        store = _made(url, lambda: from_url(url, **given))
    bucket, probe = Bucket(url, store), f"probes/{uuid.uuid4().hex}"
    if not bucket.create(probe, b"") or bucket.create(probe, b""):
        raise ValueError(_unconditional(url))
    bucket.delete([probe])
    return bucket


def _made(url, make):
    try:
        return make()
    except (_obstore().exceptions.BaseError, OSError) as error:
        raise _named_error(url, error) from None


def _named_error(url: str, error: Exception) -> OSError:
    text, scheme = _line(error), url.partition("://")[0]
    kinds = _obstore().exceptions
    if "os error 28" in text or "No space left" in text:
        return OSError(errno.ENOSPC, f"{url}: the disk is full; delete something: {text}")
    refused = isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError)
    if refused or any(word.lower() in text.lower() for word in _NO_KEYS):
        what = "the store refuses these credentials" if refused else "found no credentials"
        needs = SCHEMES.get(scheme) or "the right to write there"
        return PermissionError(f"{url}: {what}; needs {needs}, or options={{...}}: {text}")
    if "NoSuchBucket" in str(error):
        return FileNotFoundError(f"{url}: no such bucket; make it first: {text}")
    return ConnectionError(f"{url}: {text}")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _unconditional(url: str) -> str:
    return (
        f"{url}: the store does not create objects conditionally (If-None-Match), so that two "
        "islands could decide one round in two ways; write a URL of S3, GCS, Azure or a folder."
    )
