"""How much of a collective a matrix product hides, and the other way round.

A bf16 `torch.matmul` of the size that takes as long alone as the collective alone runs on the compute stream while the
collective runs beside it (`async_with_compute_stream`). Hidden share: `(gemm + collective - both) / collective`, each the
time from the gate to the end of everything; 1 where the collective costs nothing more, 0 where it could as well have waited.
The head start of a collective that comes first is not hidden: it counts against it.
With all ranks on one GPU, the last rank has the product, since the others' collectives are enqueued by then; all ranks' blocks
take SMs from it, so few ranks are used.

A product whose blocks stay until its end, as those of cuBLAS do, takes every SM that it finds free, and where it finds too few,
the rest of its blocks run after the others: twice the time. So each is measured twice, as it comes, and told to leave free as
many SMs as the collective takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tile_ep.bench.clocks import Spread, slowest
from tile_ep.bench.exchange import Exchange
from tile_ep.bench.ranks import Before, Phase, Ranks, prepare
from tile_ep.bench.workload import Workload

_WARM_UP = 2
_INNER, _COLUMNS = 7168, 4096
_STEP = 128
_GUESSES = 4
_MOST_ROWS = 1 << 16
_HEAD_START_CYCLES = 8_000  # of a collective that is enqueued first: about 4 us, after which its blocks have their SMs
ORDERS = ("collective first", "GEMM first")


@dataclass(frozen=True)
class Hidden:
    """One measurement.

    Attributes:
        collective: its name.
        ranks, num_sms: blocks that run beside the product are those of all ranks on its device.
        order: which of the two the host enqueues first.
        rows: of the product, `[rows, 7168] @ [7168, 4096]`.
        gemm_ms, collective_ms, both_ms: slowest rank.
        left_sms: that the product was told to leave free.
    """

    collective: str
    ranks: int
    num_sms: int
    order: str
    rows: int
    gemm_ms: Spread
    collective_ms: Spread
    both_ms: Spread
    left_sms: int = 0

    @property
    def share(self) -> float:
        alone = self.collective_ms.median
        return (self.gemm_ms.median + alone - self.both_ms.median) / alone


class Gemm:
    """A product of bf16 matrices with a number of rows that can be chosen."""

    def __init__(self, device: torch.device) -> None:
        self.rows = 1024
        self._left = torch.randn(_MOST_ROWS, _INNER, device=device, dtype=torch.bfloat16)
        self._right = torch.randn(_INNER, _COLUMNS, device=device, dtype=torch.bfloat16)
        self._out = torch.empty(_MOST_ROWS, _COLUMNS, device=device, dtype=torch.bfloat16)

    def __call__(self) -> None:
        torch.mm(self._left[: self.rows], self._right, out=self._out[: self.rows])

    def fit(self, target_ms: float, time_ms: Callable[[], float]) -> None:
        """Choose the rows whose time is nearest to `target_ms`; `time_ms` says how long the present ones take. That grows in
        leaps, with the number of tiles that an SM has to do.
        """
        took: dict[int, float] = {}
        for _ in range(_GUESSES):
            took[self.rows] = time_ms()
            self.rows = next_rows(self.rows, took[self.rows], target_ms)
        for rows in (self.rows - _STEP, self.rows, self.rows + _STEP):
            if _STEP <= rows <= _MOST_ROWS and rows not in took:
                self.rows = rows
                took[rows] = time_ms()
        self.rows = min(took, key=lambda rows: abs(took[rows] - target_ms))


@contextlib.contextmanager
def leaving(num_sms: int) -> Iterator[bool]:
    """Products of cuBLASLt leave `num_sms` SMs free while the context lasts; yields whether this PyTorch can tell them."""
    tell = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if num_sms == 0 or tell is None:
        yield num_sms == 0
        return
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    tell(num_sms)
    try:
        yield True
    finally:
        tell(None)
        torch.backends.cuda.preferred_blas_library(library)


def next_rows(rows: int, took_ms: float, target_ms: float) -> int:
    """A better guess, in whole tiles."""
    wanted = round(rows * target_ms / took_ms / _STEP) * _STEP
    return min(max(wanted, _STEP), _MOST_ROWS)


def measure_overlap(ranks: Ranks, workload: Workload, num_sms: int, repeat: int) -> list[Hidden]:
    """Dispatch and zero-copy combine, enqueued before the product and after it. Needs CUDA. Collective."""
    exchange = Exchange(ranks, workload, num_sms)
    found = []
    with exchange.opened() as buffers:
        handles, rows = exchange.plan()
        gemm = Gemm(ranks.device)
        for rank in ranks.here:
            exchange.ask_for_input(rank, handles[0][rank]).copy_(rows[0][rank])

        def dispatch(rank: int, ready: torch.cuda.Event) -> Any:
            x, idx = workload.x[0][rank], workload.topk_idx[0][rank]
            return buffers[rank].dispatch(
                x, idx, do_cpu_sync=False, num_sms=num_sms, previous_event=ready, async_with_compute_stream=True
            )

        def combine(rank: int, ready: torch.cuda.Event) -> Any:
            options: dict[str, Any] = {"previous_event": ready, "async_with_compute_stream": True}
            return exchange.combine_in_place(rank, handles[0][rank], num_sms=num_sms, **options)

        def ask(rank: int) -> None:
            exchange.ask_for_input(rank, handles[0][rank])

        collectives: list[tuple[str, Collective, Before | None]] = [
            ("dispatch", dispatch, None),
            ("combine, zero-copy", combine, ask),
        ]
        taken = num_sms * (ranks.num_ranks if ranks.one_device else 1)
        for left_sms in (0, taken):
            with leaving(left_sms) as can:
                if can:
                    for name, collective, before in collectives:
                        found += _of_collective(ranks, name, collective, before, gemm, num_sms, left_sms, repeat)
    return found


Collective = Callable[[int, torch.cuda.Event], Any]


def _of_collective(
    ranks: Ranks,
    name: str,
    collective: Collective,
    before: Before | None,
    gemm: Gemm,
    num_sms: int,
    left_sms: int,
    repeat: int,
) -> list[Hidden]:
    def alone(rank: int) -> Any:
        result = collective(rank, torch.cuda.current_stream().record_event())
        result[-1].current_stream_wait()
        return result

    def product(rank: int) -> None:
        if rank == ranks.here[-1]:
            gemm()

    prepare(ranks.here, before)
    ranks.each(alone)
    collective_ms = _spread(ranks, alone, before, repeat)
    gemm.fit(collective_ms.median, lambda: _spread(ranks, product, None, 5).median)
    gemm_ms = _spread(ranks, product, None, repeat)
    found = []
    for order in ORDERS:

        def both(rank: int, order: str = order) -> Any:
            ready = torch.cuda.current_stream().record_event()
            if order == ORDERS[1]:
                product(rank)
            result = collective(rank, ready)
            if order == ORDERS[0]:
                if rank == ranks.here[-1]:
                    torch.cuda._sleep(_HEAD_START_CYCLES)
                product(rank)
            result[-1].current_stream_wait()
            return result

        both_ms = _spread(ranks, both, before, repeat)
        found.append(
            Hidden(name, ranks.num_ranks, num_sms, order, gemm.rows, gemm_ms, collective_ms, both_ms, left_sms)
        )
    return found


def _spread(ranks: Ranks, call: Phase, before: Before | None, repeat: int) -> Spread:
    times = []
    for _ in range(_WARM_UP + repeat):
        one = ranks.round([call], before)
        one.results.clear()
        times.append(one.ms)
    return Spread.of(slowest(ranks.gather(times[_WARM_UP:])))
