"""Dispatch and combine of all ranks at once, in plain PyTorch: what every backend must give, to the bit.

Readable before fast. Lists are by rank; nothing is shared with the code it is the measure of but sizes and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tile_ep.errors import ArgumentError, CapacityError, RoutingError
from tile_ep.handle import EPHandle
from tile_ep.layout import (
    ExpertPartition,
    align,
    expand_factor_for,
    expanded_capacity,
    expanded_starts,
    rank_capacity,
)

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DispatchOutput:
    """What one rank gets from a dispatch."""

    recv_x: Payload
    recv_topk_idx: torch.Tensor | None
    recv_topk_weights: torch.Tensor | None
    handle: EPHandle


@dataclass(frozen=True)
class CombineOutput:
    """What one rank gets from a combine."""

    combined_x: torch.Tensor
    combined_topk_weights: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """What a handle of the reference remembers beyond its fields."""

    exact: bool  # outputs have as many rows as were received, not as many as could be
    expand_factor: float


def dispatch(
    xs: Sequence[Payload],
    topk_idxs: Sequence[torch.Tensor] | None,
    topk_weights: Sequence[torch.Tensor] | None = None,
    *,
    num_experts: int = 0,
    num_max_tokens_per_rank: int = 0,
    expert_alignment: int = 1,
    expand_factor: float = 2.0,
    stats: Sequence[torch.Tensor] | None = None,
    handles: Sequence[EPHandle] | None = None,
    do_cpu_sync: bool = True,
    do_handle_copy: bool = True,
    do_expand: bool = False,
    do_zero_padding: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
) -> list[DispatchOutput]:
    """Dispatch on every rank; arguments are those of `Buffer.dispatch`, as lists by rank.

    With `handles`, `topk_idxs` is `None` and the plans are replayed. Bytes that are undefined are filled with ones
    (NaN in every float format), so that whoever reads them shows it; scales beyond the count are zero, as they must be
    finite.

    Raises:
        RoutingError: an entry of `topk_idxs` is out of range.
        CapacityError: the expanded rows of some rank do not fit, and `do_cpu_sync` is set.
    """
    num_ranks = len(xs)
    if handles is not None:
        if do_expand and not handles[0].do_expand:
            raise ArgumentError("do_expand", True, "False for a rank-layout handle")
        first = handles[0]
        topk_idxs = [handle.topk_idx for handle in handles]
        num_experts, expert_alignment = first.num_experts, first.expert_alignment
        num_max_tokens_per_rank = first.num_max_tokens_per_rank
        exact, expand_factor = first.plan.exact, first.plan.expand_factor
    else:
        exact = do_cpu_sync
    assert topk_idxs is not None
    partition = ExpertPartition(num_experts, num_ranks)
    plan_expanded = do_expand if handles is None else handles[0].do_expand
    indices = [_checked(idx, num_experts) for idx in topk_idxs]
    owners = [_owners(idx, partition) for idx in indices]
    # Selections of each expert, over all ranks: the rows of its expanded segment.
    selected = torch.cat([idx[idx >= 0] for idx in indices])
    counts: list[int] = torch.bincount(selected, minlength=num_experts).tolist()

    rows = _rank_rows(owners, num_ranks)
    expanded_rows, rows_needed = None, None
    if plan_expanded:
        num_topk = indices[0].shape[1]
        capacity = {
            rank: expanded_capacity(partition, rank, num_max_tokens_per_rank, num_topk, expert_alignment, expand_factor)
            for rank in range(num_ranks)
        }
        expanded_rows, rows_needed = _expanded_rows(indices, counts, partition, expert_alignment)
        over = [rank for rank in range(num_ranks) if rows_needed[rank] > capacity[rank]]
        if over and exact:
            raise _capacity_error(
                {rank: rows_needed[rank] for rank in over},
                capacity, partition, num_max_tokens_per_rank, num_topk, expert_alignment, expand_factor,
            )  # fmt: skip
        for source, owner in enumerate(owners):
            for rank in over:
                expanded_rows[source][owner == rank] = -1
    if handles is None:
        handles = [
            _make_handle(
                rank, partition, indices, owners, counts, rows, expanded_rows, rows_needed,
                topk_idx=topk_idxs[rank].clone() if do_handle_copy else topk_idxs[rank],
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment,
                plan=_Plan(exact, expand_factor),
            )
            for rank in range(num_ranks)
        ]  # fmt: skip

    outputs = []
    for rank, handle in enumerate(handles):
        if stats is not None:
            stats[rank].add_(handle.num_unaligned_recv_tokens_per_expert)
        if do_expand:
            assert expanded_rows is not None
            assert handle.num_rows_needed is not None
            number, used = handle.num_expanded_tokens, int(handle.num_rows_needed[rank])
            where = [(owner == rank) & (row >= 0) for owner, row in zip(owners, expanded_rows, strict=True)]
            targets = torch.cat([row[mask] for row, mask in zip(expanded_rows, where, strict=True)])
            sources = [mask.nonzero()[:, 0] for mask in where]
            recv_topk_idx = None
            recv_weights = None
            if topk_weights is not None:
                recv_weights = torch.zeros(number)  # the tail has weight 0, gaps only where they are padded
                if not do_zero_padding:
                    recv_weights[:used] = torch.nan
                recv_weights[targets] = torch.cat(
                    [weights.float()[mask] for weights, mask in zip(topk_weights, where, strict=True)]
                )
        else:
            number = handle.num_recv_tokens
            sources = [(owner == rank).any(dim=1).nonzero()[:, 0] for owner in owners]
            used = sum(len(tokens) for tokens in sources)
            targets = torch.arange(used)
            local = torch.cat([_local(idx, partition, rank)[t] for idx, t in zip(indices, sources, strict=True)])
            recv_topk_idx = torch.full((number, local.shape[1]), -1, dtype=topk_idxs[rank].dtype)
            recv_topk_idx[targets] = local.to(recv_topk_idx.dtype)
            recv_weights = None
            if topk_weights is not None:
                recv_weights = torch.zeros(number, local.shape[1])
                recv_weights[targets] = torch.cat(
                    [weights.float()[t] for weights, t in zip(topk_weights, sources, strict=True)]
                )

        blank = 0 if do_expand and do_zero_padding else 0xFF

        def received(parts: list[torch.Tensor]) -> torch.Tensor:
            out = _filled((number, parts[0].shape[1]), parts[0].dtype, blank)  # noqa: B023
            moved = [_bytes(part)[t] for part, t in zip(parts, sources, strict=True)]  # noqa: B023
            out.view(torch.uint8)[targets] = torch.cat(moved)  # noqa: B023
            return out

        recv_x: Payload
        if isinstance(xs[rank], tuple):
            recv_scales = received([x[1] for x in xs])
            recv_scales.view(torch.uint8)[used:] = 0
            if use_tma_aligned_col_major_sf:
                recv_scales = _column_major(recv_scales)
            recv_x = received([x[0] for x in xs]), recv_scales
        else:
            recv_x = received(list(xs))  # type: ignore[arg-type]
        outputs.append(DispatchOutput(recv_x, recv_topk_idx, recv_weights, handle))
    return outputs


def combine(
    ys: Sequence[torch.Tensor],
    handles: Sequence[EPHandle],
    topk_weights: Sequence[torch.Tensor] | None = None,
    biases: Sequence[tuple[torch.Tensor, ...]] | None = None,
    *,
    apply_weights: bool = False,
) -> list[CombineOutput]:
    """Combine on every rank; arguments are those of `Buffer.combine`, as lists by rank.

    Raises:
        CapacityError: the dispatch overflowed.
    """
    num_ranks, first = len(ys), handles[0]
    partition = ExpertPartition(first.num_experts, num_ranks)
    if apply_weights and not (first.do_expand and topk_weights is not None):
        raise ArgumentError("apply_weights", True, "an expanded handle and topk_weights")
    _check_overflow(first, partition)
    if first.do_expand:
        weights = topk_weights if apply_weights else [None] * num_ranks
        assert weights is not None
        rank_rows = [_local_sum(y, handle, w) for y, handle, w in zip(ys, handles, weights, strict=True)]
    else:
        rank_rows = list(ys)

    outputs = []
    for rank, handle in enumerate(handles):
        idx = _checked(handle.topk_idx, first.num_experts)
        owner, rows = _owners(idx, partition), handle.dst_buffer_slot_idx.long()
        num_tokens, num_topk = idx.shape
        bias = () if biases is None else biases[rank]
        total = bias[0].float() if bias else torch.zeros(num_tokens, ys[rank].shape[1])
        if len(bias) > 1:
            total = total + bias[1].float()
        total = total.clone()
        # The first selection of a destination adds its row; so destinations come in the order they are first named.
        for k in range(num_topk):
            leads = (owner[:, k] >= 0) & ~(owner[:, :k] == owner[:, k : k + 1]).any(dim=1)
            for peer in range(num_ranks):
                tokens = (leads & (owner[:, k] == peer)).nonzero()[:, 0]
                total[tokens] += rank_rows[peer][rows[tokens, k]].float()
        combined_weights = None
        if topk_weights is not None:
            combined_weights = torch.zeros(num_tokens, num_topk)
            for peer in range(num_ranks):
                tokens, ks = (owner == peer).nonzero(as_tuple=True)
                if first.do_expand:
                    assert handle.dst_expanded_idx is not None
                    combined_weights[tokens, ks] = topk_weights[peer].float()[
                        handle.dst_expanded_idx.long()[tokens, ks]
                    ]
                else:
                    combined_weights[tokens, ks] = topk_weights[peer].float()[rows[tokens, ks], ks]
        outputs.append(CombineOutput(total.to(ys[rank].dtype), combined_weights))
    return outputs


def _checked(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    idx = topk_idx.long()
    bad = idx[(idx < -1) | (idx >= num_experts)]
    if bad.numel():
        raise RoutingError(bad.numel(), num_experts, int(bad[0]))
    return idx


def _owners(idx: torch.Tensor, partition: ExpertPartition) -> torch.Tensor:
    """`[T, K]`: the rank of each selection, -1 for none."""
    table = torch.tensor([partition.rank_of(expert) for expert in range(partition.num_experts)] + [-1])
    return table[idx]  # -1 picks the last entry


def _local(idx: torch.Tensor, partition: ExpertPartition, rank: int) -> torch.Tensor:
    """`[T, K]`: index of each selection among the experts of `rank`, -1 elsewhere."""
    start, end = partition.first(rank), partition.first(rank + 1)
    return torch.where((idx >= start) & (idx < end), idx - start, -1)


def _rank_rows(owners: list[torch.Tensor], num_ranks: int) -> list[torch.Tensor]:
    """`[T, K]` for each source: the token's row at the rank of selection k, in (source rank, token) order."""
    rows = [torch.full(owner.shape, -1) for owner in owners]
    for rank in range(num_ranks):
        start = 0
        for row, owner in zip(rows, owners, strict=True):
            sent = (owner == rank).any(dim=1)
            number = start + sent.cumsum(0) - 1
            row.copy_(torch.where(owner == rank, number.unsqueeze(1), row))
            start += int(sent.sum())
    return rows


def _expanded_rows(
    indices: list[torch.Tensor], counts: list[int], partition: ExpertPartition, alignment: int
) -> tuple[list[torch.Tensor], list[int]]:
    """`[T, K]` for each source: the row of each selection in its expert's segment; and the rows each rank needs."""
    rows, needed = [torch.full(idx.shape, -1) for idx in indices], []
    for rank in range(partition.num_ranks):
        first = partition.first(rank)
        starts = expanded_starts(counts[first : partition.first(rank + 1)], alignment)
        needed.append(starts[-1])
        for local, start in enumerate(starts[:-1]):
            row = start
            for source, idx in enumerate(indices):
                selected = idx == first + local
                number = int(selected.sum())
                rows[source][selected] = torch.arange(row, row + number)  # (token, k) ascending
                row += number
    return rows, needed


def _make_handle(
    rank: int,
    partition: ExpertPartition,
    indices: list[torch.Tensor],
    owners: list[torch.Tensor],
    counts: list[int],
    rows: list[torch.Tensor],
    expanded_rows: list[torch.Tensor] | None,
    rows_needed: list[int] | None,
    *,
    topk_idx: torch.Tensor,
    num_max_tokens_per_rank: int,
    expert_alignment: int,
    plan: _Plan,
) -> EPHandle:
    num_ranks, num_topk = partition.num_ranks, topk_idx.shape[1]
    per_source = [int((owner == rank).any(dim=1).sum()) for owner in owners]
    local_counts = counts[partition.first(rank) : partition.first(rank + 1)]
    aligned = [align(count, expert_alignment) for count in local_counts]
    starts = expanded_starts(local_counts, expert_alignment)
    expand = expanded_rows is not None
    psum_experts = [start + count for start, count in zip(starts, local_counts, strict=False)] if expand else starts[1:]
    num_rows = sum(per_source) if plan.exact else rank_capacity(num_ranks, num_max_tokens_per_rank)
    num_expanded = 0
    if expand:
        num_expanded = starts[-1]
        if not plan.exact:
            num_expanded = expanded_capacity(
                partition, rank, num_max_tokens_per_rank, num_topk, expert_alignment, plan.expand_factor
            )
    metadata = torch.full((num_rows, num_topk + 2), -1, dtype=torch.int32)
    start = 0
    for source, owner in enumerate(owners):
        here = owner == rank
        tokens = here.any(dim=1).nonzero()[:, 0]
        part = metadata[start : start + len(tokens)]
        part[:, 0] = source * num_max_tokens_per_rank + tokens
        part[:, 1] = source * num_topk + here[tokens].int().argmax(dim=1)
        if expanded_rows is not None:
            part[:, 2:] = torch.where(here, expanded_rows[source], -1)[tokens]
        start += len(tokens)
    return EPHandle(
        do_expand=expand,
        num_experts=partition.num_experts,
        expert_alignment=expert_alignment,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        num_sms=0,
        topk_idx=topk_idx,
        num_recv_tokens=num_rows,
        num_expanded_tokens=num_expanded,
        num_recv_tokens_per_expert_list=aligned if plan.exact else [],
        psum_num_recv_tokens_per_scaleup_rank=torch.tensor(per_source, dtype=torch.int32).cumsum(0).int(),
        psum_num_recv_tokens_per_expert=torch.tensor(psum_experts, dtype=torch.int32),
        num_unaligned_recv_tokens_per_expert=torch.tensor(local_counts, dtype=torch.int32),
        recv_src_metadata=metadata,
        dst_buffer_slot_idx=rows[rank].int(),
        dst_expanded_idx=None if expanded_rows is None else expanded_rows[rank].int(),
        num_rows_needed=None if rows_needed is None else torch.tensor(rows_needed, dtype=torch.int32),
        rank=rank,
        num_ranks=num_ranks,
        plan=plan,
    )


def _local_sum(y: torch.Tensor, handle: EPHandle, weights: torch.Tensor | None) -> torch.Tensor:
    """One row per received token: its expanded rows, `k` ascending, summed in fp32 and rounded once."""
    number = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    total = torch.zeros(number, y.shape[1])
    for rows in handle.recv_src_metadata[:number, 2:].long().unbind(dim=1):
        used = rows >= 0
        part = y[rows[used]].float()
        if weights is not None:
            part = part * weights.float()[rows[used]].unsqueeze(1)
        total[used] += part
    return total.to(y.dtype)


def _capacity_error(
    needed: dict[int, int],
    capacity: dict[int, int],
    partition: ExpertPartition,
    num_max_tokens_per_rank: int,
    num_topk: int,
    alignment: int,
    expand_factor: float,
) -> CapacityError:
    factor = max(
        expand_factor_for(partition, rank, num_max_tokens_per_rank, num_topk, alignment, rows)
        for rank, rows in needed.items()
    )
    return CapacityError(needed, {rank: capacity[rank] for rank in needed}, expand_factor, factor)


def _check_overflow(handle: EPHandle, partition: ExpertPartition) -> None:
    if handle.num_rows_needed is None:
        return
    sizes = handle.num_max_tokens_per_rank, handle.topk_idx.shape[1], handle.expert_alignment
    capacity = {
        rank: expanded_capacity(partition, rank, *sizes, handle.plan.expand_factor)
        for rank in range(partition.num_ranks)
    }
    needed = {rank: rows for rank, rows in enumerate(handle.num_rows_needed.tolist()) if rows > capacity[rank]}
    if needed:
        raise _capacity_error(needed, capacity, partition, *sizes, handle.plan.expand_factor)


def _filled(shape: tuple[int, int], dtype: torch.dtype, byte: int) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    out.view(torch.uint8).fill_(byte)
    return out


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """`[T, bytes of a row]` uint8.

    PyTorch calls a tensor contiguous whatever its strides along dimensions of size 0 or 1 are, so this copies always.
    """
    dense = torch.empty(rows.shape, dtype=rows.dtype)
    return dense.copy_(rows).view(torch.uint8)


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same values with stride `(1, rows rounded up to 16 bytes)`."""
    rows, width = scales.shape
    storage = _filled((width, align(max(rows, 1), 16 // scales.element_size())), scales.dtype, 0)
    out = storage[:, :rows].t()
    out.copy_(scales)
    return out
