"""How a launcher reaches a process that it started, here or over ssh: through standard input.

The first line is the run's secret: an argument or a variable would show in lists of processes, and
in logs. Each other line is the name of a signal, as `TERM`; the end of the input means that the
launcher has gone.
"""

import os
import signal
import subprocess
import threading
import time

_GRACE = 60.0  # seconds to save and end after the launcher has gone


def obey() -> bytes:
    """Returns the run's secret, and turns what else the launcher says into signals, in a thread."""
    secret = b""
    while (part := os.read(0, 1)) not in (b"", b"\n"):
        secret += part
    threading.Thread(target=_listen, daemon=True).start()
    return secret


def _listen() -> None:
    # os.read and no buffered file: a thread inside sys.stdin's lock would break the exit.
    rest, asked = b"", False
    while part := os.read(0, 1024):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            os.kill(os.getpid(), getattr(signal, f"SIG{line.decode()}"))
            asked = True
    # Who was told to stop already is saving: a third signal would cut that off.
    if not asked:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


def tell(process: subprocess.Popen, name: str) -> None:
    """Sends a line, as `TERM`, to a process that obeys; one that has ended hears nothing."""
    try:
        process.stdin.write(f"{name}\n".encode())
    except (OSError, ValueError):  # broken, or closed here
        pass
