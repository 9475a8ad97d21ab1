"""Plain PyTorch: the selections of all tokens sorted by destination rank, `index_select`, all-to-all, `index_add_`.

Dispatch: one sort of `[R, T]` hits gives the rows to send in the order (destination, token); rows and their top-k indices
are gathered with `index_select` and exchanged; global expert indices become local ones. Combine: the reverse all-to-all,
then `index_add_` into fp32 and one cast. Across processes the exchange is `all_to_all_single`; with all ranks on one
device, a copy for each pair of ranks on the receiver's stream. The numbers of rows are known beforehand, which spares this
peer the exchange of counts and the wait of the host that it would need: both are left out in its favour.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tile_ep.bench.measure import Operation
from tile_ep.bench.ranks import Ranks
from tile_ep.bench.workload import Workload, require

NAME = "plain PyTorch"


def available(ranks: Ranks) -> str | None:
    """It runs everywhere."""
    return None


def make(ranks: Ranks, workload: Workload, num_sms: int) -> PlainTorch:
    return PlainTorch(ranks, workload)


@dataclass(frozen=True)
class Packed:
    """Rows of a rank, in the order in which they leave.

    Attributes:
        token: `[rows]`, of each row.
        x: `[rows, H]`.
        topk_idx: `[rows, K]`.
    """

    token: torch.Tensor
    x: torch.Tensor
    topk_idx: torch.Tensor


def _of_set(phase: Callable[[int, int], Any], number: int, rank: int) -> Any:
    return phase(rank, number)


class PlainTorch:
    """See the module."""

    name = NAME
    num_sms = 0

    def __init__(self, ranks: Ranks, workload: Workload) -> None:
        self._ranks, self._workload = ranks, workload
        self._packed: dict[int, Packed] = {}

    def operations(self) -> Iterator[Operation]:
        yield Operation("dispatch", (self.pack, self.exchange), self._check_rows, compiles=False)
        tokens, rows = [], []
        for number in range(self._workload.num_sets):
            phases = [functools.partial(_of_set, phase, number) for phase in (self.pack, self.exchange)]
            done = self._ranks.round(phases)
            tokens.append({rank: self._packed[rank].token for rank in self._ranks.here})
            rows.append({rank: result[0] for rank, result in done.results.items()})

        def combine(rank: int, number: int) -> torch.Tensor:
            return self.combine(rank, number, rows[number], tokens[number][rank])

        yield Operation("combine, staged", (combine,), self._check_sums, compiles=False)

    # ------------------------------------------------------------ dispatch

    def pack(self, rank: int, number: int) -> Packed:
        """Sort by destination and gather."""
        work = self._workload
        topk_idx, x = work.topk_idx[number][rank], work.x[number][rank]
        num_tokens = len(x)
        hits = torch.zeros(num_tokens, work.shape.ranks, dtype=torch.uint8, device=x.device)
        hits.scatter_(1, work.owners(topk_idx), 1)
        order = hits.t().reshape(-1).argsort(descending=True, stable=True)
        token = order[: sum(work.routed[number].rows[rank])] % max(1, num_tokens)
        self._packed[rank] = Packed(token, x.index_select(0, token), topk_idx.index_select(0, token))
        return self._packed[rank]

    def exchange(self, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Received rows `[N, H]` and local experts `[N, K]`."""
        routed, partition = self._workload.routed[number], self._workload.shape.partition
        leaving, coming = routed.rows[rank], [row[rank] for row in routed.rows]
        packed = self._packed
        x = self._all_to_all(rank, {r: p.x for r, p in packed.items()}, routed.rows, coming, leaving)
        idx = self._all_to_all(rank, {r: p.topk_idx for r, p in packed.items()}, routed.rows, coming, leaving)
        local = idx - partition.first(rank)
        return x, torch.where((local >= 0) & (local < partition.num_local(rank)), local, -1)

    def _all_to_all(
        self,
        rank: int,
        parts: dict[int, torch.Tensor],
        counts: Sequence[Sequence[int]],
        coming: list[int],
        leaving: list[int],
    ) -> torch.Tensor:
        """Every rank's part for `rank`.

        Args:
            parts: rows of the ranks that live here, in the order of destinations.
            counts: rows for each destination, `[source][destination]`.
        """
        mine = parts[rank]
        out = mine.new_empty(sum(coming), *mine.shape[1:])
        if len(self._ranks.here) < self._ranks.num_ranks:
            dist.all_to_all_single(out, mine, coming, leaving)
            return out
        start = 0
        for source, number in enumerate(coming):
            first = sum(counts[source][:rank])
            out[start : start + number].copy_(parts[source][first : first + number])
            start += number
        return out

    def _check_rows(self, rank: int, number: int, result: Any) -> None:
        rows, idx = result
        work = self._workload
        counts, most = work.routed[number].rows, work.shape.tokens
        source = [work.tokens_for(peer, rank, number) + peer * most for peer in range(len(counts))]
        work.check_rows(rank, number, rows, torch.cat(source))
        require(bool((idx >= 0).any(dim=1).all()), f"rank {rank}: a row without an expert")

    # ------------------------------------------------------------ combine

    def combine(self, rank: int, number: int, rows: dict[int, torch.Tensor], token: torch.Tensor) -> torch.Tensor:
        """Sums `[T, H]` in the dtype of `rows`.

        Args:
            rows: received rows of the ranks that live here, `[N, H]`.
            token: of each row that this rank sent.
        """
        counts = self._workload.routed[number].rows
        back = [[row[rank] for row in counts] for rank in range(len(counts))]  # [holder][owner]
        returned = self._all_to_all(rank, rows, back, counts[rank], back[rank])
        total = torch.zeros(self._workload.x[number][rank].shape, dtype=torch.float32, device=token.device)
        total.index_add_(0, token, returned.float())
        return total.to(returned.dtype)

    def _check_sums(self, rank: int, number: int, result: Any) -> None:
        self._workload.check_sums(rank, number, result)
