"""The exchange over `torch.distributed`: gloo between CPUs, NCCL between GPUs of any number of nodes.

Every step is an all-to-all with uneven splits. A rank sends its rows ordered by (destination, token), so
what arrives is ordered by (source, token): the row order of the rank layout, without sorting.

A buffer has a communicator of its own. Its collectives therefore cannot be confused with the caller's,
two buffers can be used from two threads, and `reset` can replace it after a peer was lost.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from tile_ep.backends.base import (
    BufferConfig,
    CombineRequest,
    CombineResult,
    DispatchRequest,
    DispatchResult,
    StreamOptions,
    column_major,
)
from tile_ep.backends.collective_plan import Expansion, Plan, Planner, Route, payload_words
from tile_ep.backends.collective_wire import CALLS, Wire, dtype_code, row_bytes
from tile_ep.errors import BackendUnavailableError, CaptureError, DisagreementError, RoutingError
from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle

# ---------------------------------------------------------------- streams


class _Run:
    """One collective on the communication stream; on CPUs, nothing but an empty event."""

    def __init__(self, owner: torch.cuda.Stream | None) -> None:
        self.owner = owner
        self.event = EventOverlap()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An output. Its memory belongs to the stream that the caller asked for."""
        scope: AbstractContextManager[object] = nullcontext() if self.owner is None else torch.cuda.stream(self.owner)
        with scope:
            return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def _running(comm: torch.cuda.Stream | None, options: StreamOptions, inputs: Sequence[torch.Tensor]) -> Iterator[_Run]:
    if comm is None:
        yield _Run(None)
        return
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "backend: the collective backend synchronises with the host and cannot be captured. "
            "Use backend='nvlink' with do_cpu_sync=False, or call it outside the capture"
        )
    current, previous = torch.cuda.current_stream(comm.device), options.previous_event
    event = previous.event if isinstance(previous, EventOverlap) else previous
    if event is not None:
        comm.wait_event(event)
    if event is None or options.inputs_are_new:
        comm.wait_stream(current)
    run = _Run(comm if options.allocate_on_comm_stream or event is not None else current)
    with torch.cuda.stream(comm):
        yield run
    if options.async_with_compute_stream:
        run.event = EventOverlap(comm.record_event(), tuple(inputs))
    else:
        current.wait_stream(comm)


# ---------------------------------------------------------------- the backend


class CollectiveBackend:
    """One rank's side of the exchange over gloo or NCCL; see `tile_ep.backends.base.Backend`.

    It always learns row counts on the host, so `do_cpu_sync=False` decides sizes only, and nothing can be captured.
    """

    name = "collective"
    num_bytes = 0  # no memory is held between calls

    def __init__(self, store: Store, rank: int, num_ranks: int, config: BufferConfig, device: torch.device) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self._config = config
        self._comm_stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._wire = Wire(store, rank, num_ranks, device, config.timeout_s)
        self._planner = Planner(self._wire, config.expand_factor)

    @classmethod
    def from_process_group(
        cls, group: dist.ProcessGroup, config: BufferConfig, device: torch.device, name: str
    ) -> CollectiveBackend:
        """Build the communicator of one buffer. Collective over `group`.

        Args:
            name: the same on all ranks, and never used before on this group.

        Raises:
            BackendUnavailableError: this PyTorch has no gloo, or no NCCL.
            PeerTimeoutError: a rank did not come.
        """
        needed, there = (
            ("nccl", dist.is_nccl_available()) if device.type == "cuda" else ("gloo", dist.is_gloo_available())
        )
        if not there:
            raise BackendUnavailableError(f"backend='collective' on {device} needs {needed}, which this PyTorch lacks")
        store = PrefixStore(f"tile_ep/{name}", group.get_group_store())
        return cls(store, group.rank(), group.size(), config, device)

    # ------------------------------------------------------------ dispatch

    @torch.no_grad()
    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        parts = request.x if isinstance(request.x, tuple) else (request.x,)
        given = (request.topk_idx, request.topk_weights, request.stats)
        inputs = [*parts, *(tensor for tensor in given if tensor is not None)]
        with _running(self._comm_stream, request.streams, inputs) as run:
            if request.handle is None:
                handle, num_bad = self._planner.make(request)
            else:
                handle, num_bad = request.handle, 0
                self._check_replay(request, handle)
            plan: Plan = handle.plan
            expansion = plan.expansion if request.do_expand else None
            route = plan.route if expansion is None else expansion.route
            received = [self._send_part(part, i == 1, request, plan, route, run) for i, part in enumerate(parts)]
            if len(received) == 2 and request.use_tma_aligned_col_major_sf:
                received[1] = column_major(received[1])
            weights = self._send_weights(request.topk_weights, plan, expansion, run)
            topk_idx = None if expansion is not None else self._topk_idx(handle, run)
            if request.stats is not None:
                request.stats.add_(plan.expert_counts)
        if num_bad:
            raise RoutingError(num_bad, request.num_experts)
        recv_x = received[0] if len(received) == 1 else (received[0], received[1])
        return DispatchResult(recv_x, topk_idx, weights, handle, run.event)

    def _check_replay(self, request: DispatchRequest, handle: EPHandle) -> None:
        """On CPUs, check that all ranks replay the same dispatch alike; on GPUs that would stop the host."""
        if self.device.type == "cpu":
            words = {"call": CALLS.index("cached dispatch"), **payload_words(request)}
            words["number of the dispatch that made the handle"] = handle.plan.number
            self._wire.enter(words, self._nothing())

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(self.num_ranks + 1, dtype=torch.int64, device=self.device)

    def _send_part(
        self, part: torch.Tensor, is_scales: bool, request: DispatchRequest, plan: Plan, route: Route, run: _Run
    ) -> torch.Tensor:
        """Data or scales of the payload, as bytes, into an output of the layout asked for."""
        phase = "scales" if is_scales else "rows"
        expansion = plan.expansion if request.do_expand else None
        rows = plan.rows if expansion is None else expansion.rows
        out = run.allocate((rows, row_bytes(part)), torch.uint8, self.device)
        sending = part.view(torch.uint8).index_select(0, route.tokens)
        arriving = sum(route.received)
        if expansion is None:
            self._wire.exchange(sending, route.sent, route.received, phase, out[:arriving])
            if is_scales:
                out[arriving:].zero_()  # a tail that is read by mistake stays finite
        else:
            if request.do_zero_padding or is_scales:
                out.zero_()
            received = self._wire.exchange(sending, route.sent, route.received, phase)
            out.index_copy_(0, expansion.targets, received.index_select(0, expansion.sources))
        return out.view(part.dtype)

    def _send_weights(
        self, weights: torch.Tensor | None, plan: Plan, expansion: Expansion | None, run: _Run
    ) -> torch.Tensor | None:
        if weights is None:
            return None
        route = plan.route if expansion is None else expansion.route
        sending = weights.index_select(0, route.tokens)
        received = self._wire.exchange(sending, route.sent, route.received, "weights")
        if expansion is None:
            out = run.allocate((plan.rows, weights.shape[1]), torch.float32, self.device).zero_()
            out[: len(received)] = received
            return out
        out = run.allocate((expansion.rows,), torch.float32, self.device).zero_()
        return out.index_copy_(0, expansion.targets, received.flatten()[expansion.selections])

    def _topk_idx(self, handle: EPHandle, run: _Run) -> torch.Tensor:
        plan: Plan = handle.plan
        shape = (plan.rows, plan.recv_topk.shape[1])
        out = run.allocate(shape, handle.topk_idx.dtype, self.device).fill_(-1)
        out[: len(plan.recv_topk)] = plan.recv_topk.to(out.dtype)
        return out

    # ------------------------------------------------------------ combine

    @torch.no_grad()
    def combine(self, request: CombineRequest) -> CombineResult:
        handle, plan = request.handle, request.handle.plan
        expansion = plan.expansion if handle.do_expand else None
        if expansion is not None and expansion.overflow is not None:
            raise expansion.overflow
        inputs = [request.x, *request.bias, *([] if request.topk_weights is None else [request.topk_weights])]
        with _running(self._comm_stream, request.streams, inputs) as run:
            if self.device.type == "cpu":
                self._wire.enter(self._combine_words(request), self._nothing())
            route: Route = plan.route
            if expansion is None:
                sending, weights = request.x[: sum(route.received)], request.topk_weights
            else:
                sending, weights = self._sum_locally(request, plan, expansion)
            returned = self._wire.exchange(
                sending.contiguous().view(torch.uint8), route.received, route.sent, "combined rows"
            ).view(request.x.dtype)
            total = self._accumulate(request, returned, plan)
            out = run.allocate(total.shape, request.x.dtype, self.device)
            out.copy_(total)
            combined_weights = None
            if weights is not None:
                combined_weights = self._return_weights(weights, handle, run)
        return CombineResult(out, combined_weights, run.event)

    def _combine_words(self, request: CombineRequest) -> dict[str, int]:
        return {
            "call": CALLS.index("combine"),
            "bytes of data per row": row_bytes(request.x),
            "dtype of data": dtype_code(request.x),
            "topk_weights given": int(request.topk_weights is not None),
            "do_expand": int(request.handle.do_expand),
            "number of the dispatch that made the handle": request.handle.plan.number,
        }

    def _sum_locally(
        self, request: CombineRequest, plan: Plan, expansion: Expansion
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For each received row the fp32 sum of its expanded rows, `k` ascending; and its weights, `[n, K]`."""
        num_received = len(plan.recv_topk)
        total = torch.zeros((num_received, request.x.shape[1]), dtype=torch.float32, device=self.device)
        for targets, sources in expansion.steps:
            rows = request.x.index_select(0, sources).float()
            if request.apply_weights:
                assert request.topk_weights is not None
                rows = rows * request.topk_weights.index_select(0, sources)[:, None]
            _add_rows(total, targets, rows)
        weights = None
        if request.topk_weights is not None:
            weights = torch.zeros(plan.recv_topk.shape, dtype=torch.float32, device=self.device)
            weights.view(-1).index_copy_(0, expansion.selections, request.topk_weights[expansion.targets])
        return total.to(request.x.dtype), weights

    def _accumulate(self, request: CombineRequest, returned: torch.Tensor, plan: Plan) -> torch.Tensor:
        """`[T, H]` fp32: biases, then one row per rank in the order in which the token first names it."""
        if request.bias:
            total = request.bias[0].to(torch.float32, copy=True)
            for bias in request.bias[1:]:
                total += bias.float()
        else:
            shape = (len(request.handle.topk_idx), request.x.shape[1])
            total = torch.zeros(shape, dtype=torch.float32, device=self.device)
        for targets, sources in plan.steps:
            _add_rows(total, targets, returned.index_select(0, sources).float())
        return total

    def _return_weights(self, weights: torch.Tensor, handle: EPHandle, run: _Run) -> torch.Tensor:
        """`[T, K]`: the entry of selection `k` from its rank, 0 where nothing is selected."""
        plan: Plan = handle.plan
        arrived = sum(plan.route.received)
        returned = self._wire.exchange(weights[:arrived].contiguous(), plan.route.received, plan.route.sent, "weights")
        out = run.allocate(handle.topk_idx.shape, torch.float32, self.device).zero_()
        out.view(-1).index_copy_(0, plan.weight_targets, returned.flatten()[plan.weight_sources])
        return out

    def combine_input(self, handle: EPHandle, dtype: torch.dtype) -> torch.Tensor:
        """Fresh memory of the right shape; this backend has no zero-copy path."""
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        return torch.empty((rows, self._config.hidden), dtype=dtype, device=self.device)

    # ------------------------------------------------------------ everything else

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with _running(self._comm_stream, StreamOptions(), ()):
            self._wire.enter({"call": CALLS.index("barrier")}, self._nothing())

    def agree(self, values: dict[str, object]) -> None:
        """Raise `DisagreementError` on every rank if the ranks gave different values for a name."""
        with _running(self._comm_stream, StreamOptions(), ()):
            mine = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8).to(self.device)
            words = {"call": CALLS.index("agreement check")}
            sizes = torch.full((self.num_ranks + 1,), len(mine), dtype=torch.int64, device=self.device)
            received = [row[self.rank] for row in self._wire.enter(words, sizes)]
            sent = [len(mine)] * self.num_ranks
            joined = self._wire.exchange(mine.repeat(self.num_ranks), sent, received, "agreement check").cpu()
        said = [pickle.loads(bytes(part.tolist())) for part in joined.split(received)]
        for name in dict.fromkeys(name for answers in said for name in answers):
            answers = [of_rank.get(name) for of_rank in said]
            if any(answer != answers[0] for answer in answers):
                raise DisagreementError(name, answers)

    def reset(self) -> None:
        """A fresh communicator. Collective: every rank calls it equally often."""
        self._wire.reconnect()

    def destroy(self) -> None:
        """Close the communicator. Local, idempotent, safe at interpreter exit."""
        self._wire.close()


def _add_rows(total: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor) -> None:
    """`total[targets] += rows`, for ascending, distinct targets."""
    if len(targets) == len(total):
        total += rows
    elif total.device.type == "cpu":
        total.index_add_(0, targets, rows)
    else:  # index_add_ uses atomics there, which flush subnormal numbers
        total.index_copy_(0, targets, total.index_select(0, targets) + rows)
