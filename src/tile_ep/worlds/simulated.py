"""All ranks in the simulator: CPU memory, one launch of all ranks at a time, deterministic from a seed."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tile_ep.backends.base import StreamOptions
from tile_ep.event import EventOverlap
from tile_ep.kernels import combine, dispatch
from tile_ep.kernels.launcher import KernelSpec, cuda_source
from tile_ep.kernels.tuning import SIMULATOR
from tile_ep.layout import ROW_ALIGNMENT
from tile_ep.sim import Launch, MemoryRegion, SimKernel, SimOptions, SimReport, compile_source, simulate

if TYPE_CHECKING:
    from tile_ep.worlds.loopback import Meeting

PHASES = {**dispatch.PHASES, **combine.PHASES}

_MAX_BLOCKS = 8


_KERNELS: dict[KernelSpec, SimKernel] = {}
_KERNELS_LOCK = threading.Lock()


def simulated_kernel(spec: KernelSpec) -> SimKernel:
    """The generated source of `spec`, compiled for the simulator; once, however many ranks ask at the same time."""
    with _KERNELS_LOCK:
        if spec not in _KERNELS:
            _KERNELS[spec] = compile_source(cuda_source(spec), spec.threads)
        return _KERNELS[spec]


class Simulation:
    """Collects the launches of all ranks and runs them together.

    A launch normally waits for those of all other ranks, and all of them end before any call returns. Inside `queued`
    launches only line up, as on CUDA streams; at its end they run, so that one rank may be several collectives ahead
    of another.

    Attributes:
        reports: of every simulation so far.
        regions: of every rank.
    """

    def __init__(self, num_ranks: int, seed: int, timeout_s: float) -> None:
        self._num_ranks, self._seed, self._timeout_s = num_ranks, seed, timeout_s
        self._condition = threading.Condition()
        self._waiting: dict[int, list[_Entry]] = {}
        self._generation = 0
        self._queues = False
        self._error: Exception | None = None
        self.reports: list[SimReport] = []
        self.regions: dict[int, MemoryRegion] = {}

    def join(self, entry: _Entry) -> None:
        """Run a launch together with those of the other ranks, or without the ones that have not come in time.

        Raises:
            SimError: the simulated program is wrong: a deadlock, a fault, a misuse of a primitive.
        """
        with self._condition:
            generation = self._generation
            self._waiting.setdefault(entry.launch.rank, []).append(entry)
            if self._queues:
                return
            if len(self._waiting) == self._num_ranks:
                self._run()
            else:
                deadline = time.monotonic() + self._timeout_s
                while self._generation == generation and time.monotonic() < deadline:
                    self._condition.wait(max(0.0, deadline - time.monotonic()))
                if self._generation == generation:
                    self._run()
            if self._error is not None:
                raise self._error

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Let launches line up; run them at the end. Outputs hold nothing before that.

        Raises:
            SimError: as for `join`.
        """
        self._queues = True
        try:
            yield
        finally:
            self._queues = False
        with self._condition:
            self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        entries = [entry for rank in sorted(self._waiting) for entry in self._waiting[rank]]
        self._waiting = {}
        regions = [*self.regions.values(), *(region for entry in entries for region in entry.regions)]
        launches = [entry.launch for entry in entries]
        self._error = None
        try:
            options = SimOptions(phase_names=PHASES)
            report = simulate(launches, seed=self._seed + self._generation, regions=regions, options=options)
            self.reports.append(report)
        except Exception as error:  # every rank's call raises it
            self._error = error
        self._generation += 1
        self._condition.notify_all()


@dataclass(frozen=True)
class _Entry:
    """A launch, the memory that it may touch beyond the ranks' regions, and what keeps that memory alive."""

    launch: Launch
    regions: list[MemoryRegion]
    tensors: list[torch.Tensor]


class _Span(np.ndarray):  # type: ignore[type-arg]
    """A part of a region as torch adopts it: torch keeps this object for as long as any tensor over it."""


class SimulatedWorld:
    """One rank of a simulation."""

    tuning = SIMULATOR
    max_blocks = _MAX_BLOCKS
    ranks_on_device = 1

    def __init__(self, rank: int, simulation: Simulation, meeting: Meeting) -> None:
        self.rank, self._simulation, self._meeting = rank, simulation, meeting
        self.num_ranks = len(meeting)
        self.device = torch.device("cpu")
        self._region = np.zeros(0, dtype=np.uint8)
        self.peers = torch.empty(0)

    def allocate(self, num_bytes: int) -> None:
        """Allocate and exchange addresses. Collective."""
        memory = np.zeros(num_bytes + ROW_ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ROW_ALIGNMENT
        self._region = memory[start : start + num_bytes]
        self._simulation.regions[self.rank] = MemoryRegion(self.base, num_bytes, f"region of rank {self.rank}")
        self.peers = torch.tensor(self.gather(self.base), dtype=torch.int64)

    @property
    def base(self) -> int:
        """Address of this rank's region."""
        return int(self._region.ctypes.data)

    def zero(self, offset: int, num_bytes: int) -> None:
        """Zero a part of this rank's region."""
        self._region[offset : offset + num_bytes] = 0

    def lease(self, offset: int, num_bytes: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A part of this rank's region as uint8, and a reference that dies with the last tensor over it."""
        span = self._region[offset : offset + num_bytes].view(_Span)
        return torch.from_numpy(span), weakref.ref(span)

    def host_words(self, number: int) -> torch.Tensor:
        """int64 zeros."""
        return torch.zeros(number, dtype=torch.int64)

    def begin(self, streams: StreamOptions) -> None:
        """There are no streams."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, on_comm_stream: bool) -> torch.Tensor:
        """Memory full of a poison, so that what a kernel fails to write is seen."""
        out = torch.empty(shape, dtype=dtype)
        out.view(torch.uint8).fill_(0xA5)
        return out

    def launch(self, spec: KernelSpec, num_blocks: int, arguments: Mapping[str, int | torch.Tensor | None]) -> None:
        """Run a kernel on all ranks at once. Collective."""
        values: dict[str, int] = {}
        regions: list[MemoryRegion] = []
        for name, value in {"peers": self.peers, **arguments}.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.data_ptr()
                size = value.numel() * value.element_size()
                if size and not self._holds(value.data_ptr()):
                    regions.append(MemoryRegion(value.data_ptr(), size, f"{name} of rank {self.rank}"))
            else:
                values[name] = value or 0
        control = spec.control.num_bytes
        inbox = (self.base + control, self._region.size - control)
        launch = Launch(self.rank, simulated_kernel(spec), num_blocks, values, inbox)
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        self._simulation.join(_Entry(launch, regions, tensors))

    def _holds(self, address: int) -> bool:
        return self.base <= address < self.base + self._region.size

    def after(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """There are no streams."""
        return make()

    def words(self, offset: int, number: int) -> list[int]:
        """64-bit words of this rank's region."""
        return [int(word) for word in self._region[offset : offset + 8 * number].view(np.int64)]

    def end(self, asynchronous: bool, temporaries: tuple[torch.Tensor, ...]) -> EventOverlap:
        """Everything has happened already."""
        return EventOverlap()

    def bound_run_ahead(self, depth: int) -> None:
        """Nothing is ever outstanding."""

    def pause(self) -> None:
        """Nothing else runs."""

    def synchronize(self) -> None:
        """Everything has happened already."""

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        return self._meeting.gather(self.rank, value)

    def destroy(self) -> None:
        """Leave the simulation. Tensors over the region keep its memory."""
        self._simulation.regions.pop(self.rank, None)
