"""Who runs the ranks of a measurement, and how long a call on all of them takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tile_ep.bench.clocks import Cache
from tile_ep.bench.workload import Shape
from tile_ep.buffer import Buffer

Value = TypeVar("Value")
Phase = Callable[[int], Any]
"""What a rank calls. Between two phases every rank waits for all, unless its calls wait for each other anyway."""
Before = Callable[[int], None]
"""What is done for a rank while nothing is under way."""

_GATE_CYCLES = 4_000_000
_LONGEST_GATE = 64_000_000
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Round:
    """One call on the ranks that live here.

    Attributes:
        ms: from the opening of the gate to the end of the last rank here, by device events; on CPUs by the host's clock.
        enqueue_us: of the host's time, per rank.
        results: of the last phase, by rank.
    """

    ms: float
    enqueue_us: float
    results: dict[int, Any]


class Ranks(Protocol):
    """All ranks of a measurement, of which those of `here` live in this process.

    Attributes:
        name: for reports.
        num_ranks, here, device: who and where.
        one_device: all ranks share one memory.
        on_device: times are taken by device events.
    """

    name: str
    num_ranks: int
    here: list[int]
    device: torch.device
    one_device: bool
    on_device: bool

    def open(self, shape: Shape, expand_factor: float, tuning: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Buffers of the ranks that live here, indexed by rank, while the context lasts. Collective."""
        ...

    def each(self, call: Phase) -> dict[int, Any]:
        """Untimed, and at once: the call may compile, allocate and wait for the host. Collective."""
        ...

    def round(self, phases: Sequence[Phase], before: Before | None = None) -> Round:
        """Timed, and at the first try: nothing may compile. Collective."""
        ...

    def host_ms(self, phases: Sequence[Phase], before: Before | None = None) -> float:
        """From the first call to the end of all work here, by the host's clock. Collective."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """The value of every process. Collective."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of all ranks. Collective."""
        ...


def prepare(here: Sequence[int], before: Before | None) -> None:
    """Run `before` for each rank here."""
    if before is not None:
        for rank in here:
            before(rank)


# ---------------------------------------------------------------- on CUDA


class Gate:
    """Holds the device until the host has enqueued everything, then starts all streams at once.

    Attributes:
        cycles: for how long; doubled when the host turns out to need longer, and then shortened again, little by little.
    """

    def __init__(self, device: torch.device) -> None:
        self._cache = Cache(device)
        self.cycles = _GATE_CYCLES

    def close(self, last: Callable[[], None] | None = None) -> torch.cuda.Event:
        """Enqueue on the current stream: a cold cache, a wait, `last`, and the event that opens."""
        self._cache.flush()
        torch.cuda._sleep(self.cycles)
        if last is not None:
            last()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def was_late(self, event: torch.cuda.Event) -> bool:
        """Whether the gate opened before the host was done; then it stays closed for longer next time."""
        if not event.query():
            self.cycles = max(_GATE_CYCLES, self.cycles * 15 // 16)
            return False
        if self.cycles >= _LONGEST_GATE:
            return False  # it will not get better
        self.cycles *= 2
        return True


def enqueue(
    here: Sequence[int], streams: dict[int, torch.cuda.Stream], phases: Sequence[Phase], gate: torch.cuda.Event
) -> tuple[dict[int, Any], list[torch.cuda.Event]]:
    """Enqueue all phases of all ranks here behind `gate`; results, and an event after each rank."""
    results: dict[int, Any] = {}
    waits = [gate]
    for phase in phases:
        ends = []
        for rank in here:
            with torch.cuda.stream(streams[rank]):
                for event in waits:
                    streams[rank].wait_event(event)
                results[rank] = phase(rank)
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
        waits = ends
    return results, waits


class _Cuda:
    """What the worlds on CUDA share."""

    on_device = True

    def __init__(self, here: list[int], device: torch.device) -> None:
        self.here, self.device = here, device
        self.streams = {rank: torch.cuda.Stream(device) for rank in here}
        self.gate = Gate(device)

    def _last(self) -> None:
        """Enqueued before the gate opens."""

    def round(self, phases: Sequence[Phase], before: Before | None = None) -> Round:
        while True:
            self.synchronize()
            prepare(self.here, before)
            gate = self.gate.close(self._last)
            began = time.perf_counter()
            results, ends = enqueue(self.here, self.streams, phases, gate)
            took = time.perf_counter() - began
            late = self._was_late(gate)
            torch.cuda.synchronize(self.device)
            if not late:
                ms = max(gate.elapsed_time(end) for end in ends)
                return Round(ms, 1e6 * took / len(self.here), results)
            results.clear()

    def _was_late(self, gate: torch.cuda.Event) -> bool:
        return self.gate.was_late(gate)

    def host_ms(self, phases: Sequence[Phase], before: Before | None = None) -> float:
        self.synchronize()
        prepare(self.here, before)
        opened = torch.cuda.Event()
        opened.record()
        began = time.perf_counter()
        enqueue(self.here, self.streams, phases, opened)
        torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - began)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class LoopbackRanks(_Cuda):
    """All ranks on one GPU."""

    name = "cuda-loopback"
    one_device = True

    def __init__(self, num_ranks: int) -> None:
        super().__init__(list(range(num_ranks)), torch.device("cuda", torch.cuda.current_device()))
        self.num_ranks = num_ranks
        self._loopback: Any = None

    @contextlib.contextmanager
    def open(self, shape: Shape, expand_factor: float, tuning: Any = None) -> Iterator[Any]:
        with _loopback(shape, "cuda", expand_factor, tuning) as ranks:
            self._loopback = ranks
            try:
                yield ranks
            finally:
                self._loopback = None
                torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def each(self, call: Phase) -> dict[int, Any]:
        """On one thread a rank, which meet before each launch."""
        torch.cuda.synchronize(self.device)

        def on_stream(rank: int, _: Buffer) -> Any:
            with torch.cuda.stream(self.streams[rank]):
                result = call(rank)
                self.streams[rank].synchronize()
                return result

        assert self._loopback is not None, "open() first"
        return dict(enumerate(self._loopback.run(on_stream)))

    def gather(self, value: Value) -> list[Value]:
        return [value]


def _loopback(shape: Shape, device: str, expand_factor: float, tuning: Any) -> Any:
    from tile_ep.worlds.loopback import loopback

    return loopback(
        shape.ranks,
        device,
        num_max_tokens_per_rank=shape.tokens,
        hidden=shape.hidden,
        num_topk=shape.topk,
        num_experts=shape.experts,
        expand_factor=expand_factor,
        pipeline_depth=0,
        timeout_s=_TIMEOUT_S,
        **({} if tuning is None else {"tuning": tuning}),
    )


# ---------------------------------------------------------------- in the simulator


class SimulatedRanks:
    """All ranks in the simulator. Its times say nothing about a GPU; it is there to test the harness."""

    name = "sim"
    one_device = True
    on_device = False

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.here, self.device = num_ranks, list(range(num_ranks)), torch.device("cpu")
        self._loopback: Any = None

    @contextlib.contextmanager
    def open(self, shape: Shape, expand_factor: float, tuning: Any = None) -> Iterator[Any]:
        with _loopback(shape, "sim", expand_factor, tuning) as ranks:
            self._loopback = ranks
            try:
                yield ranks
            finally:
                self._loopback = None

    def each(self, call: Phase) -> dict[int, Any]:
        if self._loopback is None:
            return {rank: call(rank) for rank in self.here}
        return dict(enumerate(self._loopback.run(lambda rank, _: call(rank))))

    def round(self, phases: Sequence[Phase], before: Before | None = None) -> Round:
        prepare(self.here, before)
        began = time.perf_counter()
        results: dict[int, Any] = {}
        for phase in phases:
            results = self.each(phase)
        took = time.perf_counter() - began
        return Round(1e3 * took, 1e6 * took / self.num_ranks, results)

    def host_ms(self, phases: Sequence[Phase], before: Before | None = None) -> float:
        return self.round(phases, before).ms

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def synchronize(self) -> None:
        """Everything has happened already."""


# ---------------------------------------------------------------- one rank a process


class _Processes:
    """What ranks in processes of their own share. The default process group is theirs."""

    one_device = False

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.name = f"{self.num_ranks} processes, {dist.get_backend()}"

    @contextlib.contextmanager
    def open(self, shape: Shape, expand_factor: float, tuning: Any = None) -> Iterator[Any]:
        assert tuning is None, "only all ranks in one process can be tuned"
        buffer = Buffer(
            num_max_tokens_per_rank=shape.tokens,
            hidden=shape.hidden,
            num_topk=shape.topk,
            num_experts=shape.experts,
            expand_factor=expand_factor,
            pipeline_depth=0,
            timeout_s=_TIMEOUT_S,
            backend=self.backend,
        )
        with buffer:
            yield {self.rank: buffer}
            buffer.barrier()

    def each(self, call: Phase) -> dict[int, Any]:
        return {self.rank: call(self.rank)}

    def gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values


class CpuProcessRanks(_Processes):
    """A process a rank, on CPUs, through gloo."""

    on_device = False

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.here, self.device = [self.rank], torch.device("cpu")

    def round(self, phases: Sequence[Phase], before: Before | None = None) -> Round:
        prepare(self.here, before)
        self.synchronize()
        began = time.perf_counter()
        result = None
        for phase in phases:
            result = phase(self.rank)
        took = time.perf_counter() - began
        return Round(1e3 * took, 1e6 * took, {self.rank: result})

    def host_ms(self, phases: Sequence[Phase], before: Before | None = None) -> float:
        return self.round(phases, before).ms

    def synchronize(self) -> None:
        dist.barrier()


class CudaProcessRanks(_Cuda, _Processes):
    """A process and a GPU a rank. The gate ends with an all-reduce, which no rank leaves before all have come."""

    def __init__(self, backend: str) -> None:
        _Processes.__init__(self, backend)
        _Cuda.__init__(self, [self.rank], torch.device("cuda", torch.cuda.current_device()))
        self._token = torch.zeros(1, device=self.device)

    def _last(self) -> None:
        dist.all_reduce(self._token)

    def _was_late(self, gate: torch.cuda.Event) -> bool:
        return False  # whoever asks alone would repeat alone

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()
        torch.cuda.synchronize(self.device)
