"""What the collective backend works out from the routing: which rows go where, and where they land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from tile_ep.backends.base import DispatchRequest
from tile_ep.backends.collective_wire import CALLS, Wire, dtype_code, row_bytes
from tile_ep.errors import CapacityError
from tile_ep.handle import EPHandle
from tile_ep.layout import (
    ExpertPartition,
    align,
    expand_factor_for,
    expanded_capacity,
    expanded_starts,
    rank_capacity,
)

Step = tuple[torch.Tensor, torch.Tensor]
"""`(targets, sources)`, int64 rows: `out[targets] += rows[sources]`. No target occurs twice."""


@dataclass(frozen=True)
class Route:
    """Which rows go where. `tokens` is ordered by (destination, token)."""

    tokens: torch.Tensor  # [sum(sent)] int64
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class Expansion:
    """The expanded layout of this rank. An overflowing rank has no rows."""

    rows: int  # rows of the output
    targets: torch.Tensor  # [M] int64, expanded row of each local selection
    sources: torch.Tensor  # [M] int64, its row in the rank layout
    selections: torch.Tensor  # [M] int64, its position in the flattened [n, K] metadata
    steps: list[Step]  # for k ascending: rank-layout row += expanded row
    route: Route  # overflowing destinations left out
    overflow: CapacityError | None


@dataclass(frozen=True)
class Plan:
    """What `EPHandle.plan` holds for this backend."""

    number: int  # of the dispatch, the same on all ranks
    route: Route
    rows: int  # rows of rank-layout outputs: those received, or the capacity
    recv_topk: torch.Tensor  # [n, K] int32, local experts or -1
    expert_counts: torch.Tensor  # [E_local] int32
    steps: list[Step]  # by rank first named: token += returned row
    weight_targets: torch.Tensor  # [M] int64, positions in the flattened [T, K]
    weight_sources: torch.Tensor  # [M] int64, positions in the flattened returned [sum(sent), K]
    expansion: Expansion | None


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
class Routing:
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


def payload_words(request: DispatchRequest) -> dict[str, int]:
    data, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
    return {
        "num_experts": request.num_experts,
        "num_max_tokens_per_rank": request.num_max_tokens_per_rank,
        "expert_alignment": request.expert_alignment,
        "bytes of data per row": row_bytes(data),
        "dtype of data": dtype_code(data),
        "bytes of scales per row": row_bytes(scales),
        "dtype of scales": dtype_code(scales),
        "topk_weights given": int(request.topk_weights is not None),
        "do_expand": int(request.do_expand),
        "do_cpu_sync": int(request.do_cpu_sync),
    }


class Planner:
    """Makes the plan of each dispatch, exchanging counts and metadata."""

    def __init__(self, wire: Wire, expand_factor: float) -> None:
        self._wire, self._expand_factor = wire, expand_factor
        self.rank, self.num_ranks, self.device = wire.rank, wire.num_ranks, wire.device

    def make(self, request: DispatchRequest) -> tuple[EPHandle, int]:
        """Exchange counts and metadata. Returns the handle and how many entries of `topk_idx` were out of range."""
        assert request.topk_idx is not None
        partition = ExpertPartition(request.num_experts, self.num_ranks)
        num_topk = request.topk_idx.shape[1]
        routing = self._resolve(request.topk_idx, partition)

        words = {"call": CALLS.index("dispatch"), "num_topk": num_topk, **payload_words(request)}
        table = self._wire.enter(words, torch.cat([routing.sent, routing.num_bad]))
        number = self._wire.epoch
        sent, num_bad = table[self.rank][:-1], table[self.rank][-1]
        received = [row[self.rank] for row in table]
        route = Route(routing.tokens, sent, received)
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
        plan = Plan(
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

    def _resolve(self, topk_idx: torch.Tensor, partition: ExpertPartition) -> Routing:
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
        routing = Routing(expert, owner, bad.sum().reshape(1))
        routing.place(self.num_ranks)
        return routing

    def _expand(
        self,
        request: DispatchRequest,
        partition: ExpertPartition,
        routing: Routing,
        route: Route,
        recv_topk: torch.Tensor,
    ) -> tuple[Expansion, torch.Tensor, torch.Tensor, torch.Tensor]:
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
        expansion = Expansion(
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
            self._expand_factor,
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
            self._expand_factor,
            max(factors),
        )

    def _without(self, route: Route, fits: list[bool]) -> Route:
        """`route` without the rows for ranks that overflow."""
        keep = torch.repeat_interleave(
            torch.tensor(fits, device=self.device), torch.tensor(route.sent, device=self.device)
        )
        sent = [rows if fit else 0 for rows, fit in zip(route.sent, fits, strict=True)]
        received = route.received if fits[self.rank] else [0] * self.num_ranks
        return Route(route.tokens[keep], sent, received)

    def _source_metadata(
        self, tokens: torch.Tensor, plan: Plan, request: DispatchRequest, expanded_rows: torch.Tensor | None
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
