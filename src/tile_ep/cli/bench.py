"""`tile-ep bench`: dispatch and combine against what the hardware allows, and against what users would take instead."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tile_ep.bench.launch import execute, under_torchrun
from tile_ep.bench.peers import all_peers
from tile_ep.bench.report import print_report, read_json, write_json
from tile_ep.bench.session import ALL_POINTS, QUICK_POINTS, SWEEPS, Results, Settings
from tile_ep.bench.workload import FIGURES, Shape
from tile_ep.cli.failing import fail
from tile_ep.errors import TileEPError

QUICK_REPEAT = 8
ON_GPUS = {"ranks": 8, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}
"""What is exchanged unless the call says otherwise: the shape of DeepSeek-V3."""
ON_CPUS = {"ranks": 2, "tokens": 4, "hidden": 32, "topk": 2, "experts": 32}
"""The same where there are no times to be had, only results to be checked."""
_FILE_WIDTH = 200


class BackendName(str, Enum):
    """What runs the ranks."""

    auto = "auto"
    cuda_loopback = "cuda-loopback"
    sim = "sim"
    collective = "collective"
    nvlink = "nvlink"


class SectionName(str, Enum):
    """Parts of a run."""

    base = "base"
    alone = "alone"
    tokens = "tokens"
    sms = "sms"
    skew = "skew"
    ranks = "ranks"
    overlap = "overlap"
    small = "small"


class SweepName(str, Enum):
    """Parts that vary one thing."""

    tokens = "tokens"
    sms = "sms"
    skew = "skew"
    ranks = "ranks"


Backend = Annotated[
    BackendName,
    typer.Option(
        help="cuda-loopback: all ranks on one GPU. sim: in the simulator. collective: a process a rank, on CPUs. Under "
        "torchrun each process is a rank; nvlink and collective say how rows move, auto takes nvlink where it can run."
    ),
]
Sections = Annotated[
    list[SectionName] | None,
    typer.Option(
        "--section", help="Measure only these; by default everything, without a GPU only the base. Repeatable."
    ),
]
Sweeps = Annotated[
    list[SweepName] | None,
    typer.Option("--sweep", help="Measure only this sweep, besides the base. Repeatable."),
]
Sms = Annotated[list[int] | None, typer.Option("--sms", min=1, help="SMs of a collective, a rank. Repeatable.")]
Peers = Annotated[
    list[str] | None, typer.Option("--peer", help="Only these peers, or none. By default all there are. Repeatable.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer points and repeats: a first look.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Draw what was measured.")]
Again = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Measure nothing: print, and draw, what --json wrote.", exists=True),
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE.json", help="Write a timeline for Perfetto or chrome://tracing.")
]


def _help(said: str, name: str) -> str:
    return f"{said} By default {ON_GPUS[name]:,}, without a GPU {ON_CPUS[name]}."


def bench(
    backend: Backend = BackendName.auto,
    ranks: Annotated[
        int | None, typer.Option(min=1, help=_help("Ranks; under torchrun its processes are.", "ranks"))
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help=_help("Tokens of a rank.", "tokens"))] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help=_help("bf16 elements of a row.", "hidden"))] = None,
    topk: Annotated[int | None, typer.Option(min=1, max=32, help=_help("Selections of a token.", "topk"))] = None,
    experts: Annotated[int | None, typer.Option(min=1, help=_help("Over all ranks.", "experts"))] = None,
    skew: Annotated[float, typer.Option(min=0, help="Zipf exponent of the experts' popularity.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs.")] = 0,
    sms: Sms = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Timed rounds of each figure.")] = None,
    section: Sections = None,
    sweep: Sweeps = None,
    peer: Peers = None,
    quick: Quick = False,
    json_file: Json = None,
    plots: Plots = None,
    trace: Trace = None,
    again: Again = None,
) -> None:
    """Measure dispatch and combine: against copies in the same run, against peers, beside a GEMM, and in small batches."""
    if not under_torchrun():
        _give_streams_queues()
    console, aside = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=max(console.width, _FILE_WIDTH))  # every column fits
    if again is not None:
        _tell(console, aside, again, plots)
        return
    name = _backend(backend)
    on_gpus = name != "sim" and torch.cuda.is_available()
    if not on_gpus and os.environ.get("RANK", "0") == "0":
        aside.print("no GPU is used: results are checked, times say nothing", style="yellow")
    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts}
    sizes: dict[str, Any] = dict(ON_GPUS if on_gpus else ON_CPUS)
    sizes.update({what: value for what, value in given.items() if value is not None})
    parts = _sections(section, sweep, set(SectionName) if on_gpus else {SectionName.base})
    settings = Settings(
        backend=name,
        shape=Shape(**sizes, skew=skew, seed=seed),
        sms=sms or ([16, 8] if on_gpus else [2]),
        figures=FIGURES if SectionName.base in parts else (),
        sweeps=[name for name in SWEEPS if SectionName(name) in parts],
        peers=_peers(peer),
        alone=SectionName.alone in parts,
        overlap=SectionName.overlap in parts,
        small=SectionName.small in parts,
        points=QUICK_POINTS if quick else ALL_POINTS,
        repeat=repeat or (QUICK_REPEAT if quick else 30),
        trace=trace,
    )
    try:
        done = execute(settings, lambda said: aside.print(said, style="dim", markup=False, highlight=False), json_file)
    except (TileEPError, ValueError, RuntimeError, OSError) as error:
        fail(aside, error)
    if done is None:
        return
    settings, results = done
    if json_file is not None:
        write_json(json_file, settings, results)
    _show(console, settings, results, plots)
    nothing = not (results.figures or results.hidden or results.small)
    if nothing:
        aside.print("nothing was measured", style="red")
    if results.wrong or results.failed or nothing:
        raise typer.Exit(1)


def _tell(console: Console, aside: Console, path: Path, plots: Path | None) -> None:
    try:
        settings, results = read_json(path)
    except (ValueError, OSError) as error:
        fail(aside, error)
    _show(console, settings, results, plots)


def _show(console: Console, settings: Settings, results: Results, plots: Path | None) -> None:
    print_report(console, settings, results)
    if plots is not None:
        from tile_ep.bench.plots import draw

        for path in draw(results, plots):
            console.print(f"picture: {path}", highlight=False, soft_wrap=True)


def _give_streams_queues() -> None:
    """Streams that share a queue between host and device hold each other up, and so would ranks that share a device and
    wait for each other. CUDA reads how many it makes when it starts, which asking for a device does: eight unless it is told.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _sections(
    section: list[SectionName] | None, sweep: list[SweepName] | None, everything: set[SectionName]
) -> set[SectionName]:
    sweeps = {SectionName(one.value) for one in sweep or ()}
    if section:
        return {*section, *sweeps}
    return {SectionName.base, *sweeps} if sweeps else everything


def _peers(names: list[str] | None) -> tuple[str, ...]:
    known = tuple(all_peers())
    if names is None:
        return known
    if names == ["none"]:
        return ()
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--peer {name}: expected one of {', '.join(known)}, or none")
    return tuple(names)


def _backend(backend: BackendName) -> str:
    if under_torchrun():
        if backend in (BackendName.cuda_loopback, BackendName.sim):
            raise typer.BadParameter(
                f"--backend {backend.value} has all ranks in one process; start it without torchrun"
            )
        return backend.value
    if backend is BackendName.nvlink:
        raise typer.BadParameter("--backend nvlink has a process a rank; start it under torchrun")
    if backend is BackendName.cuda_loopback and not torch.cuda.is_available():
        raise typer.BadParameter("--backend cuda-loopback: PyTorch sees no CUDA device here")
    if backend is BackendName.auto:
        return "cuda-loopback" if torch.cuda.is_available() else "sim"
    return backend.value
