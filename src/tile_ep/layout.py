"""Every size formula: who owns which expert, how many rows fit, where a segment starts.

Nothing else computes an offset, a capacity or an alignment. All functions are pure, on Python ints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

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
    """An `expand_factor` whose capacity holds `rows_needed` rows on `rank`, within a row of the smallest, in steps of 0.01."""
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


# ---------------------------------------------------------------- symmetric memory: the same offsets on every rank

MAX_BLOCKS = 256
"""Most blocks of one collective, hence rows of the tally table."""


@dataclass(frozen=True)
class ControlLayout:
    """Byte offsets of the control block, at the start of a rank's region.

    A *word* is 64 bits, `(epoch << 32) | value`, written by one peer and read by this rank. A row of words holds,
    from one source rank: the receive slot of that rank (its entry into the collective), its token count for each
    destination, and its selection count for each expert.

    A *tally word* is 64 bits, too: its upper half counts, and every block of the peer adds a part of one (2^32), so that it
    goes up once all of them have. Those of this rank itself say how many collectives it has been through.
    """

    num_ranks: int
    num_experts: int

    num_bad: int = 0  # uint32, entries of topk_idx that were out of range, since the host last asked
    failed: int = 4  # uint32, not zero once a wait of this rank has given up: until a reset its kernels do nothing
    count_arrivals: int = 64  # uint32, a grid counter, zero between collectives
    taken: int = 128  # uint32 [2], pieces of work that warps have taken: by the parity of the epoch, the other is zero
    staged: int = 136  # uint32 [2], the same for the stage before
    words: int = 256

    @cached_property
    def columns(self) -> int:
        """Tallies of a block: tokens for each destination, then selections for each expert."""
        return self.num_ranks + self.num_experts

    @cached_property
    def word_stride(self) -> int:
        """Bytes from one source's row of words to the next."""
        return 8 * (1 + self.columns)

    @cached_property
    def done(self) -> int:
        """Tally words: dispatches of which the source has written all its rows."""
        return align(self.words + self.num_ranks * self.word_stride, ROW_ALIGNMENT)

    @cached_property
    def ready(self) -> int:
        """Words: the rank's combine input may be read."""
        return self.done + 8 * self.num_ranks

    @cached_property
    def read_done(self) -> int:
        """Tally words: combines of which the rank has read everything it needs of this rank's combine input."""
        return self.ready + 8 * self.num_ranks

    @cached_property
    def tallies(self) -> int:
        """uint32 `[MAX_BLOCKS, columns]`, private to this rank."""
        return align(self.read_done + 8 * self.num_ranks, ROW_ALIGNMENT)

    @cached_property
    def num_bytes(self) -> int:
        return align(self.tallies + 4 * MAX_BLOCKS * self.columns, ROW_ALIGNMENT)


@dataclass(frozen=True)
class SlotLayout:
    """Byte offsets inside one receive slot: arrays over rows, each dense, so that outputs are contiguous views."""

    rows: int  # most rows
    row_bytes: int  # most bytes of a row's data
    scale_bytes: int  # most bytes of a row's scales
    num_topk: int

    @cached_property
    def data(self) -> int:
        return 0

    @cached_property
    def scales(self) -> int:
        return align(self.rows * self.row_bytes, ROW_ALIGNMENT)

    @cached_property
    def topk_idx(self) -> int:
        """Up to 8 bytes an entry."""
        return self.scales + align(self.rows * self.scale_bytes, ROW_ALIGNMENT)

    @cached_property
    def topk_weights(self) -> int:
        return self.topk_idx + align(self.rows * self.num_topk * 8, ROW_ALIGNMENT)

    @cached_property
    def source(self) -> int:
        """int32 `[rows, 2]`: global source token, global first local selection."""
        return self.topk_weights + align(self.rows * self.num_topk * 4, ROW_ALIGNMENT)

    @cached_property
    def num_bytes(self) -> int:
        return self.source + align(self.rows * 8, ROW_ALIGNMENT)


@dataclass(frozen=True)
class RegionLayout:
    """A rank's symmetric memory: control block, receive slots, then the combine input with its weights."""

    control: ControlLayout
    slot: SlotLayout
    num_slots: int

    @cached_property
    def slots(self) -> int:
        return self.control.num_bytes

    @cached_property
    def combine_rows(self) -> int:
        return self.slots + self.num_slots * self.slot.num_bytes

    @cached_property
    def combine_weights(self) -> int:
        return self.combine_rows + align(self.slot.rows * self.slot.row_bytes, ROW_ALIGNMENT)

    @cached_property
    def num_bytes(self) -> int:
        return self.combine_weights + align(self.slot.rows * self.slot.num_topk * 4, ROW_ALIGNMENT)

    @cached_property
    def allocation(self) -> int:
        """What is allocated, in bytes."""
        return align(self.num_bytes, BUFFER_GRANULARITY)


# ---------------------------------------------------------------- memory of a buffer, before there is one

BUFFER_GRANULARITY = 2 << 20
"""Bytes. Symmetric memory is mapped in pages of this size."""


def region_layout(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    row_bytes: int,
    scale_bytes: int,
    num_topk: int,
    num_experts: int,
    expand_factor: float,
    num_slots: int,
    expert_alignment: int = 128,
) -> RegionLayout:
    """Symmetric memory of one rank: control block, receive slots and combine input.

    Args:
        row_bytes: most bytes of a row's data, in dispatch and in combine.
        scale_bytes: most bytes of a row's scales.
        num_topk: selections per token; 0 leaves out the room that the expanded layout needs beyond the rank layout.
        num_experts: experts over all ranks; 0 counts one per rank.
        expert_alignment: largest alignment that expanded dispatches will ask for.
    """
    partition = ExpertPartition(max(num_experts, num_ranks), num_ranks)
    rows = rank_capacity(num_ranks, num_max_tokens_per_rank)
    if num_topk:
        rows = max(
            rows,
            *(
                expanded_capacity(partition, rank, num_max_tokens_per_rank, num_topk, expert_alignment, expand_factor)
                for rank in (0, num_ranks - 1)
            ),
        )
    slot = SlotLayout(rows, align(row_bytes, 16), scale_bytes, num_topk or MAX_TOPK)
    return RegionLayout(ControlLayout(num_ranks, partition.num_experts), slot, num_slots)
