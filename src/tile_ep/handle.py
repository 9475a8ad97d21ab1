"""What a dispatch learned about the routing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class EPHandle:
    """Plan of one dispatch: `combine` reverses it, a cached dispatch replays it.

    Owned by the caller and never updated by a later call; any number may be valid at once. Fields with
    DeepEP's names have DeepEP's meaning (`deep_ep/buffers/elastic.py`, `EPHandle`). Below, `T` are this
    rank's tokens, `N` the rows it received in the rank layout, `K` the selections per token, `E_local`
    its experts, `R` the ranks. Without host synchronisation, tensors over `N` have `R * num_max_tokens_per_rank`
    rows, of which the first `psum_num_recv_tokens_per_scaleup_rank[-1]` count.

    Attributes:
        do_expand: whether the plan has the expanded layout (the rank layout is always part of it).
        num_experts: experts over all ranks.
        expert_alignment: rows that each expert's segment is rounded up to.
        num_max_tokens_per_rank: most tokens a rank may hold.
        num_sms: SMs the dispatch used; `combine` takes them over unless told otherwise.
        topk_idx: `[T, K]`, the routing, a copy unless `do_handle_copy=False`.
        num_recv_tokens: `N`; without host synchronisation the capacity.
        num_expanded_tokens: rows of the expanded output, alignment gaps included; 0 in the rank layout.
        num_recv_tokens_per_expert_list: aligned row counts as Python ints, `[]` without host synchronisation.
        psum_num_recv_tokens_per_scaleup_rank: `[R]` int32, inclusive sum of rows received from each rank.
        psum_num_recv_tokens_per_expert: `[E_local]` int32. Rank layout: inclusive sum of aligned counts.
            Expanded: `start[e] + count[e]`, with `start[e] = align(psum[e - 1], expert_alignment)`.
        num_unaligned_recv_tokens_per_expert: `[E_local]` int32, real counts: one for every selection of the
            expert, so a token that names it twice counts twice.
        recv_src_metadata: `[N, K + 2]` int32: source rank * num_max_tokens_per_rank + token, source rank * K
            + first `k` that is local here, then for each `k` the expanded row or -1.
        dst_buffer_slot_idx: `[T, K]` int32, row of the token at the rank of selection `k`, -1 for none.
        dst_expanded_idx: `[T, K]` int32, row of selection `k` in the expanded layout of its rank, -1 for none;
            `None` in the rank layout. Rows of a destination that overflowed are -1 too.
        num_rows_needed: `[R]` int32, rows of the expanded layout that each rank needs; `None` in the rank layout.
        rank, num_ranks, buffer_id: where the plan belongs.
        plan: what only the backend that made it reads.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    dst_buffer_slot_idx: torch.Tensor
    dst_expanded_idx: torch.Tensor | None
    num_rows_needed: torch.Tensor | None
    rank: int
    num_ranks: int
    buffer_id: int = -1
    plan: Any = field(default=None, repr=False)
