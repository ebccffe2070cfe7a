"""Which tests need shaped network namespaces, and whether this machine has them."""

import pytest

from benchmarks import network

REASON = network.unavailable()

needs_namespaces = pytest.mark.skipif(REASON is not None, reason=REASON or "")
