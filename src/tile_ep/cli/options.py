"""Options that `replay` and `demo` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tile_ep.cli.rank import LayoutName, PayloadName
from tile_ep.cli.worlds import BackendName

Ranks = Annotated[int, typer.Option(min=1, help="Ranks; each gets whole documents and a share of the experts.")]
Layout = Annotated[LayoutName, typer.Option(help="Received rows: one per (token, rank) or one per (token, expert).")]
Payload = Annotated[PayloadName, typer.Option(help="What a dispatched row is made of; fp8 comes back as bf16.")]
Backend = Annotated[
    BackendName,
    typer.Option(
        help="collective: a process per rank. sim: the GPU kernels, simulated on the CPU (slow). "
        "cuda-loopback: all ranks on one GPU."
    ),
]
Tokens = Annotated[int | None, typer.Option(min=1, help="Use this many tokens, from the beginning of every document.")]
Experts = Annotated[int | None, typer.Option(min=1, help="Number of experts, if the trace does not say it.")]
Seed = Annotated[int, typer.Option(min=0, max=2**40, help="Seed of the expert weights.")]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0, help="Largest relative error (Frobenius norm) that passes; by default the payload's own."),
]
Timeout = Annotated[float, typer.Option(min=1, help="Longest wait for another rank, in seconds.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the traffic and the load per expert.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")]
