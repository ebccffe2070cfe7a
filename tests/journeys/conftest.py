"""The pages' journeys take a quarter of an hour: `make journeys` alone makes them."""

import os

collect_ignore = [] if "JOURNEYS" in os.environ else ["test_pages.py"]
