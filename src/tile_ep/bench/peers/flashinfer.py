"""FlashInfer's one-sided MoE all-to-all, `flashinfer.comm.trtllm_moe_alltoall.MoeAlltoAll`: one process and one GPU a rank.

It wants dispatch and combine in turn, so the other one of the two runs before each round, untimed. Rows of one source come
in no fixed order: each carries the number of its token, in a payload of 16 bytes. How many SMs it takes cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tile_ep.bench.measure import Operation
from tile_ep.bench.peers.installed import reason_missing
from tile_ep.bench.ranks import CudaProcessRanks, Ranks
from tile_ep.bench.workload import ROW_DTYPE, Workload

NAME = "FlashInfer"
_NUMBER_BYTES = 16


def available(ranks: Ranks) -> str | None:
    """It maps the memory of other GPUs."""
    if not isinstance(ranks, CudaProcessRanks):
        return "needs a GPU a rank"
    return reason_missing("flashinfer.comm.trtllm_moe_alltoall", "MoeAlltoAll") or reason_missing(
        "flashinfer.comm.mnnvl", "MnnvlConfig", "TorchDistBackend"
    )


def make(ranks: Ranks, workload: Workload, num_sms: int) -> FlashInfer:
    return FlashInfer(ranks, workload)


class FlashInfer:
    """See the module."""

    name = NAME
    num_sms = 0

    def __init__(self, ranks: Ranks, workload: Workload) -> None:
        self._ranks, self._workload = ranks, workload
        self._exchange: Any = None
        self._received: list[torch.Tensor] | None = None  # of a dispatch that has not been combined

    def operations(self) -> Iterator[Operation]:
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

        shape, rank = self._workload.shape, self._ranks.here[0]
        size = MoeAlltoAll.get_moe_workspace_size_per_rank(
            shape.ranks, shape.topk, shape.tokens, shape.hidden, extra_payload_bytes_per_token=_NUMBER_BYTES
        )
        self._exchange = MoeAlltoAll(
            Mapping(
                world_size=shape.ranks,
                rank=rank,
                gpus_per_node=torch.cuda.device_count(),
                tp_size=shape.ranks,
                moe_ep_size=shape.ranks,
            ),
            max_num_tokens=shape.tokens,
            top_k=shape.topk,
            num_experts=shape.experts,
            workspace_size_per_rank=size,
            mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend(dist.group.WORLD)),
        )
        yield Operation("dispatch", (self._dispatch,), self._check_rows, before=self._be_combined)
        yield Operation("combine, zero-copy", (self._combine_in_place,), self._check_sums, before=self._be_in_place)
        yield Operation("combine, staged", (self._combine,), self._check_sums, before=self._be_dispatched)
        self._be_combined(rank, 0)

    def _dispatch(self, rank: int, number: int) -> list[torch.Tensor]:
        work = self._workload
        x, idx = work.x[number][rank], work.topk_idx[number][rank].int()
        numbers = torch.arange(len(x), dtype=torch.int32, device=x.device)
        payloads = [x, idx, numbers.unsqueeze(1).expand(-1, _NUMBER_BYTES // 4).contiguous()]
        received: list[torch.Tensor] = self._exchange.dispatch(idx, payloads, work.shape.tokens)
        self._received = received
        return received

    def _combine(self, rank: int, number: int) -> Any:
        assert self._received is not None
        payload, self._received = self._received[0], None
        return self._exchange.combine(payload, self._workload.shape.tokens)

    def _combine_in_place(self, rank: int, number: int) -> Any:
        self._received = None
        return self._exchange.combine(self._in_place(), self._workload.shape.tokens, payload_in_workspace=True)

    def _in_place(self) -> torch.Tensor:
        shape = self._workload.shape
        memory: torch.Tensor = self._exchange.get_combine_payload_tensor_in_workspace(
            shape.tokens, shape.hidden, ROW_DTYPE
        )
        return memory

    def _be_combined(self, rank: int, number: int) -> None:
        if self._received is not None:
            self._combine(rank, number)

    def _be_dispatched(self, rank: int, number: int) -> None:
        if self._received is None:
            self._dispatch(rank, number)

    def _be_in_place(self, rank: int, number: int) -> None:
        self._be_dispatched(rank, number)
        assert self._received is not None
        self._in_place().copy_(self._received[0])

    def _check_rows(self, rank: int, number: int, result: list[torch.Tensor]) -> None:
        rows, sources = [], []
        for peer, sent in enumerate(row[rank] for row in self._workload.routed[number].rows):
            token, order = result[2][peer, :sent, 0].sort()
            rows.append(result[0][peer, order])
            sources.append(token + peer * self._workload.shape.tokens)
        self._workload.check_rows(rank, number, torch.cat(rows), torch.cat(sources))

    def _check_sums(self, rank: int, number: int, result: torch.Tensor) -> None:
        self._workload.check_sums(rank, number, result, exact=False)
