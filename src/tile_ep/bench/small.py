"""Small batches, as in decoding: dispatch and combine of a few tokens a rank, eagerly and as one CUDA graph of all ranks.

The graph forks from one stream to all ranks' streams, runs each rank's dispatch and combine, and joins. Its time is that of
back-to-back replays, divided by their number. It reads tensors that stay where they are, into which another set of inputs is
copied before each such train, so they are likely in the L2 cache, as they are for a layer whose input has just been computed.
The time splits into

* launch: a graph of the same fork and join in which each rank has two empty kernels,
* wait: what the same graph takes beyond that when no token selects anything (counting, exchange, flags),
* move: the rest, which grows with the rows.

Host: what enqueueing one rank's two calls costs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tile_ep.bench.clocks import Spread
from tile_ep.bench.ranks import LoopbackRanks
from tile_ep.bench.workload import Shape, Workload, WrongResultError

_WARM_UP = 3
_REPLAYS = 20  # of a train: the host enqueues them all before the gate opens


@dataclass(frozen=True)
class SmallBatch:
    """One measurement, in us.

    Attributes:
        shape, num_sms: of the run.
        combine: `"staged"`, or `"zero-copy"` with the rows already in place.
        eager_us: dispatch and combine of all ranks behind one gate, caches cold, no graph.
        host_us: of the host's time, per rank, without a graph.
        graph_us: a replay, among back-to-back ones.
        launch_us, wait_us, move_us: parts of `graph_us`.
        wrong: what a check found, or empty.
    """

    shape: Shape
    num_sms: int
    combine: str
    eager_us: Spread
    host_us: Spread
    graph_us: Spread
    launch_us: float
    wait_us: float
    move_us: float
    wrong: str


class _Graph:
    """All ranks' steps in one graph.

    Attributes:
        results: by rank, overwritten by each replay.
    """

    def __init__(self, ranks: LoopbackRanks, step: Callable[[int], Any]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(ranks.device)
        torch.cuda.synchronize(ranks.device)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            fork = stream.record_event()
            self.results, ends = {}, []
            for rank in ranks.here:
                with torch.cuda.stream(ranks.streams[rank]):
                    ranks.streams[rank].wait_event(fork)
                    self.results[rank] = step(rank)
                    ends.append(ranks.streams[rank].record_event())
            for end in ends:
                stream.wait_event(end)


def _train_us(ranks: LoopbackRanks, graph: _Graph, repeat: int, before: Callable[[int], None] | None = None) -> Spread:
    """Of a replay, among back-to-back ones. `before` is told the number of the train."""
    samples: list[float] = []
    while len(samples) < _WARM_UP + repeat:
        if before is not None:
            before(len(samples))
        torch.cuda.synchronize(ranks.device)
        start = ranks.gate.close()
        for _ in range(_REPLAYS):
            graph.graph.replay()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        late = ranks.gate.was_late(start)
        torch.cuda.synchronize(ranks.device)
        if not late:
            samples.append(1e3 * start.elapsed_time(end) / _REPLAYS)
    return Spread.of(samples[_WARM_UP:])


def measure_small(
    ranks: LoopbackRanks, shape: Shape, batches: Sequence[int], num_sms: int, num_sets: int, repeat: int
) -> Iterator[SmallBatch]:
    """All `batches`, tokens a rank, on buffers that hold `shape.tokens`."""
    with ranks.open(shape, 1.0) as buffers:
        launch = _train_us(ranks, _Graph(ranks, _empty_kernels), repeat).median
        for tokens in batches:
            small = Shape(shape.ranks, tokens, shape.hidden, shape.topk, shape.experts, shape.skew, seed=shape.seed)
            workload = Workload(small, ranks.here, ranks.device, num_sets)
            for combine in ("staged", "zero-copy"):
                yield _Batch(ranks, buffers, workload, num_sms, combine).measure(launch, repeat)


def _empty_kernels(rank: int) -> None:
    for _ in range(2):
        torch.cuda._sleep(1)


class _Batch:
    def __init__(self, ranks: LoopbackRanks, buffers: Any, workload: Workload, num_sms: int, combine: str) -> None:
        self._ranks, self._buffers, self._workload = ranks, buffers, workload
        self._num_sms, self._combine = num_sms, combine
        self._x = {rank: x.clone() for rank, x in workload.x[0].items()}
        self._topk_idx = {rank: idx.clone() for rank, idx in workload.topk_idx[0].items()}

    def _place(self, number: int) -> None:
        """Set `number` of the inputs, going round."""
        number %= self._workload.num_sets
        for rank in self._ranks.here:
            self._x[rank].copy_(self._workload.x[number][rank])
            self._topk_idx[rank].copy_(self._workload.topk_idx[number][rank])

    def _step(self, rank: int, fill: bool = False) -> torch.Tensor:
        buffer, tokens = self._buffers[rank], self._workload.shape.tokens
        recv_x, _, _, handle, _ = buffer.dispatch(
            self._x[rank],
            self._topk_idx[rank],
            num_max_tokens_per_rank=tokens,
            do_cpu_sync=False,
            num_sms=self._num_sms,
        )
        y = recv_x
        if self._combine == "zero-copy":
            y = buffer.combine_input(handle)
            if fill:
                y.copy_(recv_x)
        out: torch.Tensor = buffer.combine(y, handle, num_sms=self._num_sms)[0]
        return out

    def measure(self, launch_us: float, repeat: int) -> SmallBatch:
        ranks = self._ranks
        ranks.each(self._step)
        eager, host = [], []
        for number in range(_WARM_UP + repeat):
            self._place(number)
            one = ranks.round([self._step])
            eager.append(1e3 * one.ms)
            host.append(one.enqueue_us)
        graph = _Graph(ranks, self._step)
        wrong = self._check(graph, 0)
        graph_us = _train_us(ranks, graph, repeat, self._place)
        wrong = wrong or self._check(graph, 1)
        for idx in self._topk_idx.values():
            idx.fill_(-1)
        idle_us = _train_us(ranks, graph, repeat).median
        return SmallBatch(
            self._workload.shape,
            self._num_sms,
            self._combine,
            Spread.of(eager[_WARM_UP:]),
            Spread.of(host[_WARM_UP:]),
            graph_us,
            launch_us,
            idle_us - launch_us,
            graph_us.median - idle_us,
            wrong,
        )

    def _check(self, graph: _Graph, number: int) -> str:
        """Put the rows of a set in place, replay, compare."""
        self._place(number)
        self._ranks.each(lambda rank: self._step(rank, fill=True))
        for out in graph.results.values():
            out.fill_(float("nan"))
        graph.graph.replay()
        torch.cuda.synchronize(self._ranks.device)
        for rank, out in graph.results.items():
            try:
                self._workload.check_sums(rank, number % self._workload.num_sets, out)
            except WrongResultError as error:
                return str(error)
        return ""
