"""Every size formula: who owns which expert, how many rows fit, where a segment starts.

Nothing else computes an offset, a capacity or an alignment. All functions are pure, on Python ints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TOPK = 32
"""Most selections a token may have: a warp handles one token, a lane one selection."""

ROW_ALIGNMENT = 128
"""Bytes. Regions, and shared-memory rows that bulk copies touch, start on this boundary."""


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def align(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return ceil_div(value, alignment) * alignment


@dataclass(frozen=True)
class ExpertPartition:
    """Experts dealt to ranks in contiguous ranges; the first `num_experts % num_ranks` ranks hold one more."""

    num_experts: int
    num_ranks: int

    def num_local(self, rank: int) -> int:
        """Number of experts on `rank`."""
        return self.num_experts // self.num_ranks + (rank < self.num_experts % self.num_ranks)

    def first(self, rank: int) -> int:
        """Global index of the first expert on `rank`; `first(num_ranks)` is `num_experts`."""
        return rank * (self.num_experts // self.num_ranks) + min(rank, self.num_experts % self.num_ranks)

    def rank_of(self, expert: int) -> int:
        """The rank that holds `expert`, `0 <= expert < num_experts`."""
        base, extra = divmod(self.num_experts, self.num_ranks)
        in_larger = extra * (base + 1)
        return expert // (base + 1) if expert < in_larger else extra + (expert - in_larger) // base


def rank_capacity(num_ranks: int, num_max_tokens_per_rank: int) -> int:
    """Rows a rank can receive in the rank layout: every token of every rank, once."""
    return num_ranks * num_max_tokens_per_rank


def balanced_rows(partition: ExpertPartition, rank: int, num_max_tokens_per_rank: int, num_topk: int) -> int:
    """Expanded rows `rank` receives when every selection is used and all experts are equally busy."""
    selections = partition.num_ranks * num_max_tokens_per_rank * num_topk
    return ceil_div(selections * partition.num_local(rank), partition.num_experts)


def expanded_capacity(
    partition: ExpertPartition,
    rank: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    expert_alignment: int,
    expand_factor: float,
) -> int:
    """Rows a rank can receive in the expanded layout: `expand_factor` times the balanced size, plus alignment.

    The alignment gaps come on top (`alignment - 1` rows per local expert), and never more is reserved
    than the worst case, every selection of every rank on this one.
    """
    selections = partition.num_ranks * num_max_tokens_per_rank * num_topk
    share = math.ceil(expand_factor * balanced_rows(partition, rank, num_max_tokens_per_rank, num_topk))
    slack = partition.num_local(rank) * (expert_alignment - 1)
    return min(share, selections) + slack


def expand_factor_for(
    partition: ExpertPartition,
    rank: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    expert_alignment: int,
    rows_needed: int,
) -> float:
    """The smallest `expand_factor` (rounded up to 0.01) whose capacity holds `rows_needed` rows on `rank`."""
    share = rows_needed - partition.num_local(rank) * (expert_alignment - 1)
    balanced = balanced_rows(partition, rank, num_max_tokens_per_rank, num_topk)
    return math.ceil(100 * max(share, 0) / max(balanced, 1)) / 100


def expanded_starts(counts: list[int], expert_alignment: int) -> list[int]:
    """First row of each local expert's segment, and last the total: `len(counts) + 1` values.

    Args:
        counts: real rows of each local expert.
    """
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + align(count, expert_alignment))
    return starts
