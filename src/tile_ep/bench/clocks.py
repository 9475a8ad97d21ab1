"""Clocks: what is made of samples, and a device that is warm and has nothing of the inputs in its cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 512 << 20  # several times the largest L2 cache
_WARM_UP_S = 0.5


@dataclass(frozen=True)
class Spread:
    """What repeated samples say."""

    median: float
    least: float
    most: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Raises ValueError without samples."""
        if not samples:
            raise ValueError("no samples")
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each round the time of the slowest rank.

    Args:
        per_rank: every rank's samples, as many on each.
    """
    return [max(samples) for samples in zip(*per_rank, strict=True)]


class Cache:
    """Puts the inputs out of the device's cache by reading something else, which leaves nothing to write back."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sink = torch.empty((), dtype=torch.float32, device=device)

    def flush(self) -> None:
        """Enqueue it on the current stream."""
        torch.sum(self._memory, dim=0, out=self._sink)


def warm_up(device: torch.device) -> None:
    """Keep a CUDA device busy until it has raised its clocks."""
    if device.type != "cuda":
        return
    square = torch.randn(4096, 4096, device=device).bfloat16()
    end = time.monotonic() + _WARM_UP_S
    while time.monotonic() < end:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize(device)
