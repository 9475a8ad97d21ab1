"""DeepEP's second generation, `deep_ep.ElasticBuffer`: one process and one GPU a rank.

Its rows come in no fixed order, so they are sorted by source before they are compared. Its combine may round partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tile_ep.bench.measure import Operation
from tile_ep.bench.peers.installed import reason_missing
from tile_ep.bench.ranks import CudaProcessRanks, Ranks
from tile_ep.bench.workload import Workload

NAME = "DeepEP"


def available(ranks: Ranks) -> str | None:
    """It exchanges between GPUs through NCCL's device interface."""
    if not isinstance(ranks, CudaProcessRanks):
        return "needs a GPU a rank"
    return reason_missing("deep_ep", "ElasticBuffer")


def make(ranks: Ranks, workload: Workload, num_sms: int) -> DeepEP:
    return DeepEP(ranks, workload, num_sms)


class DeepEP:
    """See the module."""

    name = NAME

    def __init__(self, ranks: Ranks, workload: Workload, num_sms: int) -> None:
        self.num_sms = num_sms
        self._ranks, self._workload = ranks, workload

    def operations(self) -> Iterator[Operation]:
        import deep_ep

        shape, work, sms = self._workload.shape, self._workload, self.num_sms
        rank = self._ranks.here[0]
        buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=shape.tokens,
            hidden=shape.hidden,
            num_topk=shape.topk,
            explicitly_destroy=True,
        )
        idx = [topk_idx[rank].to(deep_ep.topk_idx_t) for topk_idx in work.topk_idx]

        def dispatch(rank: int, number: int, do_cpu_sync: bool = False) -> Any:
            return buffer.dispatch(
                work.x[number][rank], idx[number], num_experts=shape.experts, num_sms=sms, do_cpu_sync=do_cpu_sync
            )

        try:
            yield Operation("dispatch", (dispatch,), self._check_rows)
            planned = [dispatch(rank, number, True) for number in range(work.num_sets)]
            rows, handles = [plan[0] for plan in planned], [plan[3] for plan in planned]

            def cached(rank: int, number: int) -> Any:
                return buffer.dispatch(work.x[number][rank], handle=handles[number], num_sms=sms)

            def combine(rank: int, number: int) -> Any:
                return buffer.combine(rows[number], handles[number], num_sms=sms)

            yield Operation("dispatch, cached", (cached,), self._check_rows)
            yield Operation("combine, staged", (combine,), self._check_sums)
        finally:
            buffer.destroy()

    def _check_rows(self, rank: int, number: int, result: Any) -> None:
        recv_x, _, _, handle, _ = result
        received = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        source, order = handle.recv_src_metadata[:received, 0].sort()
        self._workload.check_rows(rank, number, recv_x[order], source)

    def _check_sums(self, rank: int, number: int, result: Any) -> None:
        self._workload.check_sums(rank, number, result[0], exact=False)
