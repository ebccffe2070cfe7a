"""Environment variables that the processes of a run get from their launcher."""

import re
from collections.abc import Collection, Mapping, Sequence

from jaxcomp.launch.detect import VISIBLE

PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "HF_", "WANDB_")
"""Variables with these prefixes are passed to all hosts."""

NAMES = ("LD_LIBRARY_PATH", "PYTHONPATH", *VISIBLE)
"""So are these."""

_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def given(options: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Reads the values of `--env`: `NAME=VALUE`, or `NAME` for a variable that is set here.

    Raises:
      ValueError: For what is no name, and for a variable that is not set.
    """
    found = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                f"--env {option!r}: {name!r} is no name of a variable; write --env NAME or "
                "--env NAME=VALUE."
            )
        if not equals and name not in environ:
            raise ValueError(f"--env {name}: it is not set here; write --env {name}=VALUE.")
        found[name] = value if equals else environ[name]
    return found


def passed(environ: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """The variables that go to other hosts: those of `PREFIXES` and `NAMES`, and `more`."""
    known = lambda name: name.startswith(PREFIXES) or name in NAMES or name in more
    return {name: environ[name] for name in sorted(environ) if known(name)}


def is_secret(name: str) -> bool:
    """Whether a variable may hold a secret: it then goes over standard input.

    Arguments show in the process list of a host.
    """
    return _SECRET.search(name) is not None
