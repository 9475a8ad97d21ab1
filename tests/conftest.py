"""Fixtures: process pools, and one adapter per backend for the bit-for-bit module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workers import Pools


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Process pools by world size."""
    with Pools() as opened:
        yield opened
