"""Compressors promise bits, so that their tests compile them as users do."""

import pytest


@pytest.fixture(autouse=True)
def compiled_as_users_do(optimized):
    pass
