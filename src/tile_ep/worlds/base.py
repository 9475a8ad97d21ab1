"""A world says who the ranks are, where their memory is and how a kernel gets to run on it.

A kernel knows a table of addresses and a rank number. Whether a peer is another GPU, the same GPU or a part of a
simulation is the world's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from tile_ep.backends.base import StreamOptions
from tile_ep.event import EventOverlap
from tile_ep.kernels.launcher import KernelSpec
from tile_ep.kernels.tuning import Tuning


class World(Protocol):
    """One rank's view. Methods are local, except where they say otherwise."""

    rank: int
    num_ranks: int
    device: torch.device
    tuning: Tuning
    max_blocks: int
    """Most blocks of one collective: all ranks that share a device must be resident together."""
    ranks_on_device: int
    """This rank, and those that share its device."""

    def allocate(self, num_bytes: int) -> None:
        """Make this rank's region, zeroed, and learn the addresses of all. Collective."""
        ...

    def zero(self, offset: int, num_bytes: int) -> None:
        """Zero a part of this rank's region."""
        ...

    @property
    def base(self) -> int:
        """Address of this rank's region."""
        ...

    def lease(self, offset: int, num_bytes: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A part of this rank's region as uint8, and a reference that dies with the last tensor over it."""
        ...

    def host_words(self, number: int) -> torch.Tensor:
        """int64 zeros that kernels write and the host reads at once."""
        ...

    def begin(self, streams: StreamOptions) -> None:
        """The collective that follows waits for the event named there, or for the caller's work so far."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, on_comm_stream: bool) -> torch.Tensor:
        """Uninitialised memory for an output or a plan."""
        ...

    def launch(self, spec: KernelSpec, num_blocks: int, arguments: Mapping[str, int | torch.Tensor | None]) -> None:
        """Run a kernel, or enqueue it. Tensors are passed by address. Collective where the kernel is."""
        ...

    def after(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What torch operations make of results of the collective, which they follow."""
        ...

    def words(self, offset: int, number: int) -> list[int]:
        """64-bit words of this rank's region, as they are now."""
        ...

    def end(self, asynchronous: bool, temporaries: tuple[torch.Tensor, ...]) -> EventOverlap:
        """Close the collective: the caller's later work follows it, unless `asynchronous`."""
        ...

    def bound_run_ahead(self, depth: int) -> None:
        """Block the host until at most `depth` collectives are outstanding; 0 never blocks."""
        ...

    def pause(self) -> None:
        """Let others run while the host waits for words."""
        ...

    def synchronize(self) -> None:
        """Wait for everything this rank has enqueued."""
        ...

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        ...

    def destroy(self) -> None: ...
