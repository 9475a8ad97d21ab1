"""What the specifications of all kernels have in common."""

from __future__ import annotations

from dataclasses import dataclass

from tile_ep.layout import ControlLayout, ExpertPartition


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a kernel is specialised for; whatever is not in it is a run-time argument."""

    num_ranks: int
    num_experts: int
    num_topk: int
    max_experts: int  # of the buffer, which fixes the control block
    index_dtype: str  # of topk_idx: int16, int32 or int64
    bulk: bool  # rows go through shared memory by the copy engine; else by the warp, any size and alignment
    num_warps: int
    chunk_bytes: int = 16  # of a row in shared memory at a time, a multiple of 16
    depth: int = 2  # chunks a warp holds
    cluster: int = 1  # blocks that are placed next to each other

    @property
    def cluster_dims(self) -> int | None:
        """As TileLang takes it."""
        return self.cluster if self.cluster > 1 else None

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def partition(self) -> ExpertPartition:
        return ExpertPartition(self.num_experts, self.num_ranks)

    @property
    def control(self) -> ControlLayout:
        return ControlLayout(self.num_ranks, self.max_experts)

    @property
    def index_bytes(self) -> int:
        return int(self.index_dtype[3:]) // 8
