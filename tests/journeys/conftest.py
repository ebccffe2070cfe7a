"""What people type takes minutes: `make journeys` alone types it."""

import os

collect_ignore = [] if "JOURNEYS" in os.environ else ["test_pages.py", "test_runs.py"]
