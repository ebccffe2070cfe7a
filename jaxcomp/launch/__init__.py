"""Starts any JAX program on many processes, and gives it a few functions to run there.

    python -m jaxcomp.launch --hosts hosts.txt -- python my_script.py

It trains nothing, and imports no other room; nor does another room import it.
"""

from jaxcomp.launch.agree import from_first, is_first, require_shared
from jaxcomp.launch.claims import Claim, claimed
from jaxcomp.launch.distributed import finish, require_same
from jaxcomp.launch.exits import Drained, Transient, clean_exits
from jaxcomp.launch.place import connect
from jaxcomp.launch.progress import Line
from jaxcomp.launch.signals import stop_signals
from jaxcomp.launch.watchdog import Watch, watch

__all__ = [
    "Claim",
    "Drained",
    "Line",
    "Transient",
    "Watch",
    "claimed",
    "clean_exits",
    "connect",
    "finish",
    "from_first",
    "is_first",
    "require_same",
    "require_shared",
    "stop_signals",
    "watch",
]
