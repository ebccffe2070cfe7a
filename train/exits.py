"""How a program of this folder ends: one message, never a traceback for a user's mistake."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with one message on stderr if what is inside cannot go on.

    Raises:
      SystemExit: With status 2 for a ValueError, OSError or RuntimeError; with 0 for a
        KeyboardInterrupt that says what was saved, as `train.loop.run` raises it; with 130 for
        one without a text, where the program stopped at once.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        sys.exit(0 if str(stop) else 130)
