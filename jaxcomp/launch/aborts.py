"""Runs a function when JAX aborts a process that has lost its coordination service.

JAX has a callback for that, but calling it fails with std::bad_cast.
"""

import ctypes
import signal
from collections.abc import Callable
from typing import Any

_kept: list[Any] = []  # references to functions that C may call


def on_abort(call: Callable[[], None]) -> Callable[[], None]:
    """Calls a function in the thread that aborts; if it returns, the process ends.

    Args:
      call: Without arguments. If it never returns, nothing is aborted and other threads go on.

    Returns:
      A function that restores the previous handler.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler, c_signal = kind(lambda number: call()), ctypes.CDLL(None).signal
    c_signal.argtypes, c_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    _kept.append(handler)
    previous = c_signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return lambda: c_signal(signal.SIGABRT, previous)
