"""The classic design as a variant of our own kernels: a warp copies each row once per destination, and combine stores rows
back to the rank of their token before it sums them there.
"""

from __future__ import annotations

from typing import Any

from tile_ep.bench.exchange import Exchange
from tile_ep.bench.ranks import LoopbackRanks, Ranks
from tile_ep.bench.workload import Workload

NAME = "classic design"
FIGURES = ("dispatch", "combine, staged")


def available(ranks: Ranks) -> str | None:
    """It is a tuning of the kernels, which only a loopback takes."""
    if not isinstance(ranks, LoopbackRanks):
        return "only all ranks on one GPU can be tuned"
    if _tuning() is None:
        return "the kernels have no tuning CLASSIC"
    return None


def make(ranks: Ranks, workload: Workload, num_sms: int) -> Exchange:
    return Exchange(ranks, workload, num_sms, FIGURES, NAME, _tuning())


def _tuning() -> Any:
    from tile_ep.kernels import tuning

    return getattr(tuning, "CLASSIC", None)
