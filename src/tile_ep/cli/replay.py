"""`tile-ep replay`: a layer's real routing through the exchange, checked against the same layer without one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from tile_ep.cli import options as opt
from tile_ep.cli.failing import fail
from tile_ep.cli.layer import Experts, dense_layer, relative_error
from tile_ep.cli.progress import progress
from tile_ep.cli.rank import LayoutName, PayloadName, RankTask
from tile_ep.cli.report import Report, print_report
from tile_ep.cli.worlds import BackendName, WorkerError, run_ranks
from tile_ep.errors import TileEPError
from tile_ep.layout import ExpertPartition, expand_factor_for
from tile_ep.trace import Trace, TraceError

TOLERANCE = {
    PayloadName.fp32: 1e-5,
    PayloadName.fp16: 1e-3,
    PayloadName.bf16: 6e-3,
    PayloadName.fp8: 8e-2,
}
"""Relative Frobenius error that passes.

Measured on 8,192 tokens over 4 ranks: fp32 6.0e-8, fp16 3.0e-4, bf16 2.4e-3, fp8 3.7e-2; up to a quarter more in the
expanded layout.
They are what rounding costs: of each rank's sum, of the final one, and of the input for fp8.
"""

SIMULATED_TOKENS = 32
"""Tokens of a simulated replay unless it says how many: every instruction of every thread is run in software."""


@dataclass(frozen=True)
class Settings:
    """The command's arguments."""

    trace: Path
    ranks: int
    layout: LayoutName
    payload: PayloadName
    backend: BackendName
    tokens: int | None
    experts: int | None
    seed: int
    tolerance: float | None
    timeout_s: float
    plot: Path | None
    json_file: Path | None


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="safetensors file with x, topk_idx, topk_weights and, if there are any, document."
        ),
    ],
    ranks: opt.Ranks = 4,
    layout: opt.Layout = LayoutName.rank,
    payload: opt.Payload = PayloadName.bf16,
    backend: opt.Backend = BackendName.collective,
    tokens: opt.Tokens = None,
    experts: opt.Experts = None,
    seed: opt.Seed = 0,
    tolerance: opt.Tolerance = None,
    timeout: opt.Timeout = 300.0,
    plot: opt.Plot = None,
    json_file: opt.Json = None,
) -> None:
    """Replay a trace: dispatch, SwiGLU experts, combine, and compare with the layer computed densely."""
    execute(
        Settings(trace, ranks, layout, payload, backend, tokens, experts, seed, tolerance, timeout, plot, json_file)
    )


def execute(settings: Settings) -> None:
    """Run, print, write files.

    Raises:
        typer.Exit: with 1 if an output is wrong, 2 if there is none.
    """
    console, aside = Console(), Console(stderr=True)
    with _readable_errors(aside):
        _check_files(settings)
        if settings.backend is BackendName.sim and settings.tokens is None:
            console.print(
                f"The simulator is slow: using {SIMULATED_TOKENS} tokens of the trace (--tokens changes that)."
            )
        report = run_replay(settings, aside)
        print_report(console, report)
        if settings.json_file is not None:
            settings.json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
            console.print(f"figures: {settings.json_file}", highlight=False, soft_wrap=True)
        if settings.plot is not None:
            from tile_ep.cli.plot import draw

            draw(report, settings.plot)
            console.print(f"picture: {settings.plot}", highlight=False, soft_wrap=True)
        console.print(report.round_trip, highlight=False, soft_wrap=True)
        console.print(report.verdict, highlight=False, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


def run_replay(settings: Settings, aside: Console) -> Report:
    """The replay itself; shows progress on `aside`.

    Raises:
        TileEPError: the trace is not valid, or the exchange failed.
    """
    trace = _load(settings)
    shards = trace.split(settings.ranks)
    task = _make_task(settings, trace, max(len(tokens) for tokens in shards))
    with progress(aside, "exchange", sum(task.ticks(rank) for rank in range(task.num_ranks))) as tick:
        outcomes = run_ranks(settings.backend, [trace.take(tokens) for tokens in shards], task, tick)
    with progress(aside, "dense layer", trace.num_experts) as tick:
        expected = dense_layer(trace, Experts(trace.hidden, settings.seed), tick)
    return Report(
        trace_file=str(settings.trace),
        trace=trace.describe(),
        layout=settings.layout.value,
        payload=settings.payload.value,
        backend=settings.backend.value,
        seed=settings.seed,
        tolerance=TOLERANCE[settings.payload] if settings.tolerance is None else settings.tolerance,
        first_experts=[task.partition.first(rank) for rank in range(task.num_ranks)],
        ranks=[result for result, _ in outcomes],
        errors=[relative_error(output, expected[tokens]) for (_, output), tokens in zip(outcomes, shards, strict=True)],
    )


def _load(settings: Settings) -> Trace:
    trace = Trace.read(settings.trace)
    if settings.experts is not None:
        trace = trace.with_experts(settings.experts)
    tokens = settings.tokens
    if tokens is None and settings.backend is BackendName.sim:
        tokens = SIMULATED_TOKENS
    if tokens is not None:
        trace = trace.shorten(tokens)
    if not trace.num_tokens:
        raise TraceError(f"{settings.trace}: holds no tokens; there is nothing to replay")
    return trace


def _make_task(settings: Settings, trace: Trace, most_tokens: int) -> RankTask:
    _check_range(settings, trace)
    partition = ExpertPartition(trace.num_experts, settings.ranks)
    load = trace.load
    needed = [
        expand_factor_for(
            partition,
            rank,
            most_tokens,
            trace.num_topk,
            1,
            int(load[partition.first(rank) : partition.first(rank + 1)].sum()),
        )
        for rank in range(settings.ranks)
    ]
    return RankTask(
        num_ranks=settings.ranks,
        num_experts=trace.num_experts,
        num_max_tokens_per_rank=most_tokens,
        hidden=trace.hidden,
        num_topk=trace.num_topk,
        layout=settings.layout,
        payload=settings.payload,
        expand_factor=max(1.0, math.ceil(100 * max(needed)) / 100),
        seed=settings.seed,
        timeout_s=settings.timeout_s,
    )


def _check_range(settings: Settings, trace: Trace) -> None:
    limit, largest = torch.finfo(settings.payload.row_dtype).max, float(trace.x.abs().max())
    if largest > limit:
        raise TraceError(
            f"x: holds {largest:g}, and --payload {settings.payload.value} goes to {limit:g}; use bf16 or fp32"
        )


def _check_files(settings: Settings) -> None:
    """Before the work, not after it."""
    for option, path in (("--plot", settings.plot), ("--json", settings.json_file)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise TraceError(f"{option} {path}: expected a file in a folder that exists")
    if settings.plot is not None and settings.plot.suffix.lower() != ".png":
        raise TraceError(f"--plot {settings.plot}: expected a name that ends in .png")


@contextmanager
def _readable_errors(console: Console) -> Iterator[None]:
    try:
        yield
    except (TileEPError, OSError, RuntimeError) as error:
        if isinstance(error, WorkerError) and error.details:
            console.print(error.details, style="dim", markup=False, highlight=False)
        fail(console, error)
