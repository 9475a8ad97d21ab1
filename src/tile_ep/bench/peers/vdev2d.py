"""`torch.ops.symm_mem.all_to_all_vdev_2d`: rows per selection, sorted by expert, over NVSHMEM; one process and one GPU a rank.

Dispatch sorts the selections by expert, gathers their rows into symmetric memory and exchanges them with counts that stay
on the device: the expanded layout. Combine sends them back with `all_to_all_vdev_2d_offset` and adds them up with
`index_add_` in fp32. The operators need PyTorch's NVSHMEM backend of symmetric memory, which is chosen for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tile_ep.bench.measure import Operation
from tile_ep.bench.ranks import CudaProcessRanks, Ranks
from tile_ep.bench.workload import ROW_DTYPE, Workload, require

NAME = "all_to_all_vdev_2d"


def available(ranks: Ranks) -> str | None:
    """Where symmetric memory is NVSHMEM's."""
    if not isinstance(ranks, CudaProcessRanks):
        return "needs a GPU a rank"
    try:
        import torch.distributed._symmetric_memory as symmetric

        if not symmetric.is_nvshmem_available():
            return "this PyTorch has no NVSHMEM"
        backend = symmetric.get_backend(ranks.device)
    except (ImportError, AttributeError) as error:
        return f"this PyTorch does not have it ({error})"
    if backend != "NVSHMEM":
        return f"symmetric memory uses {backend}; TORCH_SYMMMEM=NVSHMEM chooses it for the whole run"
    return None


def make(ranks: Ranks, workload: Workload, num_sms: int) -> Vdev2d:
    return Vdev2d(ranks, workload)


class Vdev2d:
    """See the module."""

    name = NAME
    num_sms = 0

    def __init__(self, ranks: Ranks, workload: Workload) -> None:
        self._ranks, self._workload = ranks, workload

    def operations(self) -> Iterator[Operation]:
        import torch.distributed._symmetric_memory as symmetric

        shape, group = self._workload.shape, dist.group.WORLD
        assert group is not None
        self._group = group.group_name
        selections = shape.tokens * shape.topk
        most = max(routed.selected(rank) for routed in self._workload.routed for rank in range(shape.ranks))

        def make(*size: int, dtype: torch.dtype = ROW_DTYPE) -> torch.Tensor:
            memory = symmetric.empty(*size, dtype=dtype, device=self._ranks.device)
            symmetric.rendezvous(memory, group)
            return memory

        self._sent, self._back = make(selections, shape.hidden), make(selections, shape.hidden)
        self._received = make(most + shape.experts, shape.hidden)  # experts without rows take one
        self._counts = make(shape.experts, dtype=torch.int64)
        self._here, self._returned = (make(2, shape.experts, dtype=torch.int64) for _ in range(2))
        yield Operation("dispatch, expanded", (self._dispatch,), self._check_rows, compiles=False)
        yield Operation("combine, expanded", (self._combine,), self._check_sums, fill=self._fill, compiles=False)

    def _dispatch(self, rank: int, number: int) -> Any:
        experts = self._workload.topk_idx[number][rank].reshape(-1)
        token = experts.argsort(stable=True) // self._workload.shape.topk
        torch.index_select(self._workload.x[number][rank], 0, token, out=self._sent)
        self._counts.zero_().scatter_add_(0, experts, torch.ones_like(experts))
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self._sent, self._received, self._counts, self._here, self._group, major_align=1
        )
        return token

    def _fill(self, rank: int, number: int) -> None:
        """Rows and counts of a dispatch are what combine reads."""
        self._token = self._dispatch(rank, number)

    def _combine(self, rank: int, number: int) -> torch.Tensor:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self._received, self._back, self._here, self._returned, self._group
        )
        x = self._workload.x[0][rank]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        total.index_add_(0, self._token, self._back.float())
        return total.to(x.dtype)

    def _check_rows(self, rank: int, number: int, result: Any) -> None:
        """Chunks lie by (local expert, source), each in the order of tokens."""
        work, ranks = self._workload, self._workload.shape.ranks
        first = work.shape.partition.first(rank)
        counts, starts = self._here.tolist()
        require(sum(counts) == work.routed[number].selected(rank), f"rank {rank}: selections are missing")
        for chunk, (count, start) in enumerate(zip(counts, starts, strict=True)):
            expert, source = first + chunk // ranks, chunk % ranks
            x = work.rows_for_expert(source, expert, number)
            require(
                torch.equal(self._received[start : start + count], x), f"rank {rank}: rows of expert {expert} differ"
            )

    def _check_sums(self, rank: int, number: int, result: torch.Tensor) -> None:
        self._workload.check_selection_sums(rank, 0, result)
