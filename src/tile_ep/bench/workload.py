"""Inputs of a measurement, what must come of them, and the bytes that have to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tile_ep.layout import ExpertPartition, ceil_div, expand_factor_for

ROW_DTYPE = torch.bfloat16
Cast = Callable[[torch.Tensor], torch.Tensor]
_ROUNDING = 5e-3  # relative, of sums of bf16 rows whose partial sums may be rounded too


class WrongResultError(Exception):
    """A collective gave something else than it should."""


def require(holds: bool, said: str) -> None:
    """Raise `WrongResultError` unless it holds."""
    if not holds:
        raise WrongResultError(said)


@dataclass(frozen=True)
class Shape:
    """One point of a measurement.

    Attributes:
        ranks, tokens, hidden, topk, experts: `R`, `T` per rank, `H`, `K`, `E`.
        skew: exponent `s` of the experts' popularity, `1 / (1 + n)^s` for the n-th most popular; 0 is uniform.
        alone: only rank 0 has tokens.
        seed: of all inputs.
    """

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    skew: float = 0.0
    alone: bool = False
    seed: int = 0

    @property
    def row_bytes(self) -> int:
        return self.hidden * ROW_DTYPE.itemsize

    @property
    def fp8_row_bytes(self) -> int:
        """An fp8 row, and an fp32 scale for each 128 elements."""
        return self.hidden + 4 * ceil_div(self.hidden, 128)

    @property
    def partition(self) -> ExpertPartition:
        return ExpertPartition(self.experts, self.ranks)

    def tokens_of(self, rank: int) -> int:
        return 0 if self.alone and rank else self.tokens


@dataclass(frozen=True)
class Bytes:
    """What one collective has to move; a share of the ceiling is a share of this.

    Attributes:
        memory: read and written in the memory of the busiest device.
        wire: that cross to or from the busiest device, in its busier direction; 0 where all ranks share one.
        rows: that go from rank to rank, or stay with theirs, over all ranks, counted once.
    """

    memory: int
    wire: int
    rows: int


@dataclass(frozen=True)
class Routed:
    """Rows of one set of inputs, `[source][destination]`.

    Attributes:
        tokens: of each rank.
        rows: one per (token, rank).
        selections: one per (token, expert).
    """

    tokens: list[int]
    rows: list[list[int]]
    selections: list[list[int]]

    def received(self, rank: int) -> int:
        """Rows that `rank` holds after a dispatch."""
        return sum(row[rank] for row in self.rows)

    def selected(self, rank: int) -> int:
        """Rows that `rank` holds after an expanded dispatch."""
        return sum(row[rank] for row in self.selections)


@dataclass(frozen=True)
class _Passes:
    """How often a collective reads or writes each kind of row, and which kind crosses."""

    own: int
    received: int
    selected: int
    selections_cross: bool = False


_PASSES = {
    "dispatch": _Passes(1, 1, 0),
    "dispatch, fp8": _Passes(1, 1, 0),
    "dispatch, cached": _Passes(1, 1, 0),
    "combine, zero-copy": _Passes(1, 1, 0),
    "combine, staged": _Passes(1, 3, 0),
    "dispatch, expanded": _Passes(1, 0, 1, selections_cross=True),
    "combine, expanded": _Passes(1, 2, 1),
}
FIGURES = tuple(_PASSES)
RANK_LAYOUT = ("dispatch", "combine, zero-copy", "combine, staged")
HOW_COUNTED = {
    "dispatch": "each token's row read once, each received row written once",
    "dispatch, fp8": "as dispatch, of rows of one byte an element and their scales",
    "dispatch, cached": "as dispatch",
    "combine, zero-copy": "each received row read once, each token's row written once",
    "combine, staged": "as zero-copy, and each received row read and written once more",
    "dispatch, expanded": "each token's row read once, each selection's row written once",
    "combine, expanded": "each selection's row read, each received row written and read, each token's row written; once",
}


def count_bytes(name: str, routed: Routed, row_bytes: int, one_device: bool) -> Bytes:
    """Bytes of rows that figure `name` has to move; metadata is not counted.

    Args:
        one_device: all ranks share one memory.
    """
    passes = _PASSES[name]
    ranks = range(len(routed.tokens))
    memory = [
        passes.own * routed.tokens[rank]
        + passes.received * routed.received(rank)
        + passes.selected * routed.selected(rank)
        for rank in ranks
    ]
    crossing = routed.selections if passes.selections_cross else routed.rows
    moved = row_bytes * sum(map(sum, crossing))
    if one_device:
        return Bytes(row_bytes * sum(memory), 0, moved)
    leaving = [sum(crossing[rank]) - crossing[rank][rank] for rank in ranks]
    coming = [sum(row[rank] for row in crossing) - crossing[rank][rank] for rank in ranks]
    return Bytes(row_bytes * max(memory), row_bytes * max(*leaving, *coming), moved)


class Workload:
    """Inputs of the ranks that live here, in several sets, and the counts of all ranks.

    Attributes:
        shape: of the inputs.
        here: ranks whose inputs are kept.
        device: where they are.
        x: `[T, H]` bf16, by set and rank.
        topk_idx: `[T, K]` int64, by set and rank.
        routed: counts, by set.
    """

    def __init__(self, shape: Shape, here: Sequence[int], device: torch.device, num_sets: int) -> None:
        self.shape, self.here, self.device = shape, list(here), device
        self._owner = torch.tensor([shape.partition.rank_of(e) for e in range(shape.experts)]).to(device)
        self.x: list[dict[int, torch.Tensor]] = []
        self.topk_idx: list[dict[int, torch.Tensor]] = []
        self.routed: list[Routed] = []
        for number in range(num_sets):
            routing = [self._make_idx(rank, number) for rank in range(shape.ranks)]
            self.topk_idx.append({rank: routing[rank] for rank in here})
            self.x.append({rank: self.make_x(rank, number) for rank in here})
            self.routed.append(self._count(routing))

    @property
    def num_sets(self) -> int:
        return len(self.x)

    def _random(self, rank: int, number: int, what: int) -> torch.Generator:
        seed = ((self.shape.seed * 64 + number) * 1024 + rank) * 2 + what
        return torch.Generator(self.device).manual_seed(seed)

    def make_x(self, rank: int, number: int) -> torch.Tensor:
        """The rows of any rank, the same on whichever rank asks."""
        shape = self.shape.tokens_of(rank), self.shape.hidden
        return torch.randn(shape, device=self.device, generator=self._random(rank, number, 0)).to(ROW_DTYPE)

    def _make_idx(self, rank: int, number: int) -> torch.Tensor:
        """Top-k of log popularity plus Gumbel noise: draws without replacement."""
        shape = self.shape
        order = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(shape.seed))
        popularity = -shape.skew * torch.log1p(order.float()).to(self.device)
        random = self._random(rank, number, 1)
        uniform = torch.rand(shape.tokens_of(rank), shape.experts, device=self.device, generator=random)
        noise = -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))
        return (popularity + noise).topk(shape.topk, dim=1).indices

    def owners(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """The rank of each selection."""
        return self._owner[topk_idx]

    def tokens_for(self, source: int, destination: int, number: int) -> torch.Tensor:
        """`[rows]`, the tokens of any rank that have a row at `destination`, ascending."""
        idx = self.topk_idx[number].get(source)
        owner = self.owners(self._make_idx(source, number) if idx is None else idx)
        return (owner == destination).any(dim=1).nonzero()[:, 0]

    def rows_for_expert(self, source: int, expert: int, number: int) -> torch.Tensor:
        """`[rows, H]` of any rank's tokens that select `expert`, ascending."""
        idx = self.topk_idx[number].get(source)
        chosen = (self._make_idx(source, number) if idx is None else idx) == expert
        return self._x_of(source, number)[chosen.any(dim=1)]

    def _count(self, routing: list[torch.Tensor]) -> Routed:
        rows, selections = [], []
        for idx in routing:
            owner = self.owners(idx)
            hits = [owner == rank for rank in range(self.shape.ranks)]
            rows.append([int(hit.any(dim=1).sum()) for hit in hits])
            selections.append([int(hit.sum()) for hit in hits])
        return Routed([len(idx) for idx in routing], rows, selections)

    @property
    def expand_factor(self) -> float:
        """Of a buffer that holds the expanded rows of every set."""
        shape = self.shape
        return max(
            1.0,
            *(
                expand_factor_for(shape.partition, rank, shape.tokens, shape.topk, 1, routed.selected(rank))
                for routed in self.routed
                for rank in range(shape.ranks)
            ),
        )

    def count_bytes(self, name: str, one_device: bool) -> Bytes:
        """The mean over all sets."""
        row_bytes = self.shape.fp8_row_bytes if "fp8" in name else self.shape.row_bytes
        counts = [count_bytes(name, routed, row_bytes, one_device) for routed in self.routed]
        memory, wire, rows = (
            sum(values) // len(counts)
            for values in zip(*((count.memory, count.wire, count.rows) for count in counts), strict=True)
        )
        return Bytes(memory, wire, rows)

    # ------------------------------------------------------------ what must come out

    def check_rows(
        self, rank: int, number: int, rows: torch.Tensor, source: torch.Tensor, send: Cast = lambda x: x
    ) -> None:
        """Raise unless `rows` are those that are due, in the order of the tokens `source`, `source rank * T + token`.

        Args:
            rows: `[N, ...]`.
            source: `[N]`.
            send: makes of `x` what is sent, row by row.

        Raises:
            WrongResultError: they are not.
        """
        due = self.routed[number].received(rank)
        require(len(rows) == len(source) == due, f"rank {rank}: {len(rows)} rows, {due} are due")
        start = 0
        for peer in range(self.shape.ranks):
            tokens = self.tokens_for(peer, rank, number)
            here = slice(start, start + len(tokens))
            require(torch.equal(source[here].long(), tokens + peer * self.shape.tokens), f"rank {rank}: other tokens")
            require(torch.equal(rows[here], send(self._x_of(peer, number)[tokens])), f"rank {rank}: rows differ")
            start += len(tokens)

    def check_sums(self, rank: int, number: int, out: torch.Tensor, exact: bool = True) -> None:
        """Raise unless `out` is the sum of each token's rows, one a destination, in fp32, rounded once.

        Args:
            exact: to the bit; else within what rounding each partial sum costs.
        """
        x = self.x[number][rank].float()
        total = torch.zeros_like(x)
        for hit in self._hits(rank, number):
            total += torch.where(hit.unsqueeze(1), x, 0)
        self._compare(f"rank {rank}: sums differ", out, total, exact)

    def check_expanded_sums(self, rank: int, number: int, out: torch.Tensor, exact: bool = True) -> None:
        """The same for rows per selection: each destination's part is rounded, then summed in the order of `topk_idx`."""
        x, owner = self.x[number][rank].float(), self.owners(self.topk_idx[number][rank])
        total = torch.zeros_like(x)
        for k in range(owner.shape[1]):
            named = (owner == owner[:, k : k + 1]).sum(dim=1, keepdim=True)
            first = (owner[:, :k] != owner[:, k : k + 1]).all(dim=1, keepdim=True)
            total += torch.where(first, (x * named).to(out.dtype).float(), 0)
        self._compare(f"rank {rank}: expanded sums differ", out, total, exact)

    def check_selection_sums(self, rank: int, number: int, out: torch.Tensor) -> None:
        """The same where every selection brings its own row back: `K` times the token, within rounding."""
        x = self.x[number][rank].float()
        self._compare(f"rank {rank}: sums of selections differ", out, x * self.shape.topk, exact=False)

    @staticmethod
    def _compare(said: str, out: torch.Tensor, total: torch.Tensor, exact: bool) -> None:
        if exact:
            require(torch.equal(out, total.to(out.dtype)), said)
        else:
            error = float((out.float() - total).norm() / total.norm().clamp_min(1e-30))
            require(error < _ROUNDING, f"{said}, by {error:.1e}")

    def _hits(self, rank: int, number: int) -> list[torch.Tensor]:
        owner = self.owners(self.topk_idx[number][rank])
        return [(owner == peer).any(dim=1) for peer in range(self.shape.ranks)]

    def _x_of(self, rank: int, number: int) -> torch.Tensor:
        return self.x[number][rank] if rank in self.here else self.make_x(rank, number)
