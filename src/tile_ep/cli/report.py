"""Figures of a replay: for people, and as JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tile_ep.cli.rank import RankResult

PHASES = ("dispatch", "experts", "combine")


@dataclass(frozen=True)
class Report:
    """What a replay found.

    Attributes:
        trace_file: as given.
        trace: sizes and skew of the tokens used.
        layout, payload, backend, seed: of the run.
        tolerance: largest relative error that passes.
        first_experts: first expert of each rank.
        ranks: what each rank saw.
        errors: relative Frobenius error of each rank's output.
    """

    trace_file: str
    trace: dict[str, Any]
    layout: str
    payload: str
    backend: str
    seed: int
    tolerance: float
    first_experts: list[int]
    ranks: list[RankResult]
    errors: list[float]

    @property
    def error(self) -> float:
        """The largest; NaN if there is one."""
        return float(torch.tensor(self.errors, dtype=torch.float64).max())

    @property
    def inexact_tokens(self) -> int:
        """Tokens, over all ranks, that came back changed from experts that change nothing."""
        return sum(result.inexact_tokens for result in self.ranks)

    @property
    def passed(self) -> bool:
        """Whether every rank's output is within the tolerance (NaN is not) and every round trip exact."""
        return self.error <= self.tolerance and not self.inexact_tokens

    @property
    def round_trip(self) -> str:
        """One line on what is exact, in rich markup."""
        tokens = sum(result.tokens for result in self.ranks)
        return (
            f"Round trip, experts that change nothing: {tokens - self.inexact_tokens:,} of {tokens:,} tokens came back "
            "exact, their weights too"
        )

    @property
    def verdict(self) -> str:
        """One line, in rich markup."""
        said = f"relative error {self.error:.2e}, tolerance {self.tolerance:.2g} ({self.payload})"
        if self.passed:
            return f"[bold green]PASS[/]: outputs of {_ranks(len(self.ranks))} agree with the dense layer, {said}"
        wrong = [rank for rank, error in enumerate(self.errors) if not error <= self.tolerance]
        if wrong:
            return f"[bold red]FAIL[/]: output of rank(s) {', '.join(map(str, wrong))} is off, {said}"
        changed = [result.rank for result in self.ranks if result.inexact_tokens]
        return (
            f"[bold red]FAIL[/]: {self.inexact_tokens:,} tokens of rank(s) {', '.join(map(str, changed))} "
            f"came back changed; {said}"
        )

    @property
    def rows_are(self) -> str:
        """What a dispatched row is."""
        return f"one row per (token, {self.ranks[0].rows_per})"

    @property
    def load_per_expert(self) -> list[int]:
        """Selections of each expert, over all ranks."""
        return [load for result in self.ranks for load in result.load_per_expert]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON. Bytes are of the dispatch unless they say combine; times in seconds."""
        ranks = []
        for result, first, error in zip(self.ranks, self.first_experts, self.errors, strict=True):
            busiest, idlest = extremes(result, first)
            ranks.append(
                {
                    **asdict(result),
                    "rows_sent": result.rows_sent,
                    "rows_received": result.rows_received,
                    "rows_kept": result.rows_kept,
                    "combine_bytes_sent": result.combine_bytes_sent,
                    "first_expert": first,
                    "busiest_expert": busiest,
                    "idlest_expert": idlest,
                    "error": error,
                }
            )
        sent = sum(result.bytes_sent for result in self.ranks)
        return {
            "trace_file": self.trace_file,
            "trace": self.trace,
            "num_ranks": len(self.ranks),
            "layout": self.layout,
            "payload": self.payload,
            "backend": self.backend,
            "seed": self.seed,
            "ranks": ranks,
            "traffic_rows": [result.rows_sent_per_rank for result in self.ranks],
            "load_per_expert": self.load_per_expert,
            "bytes_sent": sent,
            "bytes_sent_without_dedup": sum(result.bytes_sent_without_dedup for result in self.ranks),
            "combine_bytes_sent": sum(result.combine_bytes_sent for result in self.ranks),
            "seconds": {phase: max(result.seconds[phase] for result in self.ranks) for phase in PHASES},
            "inexact_tokens": self.inexact_tokens,
            "error": self.error,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def extremes(result: RankResult, first_expert: int) -> tuple[int, int]:
    """The busiest and the idlest expert of a rank, counted over all ranks; the first of equals."""
    load = result.load_per_expert
    return first_expert + load.index(max(load)), first_expert + load.index(min(load))


def print_report(console: Console, report: Report) -> None:
    """Two tables: where rows went, and what the experts and the phases did."""
    trace = report.trace
    documents = "" if trace["documents"] is None else f" of {trace['documents']} documents"
    console.print(
        f"{trace['tokens']:,} tokens{documents}, hidden {trace['hidden']}, "
        f"top-{trace['topk']} of {trace['experts']} experts (busiest {trace['skew']:.1f}x the mean)",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{_ranks(len(report.ranks))}, {report.layout} layout, {report.payload} payload, {report.backend} backend",
        highlight=False,
    )
    console.print(_traffic_table(report))
    console.print(_work_table(report))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _traffic_table(report: Report) -> Table:
    table = Table(
        title=f"Dispatch: {report.rows_are}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_footer=True,
    )
    results = report.ranks
    sent = sum(result.bytes_sent for result in results)
    undeduplicated = sum(result.bytes_sent_without_dedup for result in results)
    table.add_column("rank", "all", justify="right")
    _total_column(table, "tokens", sum(result.tokens for result in results))
    _total_column(table, "rows kept", sum(result.rows_kept for result in results))
    _total_column(table, "rows sent", sum(result.rows_sent for result in results))
    _total_column(table, "rows received", sum(result.rows_received for result in results))
    table.add_column("bytes sent", size(sent), justify="right", no_wrap=True)
    table.add_column("without dedup", size(undeduplicated), justify="right", no_wrap=True)
    table.add_column("saved", share_saved(sent, undeduplicated), justify="right")
    for result in results:
        table.add_row(
            str(result.rank),
            f"{result.tokens:,}",
            f"{result.rows_kept:,}",
            f"{result.rows_sent:,}",
            f"{result.rows_received:,}",
            size(result.bytes_sent),
            size(result.bytes_sent_without_dedup),
            share_saved(result.bytes_sent, result.bytes_sent_without_dedup),
        )
    return table


def _total_column(table: Table, name: str, total: int) -> None:
    table.add_column(name, f"{total:,}", justify="right")


def _work_table(report: Report) -> Table:
    table = Table(
        title="Experts (selections) and time (ms)", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("rank", "experts", "busiest", "idlest", *PHASES, "error"):
        table.add_column(name, justify="right")
    for result, first, error in zip(report.ranks, report.first_experts, report.errors, strict=True):
        busiest, idlest = extremes(result, first)
        table.add_row(
            str(result.rank),
            f"{first}-{first + len(result.load_per_expert) - 1}",
            f"{busiest} ({result.load_per_expert[busiest - first]})",
            f"{idlest} ({result.load_per_expert[idlest - first]})",
            *(f"{1e3 * result.seconds[phase]:.1f}" for phase in PHASES),
            f"{error:.1e}",
        )
    return table


def size(num_bytes: float) -> str:
    """Bytes, in the unit that reads best (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"


def share_saved(sent: int, without_dedup: int) -> str:
    """What the deduplication leaves out, in percent."""
    return f"{100 * (1 - sent / without_dedup):.0f}%" if without_dedup else "-"
