"""Our own figures: dispatch and combine through `Buffer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tile_ep.bench.measure import Operation
from tile_ep.bench.ranks import Ranks
from tile_ep.bench.workload import FIGURES, Cast, Workload, require
from tile_ep.handle import EPHandle
from tile_ep.quantize import per_token_cast_to_fp8

NAME = "TileEP"


class Exchange:
    """A workload through buffers that live as long as `operations` is iterated.

    Attributes:
        name: of the system.
        num_sms: of every call.
    """

    def __init__(
        self,
        ranks: Ranks,
        workload: Workload,
        num_sms: int,
        names: Sequence[str] = FIGURES,
        name: str = NAME,
        tuning: Any = None,
    ) -> None:
        self.name, self.num_sms = name, num_sms
        self._ranks, self._workload, self._names, self._tuning = ranks, workload, names, tuning
        self._buffers: Any = None
        self._memory: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def opened(self, expand_factor: float = 1.0) -> Iterator[Any]:
        """Its buffers, by rank, while the context lasts. Collective."""
        with self._ranks.open(self._workload.shape, expand_factor, self._tuning) as buffers:
            self._buffers = buffers
            try:
                yield buffers
            finally:
                self._memory.clear()
                self._buffers = None

    def operations(self) -> Iterator[Operation]:
        """One after the other; each is to be measured before the next one is asked for."""
        expands = any("expanded" in name for name in self._names)
        factor = self._workload.expand_factor if expands else 1.0
        with self.opened(factor):
            for operations in (self._rank_layout(), self._expanded()):
                yield from (operation for operation in operations if operation.name in self._names)

    def plan(self, **options: Any) -> tuple[list[dict[int, EPHandle]], list[dict[int, torch.Tensor]]]:
        """By set and rank: handles of exact sizes, and the received rows, copied out of their slots. Collective."""
        handles, rows = [], []
        for number in range(self._workload.num_sets):

            def dispatch(rank: int, number: int = number) -> tuple[EPHandle, torch.Tensor]:
                x, idx = self._workload.x[number][rank], self._workload.topk_idx[number][rank]
                recv_x, _, _, handle, _ = self._buffers[rank].dispatch(x, idx, num_sms=self.num_sms, **options)
                return handle, recv_x.clone()

            planned = self._ranks.each(dispatch)
            handles.append({rank: handle for rank, (handle, _) in planned.items()})
            rows.append({rank: received for rank, (_, received) in planned.items()})
        self._ranks.synchronize()
        return handles, rows

    # ------------------------------------------------------------ rank layout

    def _rank_layout(self) -> Iterator[Operation]:
        workload, options = self._workload, {"num_sms": self.num_sms}

        def dispatch(rank: int, number: int) -> Any:
            x, idx = workload.x[number][rank], workload.topk_idx[number][rank]
            return self._buffers[rank].dispatch(x, idx, do_cpu_sync=False, **options)

        yield Operation("dispatch", (dispatch,), self._check_rows)
        if "dispatch, fp8" in self._names:
            yield self._fp8()
        if not {"dispatch, cached", "combine, zero-copy", "combine, staged"} & {*self._names}:
            return
        handles, rows = self.plan()

        def cached(rank: int, number: int) -> Any:
            return self._buffers[rank].dispatch(workload.x[number][rank], handle=handles[number][rank], **options)

        def ask(rank: int, number: int) -> None:
            self.ask_for_input(rank, handles[number][rank])

        def fill(rank: int, number: int) -> None:
            self._memory[rank].copy_(rows[number][rank])

        def zero_copy(rank: int, number: int) -> Any:
            return self.combine_in_place(rank, handles[number][rank], **options)

        def staged(rank: int, number: int) -> Any:
            return self._buffers[rank].combine(rows[number][rank], handles[number][rank], **options)

        yield Operation("dispatch, cached", (cached,), self._check_rows)
        if self._buffers[self._ranks.here[0]].backend_name != "collective":  # that one has no zero-copy
            yield Operation("combine, zero-copy", (zero_copy,), self._check_sums, fill, ask)
        yield Operation("combine, staged", (staged,), self._check_sums)

    def _fp8(self) -> Operation:
        workload, options = self._workload, {"num_sms": self.num_sms, "do_cpu_sync": False}
        quantised = [{rank: per_token_cast_to_fp8(x) for rank, x in of_set.items()} for of_set in workload.x]

        def dispatch(rank: int, number: int) -> Any:
            return self._buffers[rank].dispatch(quantised[number][rank], workload.topk_idx[number][rank], **options)

        def check(rank: int, number: int, result: Any) -> None:
            (data, scales), *rest = result
            self._check_rows(rank, number, (data.view(torch.uint8), *rest), _fp8_bytes)
            self._check_rows(rank, number, (scales, *rest), _fp8_scales)

        return Operation("dispatch, fp8", (dispatch,), check)

    def ask_for_input(self, rank: int, handle: EPHandle) -> torch.Tensor:
        """Memory for the rows of the next `combine_in_place`. Waits for the host: a layer asks for it while experts run."""
        self._memory[rank] = self._buffers[rank].combine_input(handle)
        return self._memory[rank]

    def combine_in_place(self, rank: int, handle: EPHandle, **options: Any) -> Any:
        return self._buffers[rank].combine(self._memory[rank], handle, **options)

    def _check_rows(self, rank: int, number: int, result: Any, send: Cast = lambda x: x) -> None:
        recv_x, recv_idx, _, handle, _ = result
        received = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        source = handle.recv_src_metadata[:received, 0]
        self._workload.check_rows(rank, number, recv_x[:received], source, send)
        require(bool((recv_idx[received:] == -1).all()), f"rank {rank}: indices past the rows")
        require(bool((recv_idx[:received] >= 0).any(dim=1).all()), f"rank {rank}: a row without an expert")

    def _check_sums(self, rank: int, number: int, result: Any) -> None:
        self._workload.check_sums(rank, number, result[0])

    # ------------------------------------------------------------ expanded layout

    def _expanded(self) -> Iterator[Operation]:
        if not {"dispatch, expanded", "combine, expanded"} & {*self._names}:
            return
        workload, options = self._workload, {"num_sms": self.num_sms}

        def dispatch(rank: int, number: int) -> Any:
            x, idx = workload.x[number][rank], workload.topk_idx[number][rank]
            return self._buffers[rank].dispatch(x, idx, do_cpu_sync=False, do_expand=True, **options)

        yield Operation("dispatch, expanded", (dispatch,), self._check_expanded_rows)
        if "combine, expanded" not in self._names:
            return
        handles, rows = self.plan(do_expand=True)

        def combine(rank: int, number: int) -> Any:
            return self._buffers[rank].combine(rows[number][rank], handles[number][rank], **options)

        yield Operation("combine, expanded", (combine,), self._check_expanded_sums)

    def _check_expanded_rows(self, rank: int, number: int, result: Any) -> None:
        """Every selection's row is its token's: the first one of each received token, then all others like it."""
        recv_x, _, _, handle, _ = result
        received = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        metadata = handle.recv_src_metadata[:received].long()
        used = metadata[:, 2:] >= 0
        first = metadata[:, 2:].gather(1, used.int().argmax(dim=1, keepdim=True))
        self._workload.check_rows(rank, number, recv_x[first[:, 0]], metadata[:, 0])
        for here, row in zip(used.unbind(1), metadata[:, 2:].unbind(1), strict=True):
            require(torch.equal(recv_x[row[here]], recv_x[first[here, 0]]), f"rank {rank}: expanded rows differ")
        require(int(used.sum()) == self._workload.routed[number].selected(rank), f"rank {rank}: selections are missing")

    def _check_expanded_sums(self, rank: int, number: int, result: Any) -> None:
        self._workload.check_expanded_sums(rank, number, result[0])


def _fp8_bytes(x: torch.Tensor) -> torch.Tensor:
    return per_token_cast_to_fp8(x)[0].view(torch.uint8)


def _fp8_scales(x: torch.Tensor) -> torch.Tensor:
    return per_token_cast_to_fp8(x)[1]
