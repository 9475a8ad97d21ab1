"""The exchange over `torch.distributed`: gloo between CPUs, NCCL between GPUs of any number of nodes.

Every step is an all-to-all with uneven splits. A rank sends its rows ordered by (destination, token), so
what arrives is ordered by (source, token): the row order of the rank layout, without sorting.

A buffer has a communicator of its own. Its collectives therefore cannot be confused with the caller's,
two buffers can be used from two threads, and `reset` can replace it after a peer was lost.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from tile_ep.backends.base import (
    BufferConfig,
    CombineRequest,
    CombineResult,
    DispatchRequest,
    DispatchResult,
    StreamOptions,
)
from tile_ep.errors import (
    BackendUnavailableError,
    CapacityError,
    CaptureError,
    DisagreementError,
    PeerTimeoutError,
    RoutingError,
)
from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle
from tile_ep.layout import (
    ExpertPartition,
    align,
    expand_factor_for,
    expanded_capacity,
    expanded_starts,
    rank_capacity,
)

# ---------------------------------------------------------------- what every collective begins with

_CALLS = ("dispatch", "cached dispatch", "combine", "barrier", "agreement check")
_DTYPES = tuple(sorted(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)))

_AGREED = (
    "call",
    "num_experts",
    "num_topk",
    "num_max_tokens_per_rank",
    "expert_alignment",
    "bytes of data per row",
    "dtype of data",
    "bytes of scales per row",
    "dtype of scales",
    "topk_weights given",
    "do_expand",
    "do_cpu_sync",
    "number of the dispatch that made the handle",
)
"""The entry words, in order. A rank sends them to all others before anything whose size depends on them."""


def _decode(name: str, word: int) -> object:
    """An entry word as a person reads it."""
    if name == "call":
        return _CALLS[word]
    if name.startswith("dtype"):
        return _DTYPES[word - 1] if word else None
    if name in ("topk_weights given", "do_expand", "do_cpu_sync"):
        return bool(word)
    return word


def _dtype_code(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else 1 + _DTYPES.index(str(tensor.dtype).removeprefix("torch."))


def _row_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[1] * tensor.element_size()


# ---------------------------------------------------------------- bytes between ranks, with bounded waits

_NOTE_AFTER_S = 1.0  # a rank that has waited this long leaves a note in the store
_GRACE_S = 2.0  # how long a rank that gives up waits for the notes of others
_LOST = re.compile(r"tim(ed|e) ?out|connect|socket|broken pipe|reset by peer|closed", re.IGNORECASE)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception of `torch.distributed` says that a peer is late or gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


class _Wire:
    """All-to-alls on a private communicator.

    When a wait expires, the ranks that are missing are found through the store: whoever waits for long
    leaves the number of its collective there. Nothing is written as long as everybody is on time.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.num_ranks, self.device, self.timeout_s = rank, num_ranks, device, timeout_s
        self.epoch = 0
        self._root, self._generation = store, 0
        self._connect()

    def _connect(self) -> None:
        self._store = dist.PrefixStore(str(self._generation), self._root)
        started = time.monotonic()
        try:
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                # Waits are bounded here; NCCL's own watchdog would take the process down.
                options._timeout = timedelta(seconds=2 * self.timeout_s + 60)
                self._comm: Any = dist.ProcessGroupNCCL(self._store, self.rank, self.num_ranks, options)
            else:
                timeout = timedelta(seconds=self.timeout_s)
                self._comm = dist.ProcessGroupGloo(self._store, self.rank, self.num_ranks, timeout)
        except RuntimeError as error:
            raise self._lost("connect", error, started) from error

    def reconnect(self) -> None:
        """A fresh communicator. Collective: every rank calls it equally often."""
        self.close()
        self._generation += 1
        self.epoch = 0
        self._connect()

    def close(self) -> None:
        """Drop the communicator. Local."""
        comm, self._comm = self._comm, None
        if comm is not None and self.device.type == "cuda":
            comm.abort()

    def enter(self, values: dict[str, int], rows: torch.Tensor) -> list[list[int]]:
        """Begin a collective: check that all ranks make the same call, and exchange `rows`.

        Args:
            values: entry words by their name in `_AGREED`; 0 where the call has none.
            rows: `[L]` int64 on the device, `L` the same on all ranks.

        Returns:
            `rows` of every rank, as `[R][L]`.

        Raises:
            DisagreementError: on every rank.
        """
        words = torch.tensor([values.get(name, 0) for name in _AGREED], dtype=torch.int64, device=self.device)
        table = self.share(torch.cat([words, rows]), f"enter {_CALLS[values['call']]}")
        for column, name in enumerate(_AGREED):
            said = [row[column] for row in table]
            if len(set(said)) > 1:
                raise DisagreementError(name, [_decode(name, word) for word in said])
        return [row[len(_AGREED) :] for row in table]

    def share(self, words: torch.Tensor, phase: str) -> list[list[int]]:
        """`words` (`[L]` int64) of every rank, on the host."""
        self.epoch += 1
        received = self.exchange(words.expand(self.num_ranks, -1).contiguous(), None, None, phase)
        return self.to_host(received, phase)

    def exchange(
        self,
        rows: torch.Tensor,
        sent: list[int] | None,
        received: list[int] | None,
        phase: str,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send `rows` (`[sum(sent), W]`, ordered by destination); returns what arrives, ordered by source.

        Args:
            sent: rows for each rank; `None` for one each.
            received: rows from each rank; `None` for one each.
            out: `[sum(received), W]` to receive into.
        """
        if out is None:
            shape = (self.num_ranks if received is None else sum(received), *rows.shape[1:])
            out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        started = time.monotonic()
        try:
            self._finish(self._comm.alltoall_base(out, rows, received or [], sent or []))
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise self._lost(phase, error, started) from error
        return out

    def _finish(self, work: dist.Work) -> None:
        if self.device.type == "cuda":
            work.wait()  # orders the streams; the host waits in to_host
            return
        try:
            work.wait(timedelta(seconds=_NOTE_AFTER_S))
        except RuntimeError:
            self._note()
            work.wait()  # raises again if the work failed, rather than being merely late

    def to_host(self, words: torch.Tensor, phase: str) -> list[list[int]]:
        if self.device.type == "cuda":
            started, noted = time.monotonic(), False
            event = torch.cuda.Event()
            event.record()
            while not event.query():
                waited = time.monotonic() - started
                if waited > _NOTE_AFTER_S and not noted:
                    self._note()
                    noted = True
                if waited > self.timeout_s:
                    error = self._lost(phase, None, started)
                    self.close()
                    raise error
                time.sleep(min(waited, 1e-4))
        table: list[list[int]] = words.tolist()
        return table

    def _note(self) -> None:
        try:
            self._store.set(f"waiting/{self.rank}", str(self.epoch))
        except RuntimeError:
            pass  # the store's host may be the rank that was lost

    def _is_waiting(self, rank: int) -> bool:
        key = f"waiting/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self.epoch

    def _lost(self, phase: str, cause: RuntimeError | None, started: float) -> PeerTimeoutError:
        waited = time.monotonic() - started
        self._note()
        missing = [rank for rank in range(self.num_ranks) if rank != self.rank]
        deadline = time.monotonic() + min(_GRACE_S, self.timeout_s)
        try:
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._is_waiting(rank)]
                time.sleep(0.02)
        except RuntimeError:
            missing = []
        return PeerTimeoutError(self.rank, phase, missing, self.epoch, round(waited, 2))


# ---------------------------------------------------------------- the plan of a dispatch

Step = tuple[torch.Tensor, torch.Tensor]
"""`(targets, sources)`, int64 rows: `out[targets] += rows[sources]`. No target occurs twice."""


@dataclass(frozen=True)
class _Route:
    """Which rows go where. `tokens` is ordered by (destination, token)."""

    tokens: torch.Tensor  # [sum(sent)] int64
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class _Expansion:
    """The expanded layout of this rank. An overflowing rank has no rows."""

    rows: int  # rows of the output
    targets: torch.Tensor  # [M] int64, expanded row of each local selection
    sources: torch.Tensor  # [M] int64, its row in the rank layout
    selections: torch.Tensor  # [M] int64, its position in the flattened [n, K] metadata
    steps: list[Step]  # for k ascending: rank-layout row += expanded row
    route: _Route  # overflowing destinations left out
    overflow: CapacityError | None


@dataclass(frozen=True)
class _Plan:
    """What `EPHandle.plan` holds for this backend."""

    number: int  # of the dispatch, the same on all ranks
    route: _Route
    rows: int  # rows of rank-layout outputs: those received, or the capacity
    recv_topk: torch.Tensor  # [n, K] int32, local experts or -1
    expert_counts: torch.Tensor  # [E_local] int32
    steps: list[Step]  # by rank first named: token += returned row
    weight_targets: torch.Tensor  # [M] int64, positions in the flattened [T, K]
    weight_sources: torch.Tensor  # [M] int64, positions in the flattened returned [sum(sent), K]
    expansion: _Expansion | None


def _position_in_group(groups: torch.Tensor) -> torch.Tensor:
    """For each entry of `groups` (`[M]`), how many earlier entries are equal to it."""
    order = torch.argsort(groups, stable=True)
    in_order = groups[order]
    first = torch.searchsorted(in_order, in_order)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=groups.device) - first
    return position


def _steps(rows: torch.Tensor) -> list[Step]:
    """For each column of `rows` (`[M, K]`, -1 for none), the entries that are there, as a `Step`."""
    return [(at := column.ge(0).nonzero()[:, 0], column[at]) for column in rows.unbind(1)]


def _first_of_its_rank(owner: torch.Tensor) -> torch.Tensor:
    """`[T, K]` bool: no earlier selection of the token is on the same rank."""
    first = torch.ones_like(owner, dtype=torch.bool)
    for k in range(1, owner.shape[1]):
        first[:, k] = (owner[:, :k] != owner[:, k : k + 1]).all(dim=1)
    return first


@dataclass
class _Routing:
    """Selections of this rank's tokens, resolved to ranks and to rows there."""

    expert: torch.Tensor  # [T, K] int64, -1 for none
    owner: torch.Tensor  # [T, K] int64, -1 for none
    num_bad: torch.Tensor  # [1] int64, entries out of range
    order: torch.Tensor = field(init=False)  # [T, R] int64, earlier tokens for the same rank
    sent: torch.Tensor = field(init=False)  # [R] int64
    tokens: torch.Tensor = field(init=False)  # [sum(sent)] int64

    def place(self, num_ranks: int) -> None:
        names = torch.where(self.owner >= 0, self.owner, num_ranks)
        member = names.new_zeros((len(names), num_ranks + 1), dtype=torch.bool).scatter_(1, names, True)[:, :-1]
        self.order = member.cumsum(0) - 1
        self.sent = member.sum(0)
        self.tokens = member.t().nonzero()[:, 1]

    def rows(self, base: Sequence[int]) -> torch.Tensor:
        """`[T, K]` int64: `base` of the selection's rank plus the token's place among its tokens there; -1 for none."""
        at = self.owner.clamp(min=0)
        first = torch.tensor(base, dtype=torch.int64, device=at.device)
        return torch.where(self.owner >= 0, self.order.gather(1, at) + first[at], -1)


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
    else:
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

    def __init__(
        self, store: dist.Store, rank: int, num_ranks: int, config: BufferConfig, device: torch.device
    ) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self._config = config
        self._comm_stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._wire = _Wire(store, rank, num_ranks, device, config.timeout_s)

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
        store = dist.PrefixStore(f"tile_ep/{name}", group.get_group_store())
        return cls(store, group.rank(), group.size(), config, device)

    # ------------------------------------------------------------ dispatch

    @torch.no_grad()
    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        parts = request.x if isinstance(request.x, tuple) else (request.x,)
        given = (request.topk_idx, request.topk_weights, request.stats)
        inputs = [*parts, *(tensor for tensor in given if tensor is not None)]
        with _running(self._comm_stream, request.streams, inputs) as run:
            if request.handle is None:
                handle, num_bad = self._make_plan(request)
            else:
                handle, num_bad = request.handle, 0
                self._check_replay(request, handle)
            plan: _Plan = handle.plan
            expansion = plan.expansion if request.do_expand else None
            route = plan.route if expansion is None else expansion.route
            received = [self._send_part(part, i == 1, request, plan, route, run) for i, part in enumerate(parts)]
            if len(received) == 2 and request.use_tma_aligned_col_major_sf:
                received[1] = _column_major(received[1])
            weights = self._send_weights(request.topk_weights, plan, expansion, run)
            topk_idx = None if expansion is not None else self._topk_idx(handle, run)
            if request.stats is not None:
                request.stats.add_(plan.expert_counts)
        if num_bad:
            raise RoutingError(num_bad, request.num_experts)
        recv_x = received[0] if len(received) == 1 else (received[0], received[1])
        return DispatchResult(recv_x, topk_idx, weights, handle, run.event)

    def _payload_words(self, request: DispatchRequest) -> dict[str, int]:
        data, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
        return {
            "num_experts": request.num_experts,
            "num_max_tokens_per_rank": request.num_max_tokens_per_rank,
            "expert_alignment": request.expert_alignment,
            "bytes of data per row": _row_bytes(data),
            "dtype of data": _dtype_code(data),
            "bytes of scales per row": _row_bytes(scales),
            "dtype of scales": _dtype_code(scales),
            "topk_weights given": int(request.topk_weights is not None),
            "do_expand": int(request.do_expand),
            "do_cpu_sync": int(request.do_cpu_sync),
        }

    def _check_replay(self, request: DispatchRequest, handle: EPHandle) -> None:
        """On CPUs, check that all ranks replay the same dispatch with the same sizes; on GPUs that would stop the host."""
        if self.device.type == "cpu":
            words = {"call": _CALLS.index("cached dispatch"), **self._payload_words(request)}
            words["number of the dispatch that made the handle"] = handle.plan.number
            self._wire.enter(words, self._nothing())

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(self.num_ranks + 1, dtype=torch.int64, device=self.device)

    def _make_plan(self, request: DispatchRequest) -> tuple[EPHandle, int]:
        """Exchange counts and metadata. Returns the handle and how many entries of `topk_idx` were out of range."""
        assert request.topk_idx is not None
        partition = ExpertPartition(request.num_experts, self.num_ranks)
        num_topk = request.topk_idx.shape[1]
        routing = self._resolve(request.topk_idx, partition)

        words = {"call": _CALLS.index("dispatch"), "num_topk": num_topk, **self._payload_words(request)}
        table = self._wire.enter(words, torch.cat([routing.sent, routing.num_bad]))
        number = self._wire.epoch
        sent, num_bad = table[self.rank][:-1], table[self.rank][-1]
        received = [row[self.rank] for row in table]
        route = _Route(routing.tokens, sent, received)
        slots = routing.rows([sum(row[d] for row in table[: self.rank]) for d in range(self.num_ranks)])
        returned = routing.rows([0, *accumulate(sent)][:-1])

        meta = torch.cat([torch.arange(len(slots), device=self.device)[:, None], routing.expert], dim=1).to(torch.int32)
        meta = self._wire.exchange(meta.index_select(0, route.tokens), sent, received, "metadata")
        first, num_local = partition.first(self.rank), partition.num_local(self.rank)
        local = meta[:, 1:] - first
        recv_topk = torch.where((meta[:, 1:] >= first) & (local < num_local), local, -1)
        counts = torch.bincount(recv_topk[recv_topk >= 0], minlength=num_local)

        expansion, dst_expanded, needed, expanded_rows = None, None, None, None
        if request.do_expand:
            expansion, dst_expanded, needed, expanded_rows = self._expand(request, partition, routing, route, recv_topk)
        num_received = len(recv_topk)
        rows = num_received if request.do_cpu_sync else rank_capacity(self.num_ranks, request.num_max_tokens_per_rank)
        at = returned.flatten().ge(0).nonzero()[:, 0]
        plan = _Plan(
            number=number,
            route=route,
            rows=rows,
            recv_topk=recv_topk,
            expert_counts=counts.to(torch.int32),
            steps=_steps(torch.where(_first_of_its_rank(routing.owner), returned, -1)),
            weight_targets=at,
            weight_sources=returned.flatten()[at] * num_topk + at % num_topk,
            expansion=expansion,
        )
        count_list: list[int] = counts.tolist() if request.do_cpu_sync else []
        aligned = counts.add(request.expert_alignment - 1).div(request.expert_alignment, rounding_mode="floor")
        ends = aligned.mul(request.expert_alignment).cumsum(0)
        starts = ends - aligned.mul(request.expert_alignment)
        handle = EPHandle(
            do_expand=request.do_expand,
            num_experts=request.num_experts,
            expert_alignment=request.expert_alignment,
            num_max_tokens_per_rank=request.num_max_tokens_per_rank,
            num_sms=request.num_sms,
            topk_idx=request.topk_idx.clone() if request.do_handle_copy else request.topk_idx,
            num_recv_tokens=rows,
            num_expanded_tokens=0 if expansion is None else expansion.rows,
            num_recv_tokens_per_expert_list=[align(count, request.expert_alignment) for count in count_list],
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(
                list(accumulate(received)), dtype=torch.int32, device=self.device
            ),
            psum_num_recv_tokens_per_expert=(starts + counts if request.do_expand else ends).to(torch.int32),
            num_unaligned_recv_tokens_per_expert=counts.to(torch.int32),
            recv_src_metadata=self._source_metadata(meta[:, 0], plan, request, expanded_rows),
            dst_buffer_slot_idx=slots.to(torch.int32),
            dst_expanded_idx=dst_expanded,
            num_rows_needed=needed,
            rank=self.rank,
            num_ranks=self.num_ranks,
            plan=plan,
        )
        return handle, num_bad

    def _resolve(self, topk_idx: torch.Tensor, partition: ExpertPartition) -> _Routing:
        """Experts and their ranks. Out-of-range entries select nothing and are counted (CPUs refuse them earlier)."""
        index = topk_idx.to(torch.int64)
        valid = (index >= 0) & (index < partition.num_experts)
        bad = (index != -1) & ~valid
        per_rank = [partition.num_local(rank) for rank in range(self.num_ranks)]
        owner_of = torch.repeat_interleave(
            torch.arange(self.num_ranks, device=self.device), torch.tensor(per_rank, device=self.device)
        )
        expert = torch.where(valid, index, -1)
        owner = torch.where(valid, owner_of[expert.clamp(min=0)], -1)
        routing = _Routing(expert, owner, bad.sum().reshape(1))
        routing.place(self.num_ranks)
        return routing

    def _expand(
        self,
        request: DispatchRequest,
        partition: ExpertPartition,
        routing: _Routing,
        route: _Route,
        recv_topk: torch.Tensor,
    ) -> tuple[_Expansion, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the expanded layout here and, for this rank's selections, elsewhere; overflow, before any payload.

        Returns:
            The expansion, `dst_expanded_idx`, `num_rows_needed`, and the expanded row of each received selection.
        """
        expert = routing.expert.flatten()
        own = torch.bincount(expert[expert >= 0], minlength=partition.num_experts)
        shared = own.expand(self.num_ranks, -1).contiguous()
        counts = self._wire.exchange(shared, None, None, "expert counts")  # [R, E]
        per_expert: list[int] = self._wire.to_host(counts.sum(0, keepdim=True), "expert counts")[0]

        starts: list[int] = []
        needed, capacity = [], []
        for rank in range(self.num_ranks):
            bounds = expanded_starts(
                per_expert[partition.first(rank) : partition.first(rank + 1)], request.expert_alignment
            )
            starts.extend(bounds[:-1])
            needed.append(bounds[-1])
            capacity.append(self._capacity(request, partition, rank, routing.expert.shape[1]))
        overflow = self._overflow(request, partition, routing.expert.shape[1], needed, capacity)
        if overflow is not None and request.do_cpu_sync:
            raise overflow
        fits = [rows <= most for rows, most in zip(needed, capacity, strict=True)]

        first_row = torch.tensor(starts, dtype=torch.int64, device=self.device) + counts[: self.rank].sum(0)
        fits_on = torch.tensor(fits, device=self.device)
        there = (expert >= 0) & fits_on[routing.owner.flatten().clamp(min=0)]
        row = first_row[expert.clamp(min=0)] + _position_in_group(expert)
        dst_expanded = torch.where(there, row, -1).reshape(routing.expert.shape).to(torch.int32)

        here = torch.tensor(starts[partition.first(self.rank) : partition.first(self.rank + 1)], device=self.device)
        flat = recv_topk.flatten().to(torch.int64)
        rows = here[flat.clamp(min=0)] + _position_in_group(flat)
        if not fits[self.rank]:
            flat = torch.full_like(flat, -1)
        rows = torch.where(flat >= 0, rows, -1)
        selections = rows.ge(0).nonzero()[:, 0]
        expansion = _Expansion(
            rows=needed[self.rank] if request.do_cpu_sync else capacity[self.rank],
            targets=rows[selections],
            sources=selections // recv_topk.shape[1],
            selections=selections,
            steps=_steps(rows.reshape(recv_topk.shape)),
            route=route if all(fits) else self._without(route, fits),
            overflow=overflow,
        )
        rows_needed = torch.tensor(needed, dtype=torch.int32, device=self.device)
        return expansion, dst_expanded, rows_needed, rows.reshape(recv_topk.shape)

    def _capacity(self, request: DispatchRequest, partition: ExpertPartition, rank: int, num_topk: int) -> int:
        return expanded_capacity(
            partition,
            rank,
            request.num_max_tokens_per_rank,
            num_topk,
            request.expert_alignment,
            self._config.expand_factor,
        )

    def _overflow(
        self,
        request: DispatchRequest,
        partition: ExpertPartition,
        num_topk: int,
        needed: list[int],
        capacity: list[int],
    ) -> CapacityError | None:
        over = [rank for rank in range(self.num_ranks) if needed[rank] > capacity[rank]]
        if not over:
            return None
        factors = [
            expand_factor_for(
                partition, rank, request.num_max_tokens_per_rank, num_topk, request.expert_alignment, needed[rank]
            )
            for rank in over
        ]
        return CapacityError(
            {rank: needed[rank] for rank in over},
            {rank: capacity[rank] for rank in over},
            self._config.expand_factor,
            max(factors),
        )

    def _without(self, route: _Route, fits: list[bool]) -> _Route:
        """`route` without the rows for ranks that overflow."""
        keep = torch.repeat_interleave(
            torch.tensor(fits, device=self.device), torch.tensor(route.sent, device=self.device)
        )
        sent = [rows if fit else 0 for rows, fit in zip(route.sent, fits, strict=True)]
        received = route.received if fits[self.rank] else [0] * self.num_ranks
        return _Route(route.tokens[keep], sent, received)

    def _source_metadata(
        self, tokens: torch.Tensor, plan: _Plan, request: DispatchRequest, expanded_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """`[N, K + 2]` int32, see `EPHandle.recv_src_metadata`; rows past those received are -1."""
        num_received, num_topk = plan.recv_topk.shape
        source = torch.repeat_interleave(
            torch.arange(self.num_ranks, device=self.device), torch.tensor(plan.route.received, device=self.device)
        )
        first = plan.recv_topk.ge(0).to(torch.uint8).argmax(dim=1)
        metadata = torch.full((plan.rows, num_topk + 2), -1, dtype=torch.int32, device=self.device)
        metadata[:num_received, 0] = (source * request.num_max_tokens_per_rank + tokens).to(torch.int32)
        metadata[:num_received, 1] = (source * num_topk + first).to(torch.int32)
        if expanded_rows is not None:
            metadata[:num_received, 2:] = expanded_rows.to(torch.int32)
        return metadata

    def _send_part(
        self, part: torch.Tensor, is_scales: bool, request: DispatchRequest, plan: _Plan, route: _Route, run: _Run
    ) -> torch.Tensor:
        """Data or scales of the payload, as bytes, into an output of the layout asked for."""
        phase = "scales" if is_scales else "rows"
        expansion = plan.expansion if request.do_expand else None
        rows = plan.rows if expansion is None else expansion.rows
        out = run.allocate((rows, _row_bytes(part)), torch.uint8, self.device)
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
        self, weights: torch.Tensor | None, plan: _Plan, expansion: _Expansion | None, run: _Run
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
        plan: _Plan = handle.plan
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
            route: _Route = plan.route
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
            "call": _CALLS.index("combine"),
            "bytes of data per row": _row_bytes(request.x),
            "dtype of data": _dtype_code(request.x),
            "topk_weights given": int(request.topk_weights is not None),
            "do_expand": int(request.handle.do_expand),
            "number of the dispatch that made the handle": request.handle.plan.number,
        }

    def _sum_locally(
        self, request: CombineRequest, plan: _Plan, expansion: _Expansion
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One row per (token, rank): the sum of its expanded rows, `k` ascending, in fp32; and its weights, `[n, K]`."""
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

    def _accumulate(self, request: CombineRequest, returned: torch.Tensor, plan: _Plan) -> torch.Tensor:
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
        plan: _Plan = handle.plan
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
            self._wire.enter({"call": _CALLS.index("barrier")}, self._nothing())

    def agree(self, values: dict[str, object]) -> None:
        """Raise `DisagreementError` on every rank if the ranks gave different values for a name."""
        with _running(self._comm_stream, StreamOptions(), ()):
            mine = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8).to(self.device)
            words = {"call": _CALLS.index("agreement check")}
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
    """`total[targets] += rows`, for distinct targets."""
    total.index_copy_(0, targets, total.index_select(0, targets) + rows)


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same `[N, S]` values with stride `(1, N rounded up to 16 bytes)`, as TMA descriptors want it."""
    num_rows, num_scales = scales.shape
    rows = align(num_rows, max(1, 16 // scales.element_size()))
    store = torch.zeros((num_scales, rows * scales.element_size()), dtype=torch.uint8, device=scales.device)
    out = store.view(scales.dtype).t()[:num_rows]
    out.copy_(scales)
    return out
