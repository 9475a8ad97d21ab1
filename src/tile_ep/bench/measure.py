"""From an operation to a figure: check, warm up, repeat, check again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tile_ep.bench.ceilings import Ceilings
from tile_ep.bench.clocks import Spread, slowest
from tile_ep.bench.ranks import Before, Phase, Ranks, prepare
from tile_ep.bench.workload import Bytes, Shape, Workload, WrongResultError

_WARM_UP = 3
_FEWER = 3  # rounds by the host's clock, as a part of all


@dataclass(frozen=True)
class Operation:
    """One collective as a system does it. Calls take `(rank, set of inputs)`.

    Attributes:
        name: of the figure.
        phases: what a rank calls; the result is that of the last one.
        check: raises WrongResultError where the result, its third argument, is wrong.
        fill: puts the inputs where the operation expects them, before a round whose result is checked.
        before: run before each round, while nothing is under way. Untimed.
        compiles: the first call may compile, so it runs with a thread a rank.
    """

    name: str
    phases: tuple[Callable[[int, int], Any], ...]
    check: Callable[[int, int, Any], None]
    fill: Callable[[int, int], None] | None = None
    before: Callable[[int, int], None] | None = None
    compiles: bool = True


@dataclass(frozen=True)
class Figure:
    """What was measured.

    Attributes:
        section: part of the run that it belongs to.
        system: whose it is.
        name: of the collective.
        shape, num_sms: of the run; 0 SMs where the system does not take any number.
        time_ms: of whole calls, slowest rank, by device events (`clock` is `"device"`) or the host's clock (`"host"`).
        host_ms: whole calls by the host's clock, from the first call to the end of the work.
        enqueue_us: of the host's time that a rank's call takes.
        bytes: that have to move.
        ideal_ms: the time of these bytes at the ceilings of the same run.
        wrong: what a check found, or empty.
    """

    section: str
    system: str
    name: str
    shape: Shape
    num_sms: int
    time_ms: Spread
    host_ms: Spread
    enqueue_us: Spread
    clock: str
    bytes: Bytes
    ideal_ms: float
    wrong: str

    @property
    def share(self) -> float:
        """Of the ceiling."""
        return self.ideal_ms / self.time_ms.median

    @property
    def memory_tb_s(self) -> float:
        """Bytes read and written in the memory of the busiest device."""
        return self.bytes.memory / self.time_ms.median / 1e9

    @property
    def rows_tb_s(self) -> float:
        """Bytes of rows that went from rank to rank, counted once, over all ranks."""
        return self.bytes.rows / self.time_ms.median / 1e9

    @property
    def us_per_token(self) -> float:
        return 1e3 * self.time_ms.median / self.shape.tokens


def measure(
    section: str,
    system: str,
    operation: Operation,
    ranks: Ranks,
    workload: Workload,
    ceilings: Ceilings,
    num_sms: int,
    repeat: int,
) -> Figure:
    """Collective."""
    wrong = _checked(operation, ranks, first=True)
    samples: list[float] = []
    enqueue: list[float] = []
    for number in range(_WARM_UP + repeat):
        one = ranks.round(*_of_set(operation, number % workload.num_sets))
        one.results.clear()  # frees what the next round lands in
        samples.append(one.ms)
        enqueue.append(one.enqueue_us)
    by_host = []
    for number in range(max(1, repeat // _FEWER)):
        by_host.append(ranks.host_ms(*_of_set(operation, number % workload.num_sets)))
    wrong = wrong or _checked(operation, ranks, first=False)
    everywhere = ranks.gather((samples[_WARM_UP:], by_host, enqueue[_WARM_UP:], wrong))
    times = slowest([one_rank[0] for one_rank in everywhere])
    host = slowest([one_rank[1] for one_rank in everywhere])
    queued = slowest([one_rank[2] for one_rank in everywhere])
    count = workload.count_bytes(operation.name, ranks.one_device)
    return Figure(
        section,
        system,
        operation.name,
        workload.shape,
        num_sms,
        Spread.of(times),
        Spread.of(host),
        Spread.of(queued),
        "device" if ranks.on_device else "host",
        count,
        ceilings.ideal_ms(count),
        "; ".join(one_rank[3] for one_rank in everywhere if one_rank[3]),
    )


def _of_set(operation: Operation, number: int) -> tuple[list[Phase], Before | None]:
    """What `Ranks.round` takes."""
    before = None if operation.before is None else functools.partial(_call, operation.before, number)
    return [functools.partial(_call, phase, number) for phase in operation.phases], before


def _call(function: Callable[[int, int], Any], number: int, rank: int) -> Any:
    return function(rank, number)


def _checked(operation: Operation, ranks: Ranks, first: bool) -> str:
    """One round on the first set of inputs, compared; what is wrong, or empty. Collective."""
    phases, before = _of_set(operation, 0)
    ranks.synchronize()
    if first and operation.compiles:
        for phase in phases:
            prepare(ranks.here, before)
            ranks.each(phase)
            ranks.synchronize()
    prepare(ranks.here, before)
    if operation.fill is not None:
        for rank in ranks.here:
            operation.fill(rank, 0)
        ranks.synchronize()
    results = ranks.round(phases, before).results
    found = ""
    for rank, result in results.items():
        try:
            operation.check(rank, 0, result)
        except WrongResultError as error:
            found = found or f"{error}"
    return found
