"""Control of a process by its launcher, here or over ssh, through standard input.

The first line is the run's secret, since arguments and variables show in process lists and logs;
after a space there may be variables that are secret, as a JSON object.
Each other line is the name of a signal, such as `TERM`. The end of the input means that the
launcher is gone.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

_GRACE = 60.0  # seconds to save and end after the launcher is gone

at_end: list[Callable[[], None]] = []
"""What to call if it does not end in this time."""


def greeting(secret: str, variables: Mapping[str, str]) -> str:
    """The first line."""
    return f"{secret} {json.dumps(dict(variables))}" if variables else secret


def obey() -> bytes:
    """Returns the run's secret, and turns the launcher's other lines into signals, in a thread.

    Sets the variables of the first line.
    """
    line = b""
    while (part := os.read(0, 1)) not in (b"", b"\n"):
        line += part
    secret, _, variables = line.partition(b" ")
    os.environ.update(json.loads(variables or b"{}"))
    threading.Thread(target=_listen, daemon=True).start()
    return secret


def _listen() -> None:
    # os.read, not a buffered file: a thread inside sys.stdin's lock would break the exit.
    rest, asked = b"", False
    while part := os.read(0, 1024):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            os.kill(os.getpid(), getattr(signal, f"SIG{line.decode()}"))
            asked = True
    # A process that was told to stop is saving; a third signal would interrupt that.
    if not asked:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    for call in at_end:
        call()
    os._exit(1)


def tell(control: IO[bytes], name: str) -> None:
    """Sends a line, such as `TERM`, to a process that calls `obey`; ignores one that has ended."""
    with contextlib.suppress(OSError, ValueError):  # broken, or closed here
        control.write(f"{name}\n".encode())
