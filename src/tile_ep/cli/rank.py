"""What one rank does in a replay: dispatch, experts, combine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tile_ep.backends.base import Payload
from tile_ep.buffer import Buffer
from tile_ep.cli.layer import Experts, selected_rows
from tile_ep.cli.roundtrip import as_rows, inexact_tokens
from tile_ep.handle import EPHandle
from tile_ep.layout import ExpertPartition
from tile_ep.quantize import per_token_cast_to_fp8
from tile_ep.trace import Trace


class LayoutName(str, Enum):
    """How received rows lie: one per (token, rank), or one per (token, expert)."""

    rank = "rank"
    expanded = "expanded"


class PayloadName(str, Enum):
    """What a dispatched row is made of."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp8 = "fp8"

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of the rows of combine, and of dispatch unless they are quantised."""
        return {"fp16": torch.float16, "fp32": torch.float32}.get(self.value, torch.bfloat16)


@dataclass(frozen=True)
class RankTask:
    """What all ranks of a replay agree on.

    Attributes:
        num_ranks: `R`.
        num_experts: over all ranks.
        num_max_tokens_per_rank: tokens of the rank that holds most, at least 1.
        hidden: `H`.
        num_topk: `K`.
        layout, payload: of the dispatch.
        expand_factor: of the buffer; holds every row of this routing.
        seed: of the expert weights.
        timeout_s: bound of every wait.
    """

    num_ranks: int
    num_experts: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    layout: LayoutName
    payload: PayloadName
    expand_factor: float
    seed: int
    timeout_s: float

    @property
    def partition(self) -> ExpertPartition:
        """Which rank holds which experts."""
        return ExpertPartition(self.num_experts, self.num_ranks)

    def ticks(self, rank: int) -> int:
        """How often `run_rank` reports progress."""
        return self.partition.num_local(rank) + 3


@dataclass(frozen=True)
class RankResult:
    """What a rank saw.

    Attributes:
        rank: which one.
        tokens: that it holds.
        rows_per: what has a row of its own on the way, besides the token: its `"rank"` or its `"expert"`.
        rows_sent_per_rank, rows_received_per_rank: rows for and from each rank; entry `rank` stays here.
        selections_sent_per_rank: rows for each rank if there were one per selection.
        row_bytes: of a dispatched row, with its scales.
        bytes_sent, bytes_received, bytes_sent_without_dedup: of the dispatch, from and to other ranks.
        combine_row_bytes: of a row on its way back.
        combine_bytes_sent: that go back to other ranks, always one row per (token, rank).
        load_per_expert: selections of each expert of this rank.
        seconds: of each phase, `dispatch`, `experts` and `combine`; each begins when all ranks are ready for it.
        inexact_tokens: tokens that came back changed, by a bit or more, from experts that change nothing.
        backend: what moved the rows.
    """

    rank: int
    tokens: int
    rows_per: str
    rows_sent_per_rank: list[int]
    rows_received_per_rank: list[int]
    selections_sent_per_rank: list[int]
    row_bytes: int
    bytes_sent: int
    bytes_received: int
    bytes_sent_without_dedup: int
    combine_row_bytes: int
    combine_bytes_sent: int
    load_per_expert: list[int]
    seconds: dict[str, float]
    inexact_tokens: int
    backend: str

    @property
    def rows_sent(self) -> int:
        """Rows that leave this rank."""
        return sum(self.rows_sent_per_rank) - self.rows_kept

    @property
    def rows_received(self) -> int:
        """Rows that come from other ranks."""
        return sum(self.rows_received_per_rank) - self.rows_kept

    @property
    def rows_kept(self) -> int:
        """Rows for experts of this rank."""
        return self.rows_sent_per_rank[self.rank]


def run_rank(buffer: Buffer, shard: Trace, task: RankTask, tick: Callable[[], None]) -> tuple[RankResult, torch.Tensor]:
    """One rank's part of the replay. Collective.

    Args:
        shard: this rank's tokens.
        tick: called after each step, `task.ticks(rank)` times.

    Returns:
        What it saw, and the output of the layer for its tokens, `[T, H]` on the CPU.
    """
    x = _payload(shard.x.to(buffer.device), task.payload)
    topk_idx, topk_weights = shard.topk_idx.to(buffer.device), shard.topk_weights.to(buffer.device, torch.float32)
    expand = task.layout is LayoutName.expanded

    def dispatch() -> tuple[Payload, torch.Tensor | None, torch.Tensor, EPHandle]:
        received, idx, weights, handle, _ = buffer.dispatch(x, topk_idx, topk_weights, do_expand=expand)
        assert weights is not None
        return received, idx, weights, handle

    def combine(y: torch.Tensor, weights: torch.Tensor, handle: EPHandle) -> torch.Tensor:
        if expand:
            return buffer.combine(y, handle, weights, apply_weights=True)[0]
        return buffer.combine(y, handle)[0]

    # Before the clock runs, so that connections are there once it does.
    inexact = inexact_tokens(buffer, x, topk_idx, topk_weights, task.partition, expand, task.payload.row_dtype)
    tick()

    seconds = {}
    start = _start(buffer)
    received, idx, weights, handle = dispatch()
    seconds["dispatch"] = _now(buffer) - start
    tick()
    y, seconds["experts"] = _run_experts(buffer, as_rows(received), idx, weights, handle, task, tick)
    start = _start(buffer)
    output = combine(y.to(task.payload.row_dtype), weights, handle)
    seconds["combine"] = _now(buffer) - start
    tick()

    result = RankResult(
        rank=buffer.rank,
        tokens=shard.num_tokens,
        load_per_expert=handle.num_unaligned_recv_tokens_per_expert.tolist(),
        seconds=seconds,
        inexact_tokens=inexact,
        backend=buffer.backend_name,
        **_traffic(buffer, handle, task),
    )
    return result, output.cpu()


def _traffic(buffer: Buffer, handle: EPHandle, task: RankTask) -> dict[str, Any]:
    """What the last dispatch and its combine moved, as fields of `RankResult`.

    The kernels put expanded rows where they belong at once, so there each selection crosses by itself.
    """
    traffic = buffer.traffic()
    per_expert = task.layout is LayoutName.expanded and buffer.backend_name != "collective"
    sent, received = traffic.rows_sent_per_rank, traffic.rows_received_per_rank
    combine_row_bytes = task.hidden * task.payload.row_dtype.itemsize
    combine_bytes_sent = combine_row_bytes * (sum(received) - received[buffer.rank])
    if per_expert:
        sent, received = traffic.selections_sent_per_rank, _selections_received(handle)
    return {
        "rows_per": "expert" if per_expert else "rank",
        "rows_sent_per_rank": sent,
        "rows_received_per_rank": received,
        "selections_sent_per_rank": traffic.selections_sent_per_rank,
        "row_bytes": traffic.row_bytes,
        "bytes_sent": traffic.row_bytes * (sum(sent) - sent[buffer.rank]),
        "bytes_received": traffic.row_bytes * (sum(received) - received[buffer.rank]),
        "bytes_sent_without_dedup": traffic.bytes_sent_without_dedup,
        "combine_row_bytes": combine_row_bytes,
        "combine_bytes_sent": combine_bytes_sent,
    }


def _selections_received(handle: EPHandle) -> list[int]:
    """Expanded rows from each rank."""
    metadata = handle.recv_src_metadata.cpu().long()
    source = metadata[:, 0] // handle.num_max_tokens_per_rank
    expanded = (metadata[:, 2:] >= 0).sum(dim=1)
    counts = torch.zeros(handle.num_ranks, dtype=torch.int64)
    return list(map(int, counts.index_add_(0, source, expanded)))


def _payload(x: torch.Tensor, payload: PayloadName) -> Payload:
    return per_token_cast_to_fp8(x) if payload is PayloadName.fp8 else x.to(payload.row_dtype)


def _run_experts(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor,
    handle: EPHandle,
    task: RankTask,
    tick: Callable[[], None],
) -> tuple[torch.Tensor, float]:
    """Every received row through its experts of this rank: `[rows, H]` fp32, and the seconds it took.

    A row of the rank layout is the sum over its experts, with their weights. One of the expanded layout has one
    expert, and combine applies the weight.
    """
    experts = Experts(task.hidden, task.seed)
    first = task.partition.first(buffer.rank)
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    y = torch.zeros(x.shape[0], task.hidden, device=x.device)
    seconds = 0.0
    for expert in range(task.partition.num_local(buffer.rank)):
        weights = experts.weights(first + expert, x.device)
        start = _now(buffer)
        if topk_idx is None:
            segment = slice(ends[expert] - counts[expert], ends[expert])
            y[segment] = weights(x[segment])
        else:
            rows, weight = selected_rows(topk_idx, topk_weights, expert)
            y.index_add_(0, rows, weights(x[rows]) * weight.unsqueeze(1))
        seconds += _now(buffer) - start
        tick()
    return y, seconds


def _start(buffer: Buffer) -> float:
    """The time at which all ranks are here."""
    buffer.barrier()
    return _now(buffer)


def _now(buffer: Buffer) -> float:
    if buffer.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
