"""JAX aborts a process that loses its coordination service: what such a process does instead.

JAX has a callback for that, but calling it fails with std::bad_cast.
"""

import ctypes
import signal
from collections.abc import Callable

_kept = []  # functions that C may call: it does not keep them itself


def on_abort(call: Callable[[], None]) -> Callable[[], None]:
    """Has a function called in the thread that aborts; if it returns, the process ends.

    Args:
      call: Without arguments. A thread that it keeps for ever aborts nothing: the others go on.

    Returns:
      A function that has what was there before called again.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler, c_signal = kind(lambda number: call()), ctypes.CDLL(None).signal
    c_signal.argtypes, c_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    _kept.append(handler)
    previous = c_signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return lambda: c_signal(signal.SIGABRT, previous)
