"""What users would take instead: one adapter a module, each measured in the same run, or skipped with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from tile_ep.bench.measure import Operation
from tile_ep.bench.ranks import Ranks
from tile_ep.bench.workload import Workload


class System(Protocol):
    """Something that does collectives.

    Attributes:
        name: for reports.
        num_sms: SMs of a call, 0 where it cannot be told.
    """

    name: str
    num_sms: int

    def operations(self) -> Iterator[Operation]:
        """One after the other; each is to be measured before the next one is asked for. Collective."""
        ...


class Peer(Protocol):
    """A module of this package."""

    NAME: str

    def available(self, ranks: Ranks) -> str | None:
        """Why it cannot run here, or `None`. Local."""
        ...

    make: Callable[[Ranks, Workload, int], System]
    """`(ranks, workload, num_sms)`."""


def all_peers() -> dict[str, Peer]:
    """By the name of their module."""
    from tile_ep.bench.peers import classic, deepep, flashinfer, plain_torch, vdev2d

    modules: tuple[Peer, ...] = (plain_torch, classic, deepep, flashinfer, vdev2d)  # type: ignore[assignment]
    return {module.__name__.rpartition(".")[2]: module for module in modules}  # type: ignore[attr-defined]
