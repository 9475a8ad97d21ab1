"""Results for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from tile_ep.bench.ceilings import Ceilings
from tile_ep.bench.clocks import Spread
from tile_ep.bench.exchange import NAME
from tile_ep.bench.machine import Machine
from tile_ep.bench.measure import Figure
from tile_ep.bench.overlap import Hidden
from tile_ep.bench.session import Points, Results, Settings
from tile_ep.bench.small import SmallBatch
from tile_ep.bench.workload import HOW_COUNTED, Bytes, Shape

Value = TypeVar("Value")

SCHEMA = 1
_DERIVED = ("share", "memory_tb_s", "rows_tb_s", "us_per_token")


def as_dict(settings: Settings, results: Results) -> dict[str, Any]:
    """All of it. Times in ms unless a name says us, rates in TB/s."""
    ceilings = results.ceilings
    assert ceilings is not None
    return {
        "schema": SCHEMA,
        "machine": results.machine.facts,
        "other_processes": results.machine.others,
        "world": results.world,
        "settings": {
            **{name: value for name, value in asdict(settings).items() if name != "trace"},
            "shape": asdict(settings.shape),
        },
        "bytes_counted": HOW_COUNTED,
        "ceilings": {
            "copied_bytes": ceilings.num_bytes,
            "copy_tb_s": ceilings.copy / 1e9,
            "fill_tb_s": ceilings.fill / 1e9,
            "peer_tb_s": ceilings.peer / 1e9,
            "peer_both_tb_s": ceilings.peer_both / 1e9,
        },
        "figures": [
            {**asdict(figure), **{name: getattr(figure, name) for name in _DERIVED}} for figure in results.figures
        ],
        "against_peers": [
            {
                "section": ours.section,
                "shape": asdict(ours.shape),
                "ours": ours.name,
                "peer": peer.system,
                "ratio": ratio,
            }
            for ours, peer, ratio in against_peers(results.figures)
        ],
        "overlap": [{**asdict(hidden), "share": hidden.share} for hidden in results.hidden],
        "small": [asdict(one) for one in results.small],
        "skipped": results.skipped,
        "failed": results.failed,
        "wrong": results.wrong,
    }


def write_json(path: Path, settings: Settings, results: Results) -> None:
    """Replaces the file whole: a run that is cut short leaves the last one."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(as_dict(settings, results), indent=1) + "\n")
    aside.replace(path)


def read_json(path: Path) -> tuple[Settings, Results]:
    """What `write_json` wrote, be it of a run that was cut short.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        said = json.loads(path.read_text())
        if said["schema"] != SCHEMA:
            raise ValueError(f"schema {said['schema']}, this is {SCHEMA}")
        ceilings = said["ceilings"]
        rates = (1e9 * ceilings[name] for name in ("copy_tb_s", "fill_tb_s", "peer_tb_s", "peer_both_tb_s"))
        results = Results(
            Machine(said["machine"], said["other_processes"]),
            said["world"],
            Ceilings(ceilings["copied_bytes"], *rates),
            [_filled(Figure, figure) for figure in said["figures"]],
            [_filled(Hidden, hidden) for hidden in said["overlap"]],
            [_filled(SmallBatch, one) for one in said["small"]],
            said["skipped"],
            said["failed"],
        )
        return _filled(Settings, said["settings"]), results
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not what tile-ep bench --json writes: {type(error).__name__} {error}") from error


_PARTS = {"shape": Shape, "bytes": Bytes, "points": Points}


def _filled(kind: Callable[..., Value], said: dict[str, Any]) -> Value:
    """A dataclass out of what `asdict` made of it, and more."""
    values = {}
    for name in (one.name for one in fields(kind) if one.name in said):  # type: ignore[arg-type]
        value = said[name]
        if isinstance(value, dict):
            value = _filled(_PARTS.get(name, Spread), value)
        values[name] = value
    return kind(**values)


def against_peers(figures: list[Figure]) -> list[tuple[Figure, Figure, float]]:
    """Our figure, a peer's of the same collective and shape, and our time as a part of the peer's.

    Our zero-copy combine is set against a peer's combine too.
    """
    found = []
    for peer in figures:
        if peer.system == NAME:
            continue
        names = ("combine, zero-copy", "combine, staged") if peer.name.startswith("combine") else (peer.name,)
        seen = set()
        for ours in figures:
            same = (ours.system, ours.section, ours.shape) == (NAME, peer.section, peer.shape)
            if same and ours.name in names and ours.name not in seen:
                seen.add(ours.name)
                found.append((ours, peer, ours.time_ms.median / peer.time_ms.median))
    return found


def print_report(console: Console, settings: Settings, results: Results) -> None:
    """Machine, ceilings and a table for each section."""
    _print_machine(console, settings, results)
    sections = dict.fromkeys(figure.section for figure in results.figures)
    for section in sections:
        figures = [figure for figure in results.figures if figure.section == section]
        console.print(_figures_table(section, figures, whole=console.width >= _WHOLE_WIDTH))
    for name in dict.fromkeys(figure.name for figure in results.figures):
        console.print(f"bytes of {name}: {HOW_COUNTED[name]}", highlight=False, style="dim", soft_wrap=True)
    peers = against_peers([figure for figure in results.figures if figure.section == "base"])
    if peers:
        console.print(_peers_table(peers))
    if results.hidden:
        console.print(_overlap_table(results))
    if results.small:
        console.print(_small_table(results))
    for title, said in (("skipped", results.skipped), ("[red]failed[/]", results.failed)):
        for name, reason in said.items():
            console.print(f"{title}: ", end="")
            console.print(f"{name}: {reason}", markup=False, highlight=False, soft_wrap=True)
    for wrong in results.wrong:
        console.print("[bold red]WRONG[/]: ", end="")
        console.print(wrong, markup=False, highlight=False, soft_wrap=True)


def _print_machine(console: Console, settings: Settings, results: Results) -> None:
    shape, ceilings = settings.shape, results.ceilings
    assert ceilings is not None
    facts = results.machine.facts
    console.print(
        f"{facts.get('gpu', facts['host'])}, torch {facts['torch']}, {results.world}: {shape.ranks} ranks x {shape.tokens:,} "
        f"tokens x {shape.hidden:,} bf16, top-{shape.topk} of {shape.experts} experts; median of {settings.repeat}",
        highlight=False,
        soft_wrap=True,
    )
    peer = f", peer {ceilings.peer / 1e9:.3f}, both ways {ceilings.peer_both / 1e9:.3f}" if ceilings.peer else ""
    console.print(
        f"ceilings in TB/s: copy {ceilings.copy / 1e9:.3f} (read + written), fill {ceilings.fill / 1e9:.3f}{peer}",
        highlight=False,
    )
    versions = [f"{name} {version}" for name, version in facts["packages"].items()]
    versions += [f"{name} {facts[name]}" for name in ("cuda", "sms") if name in facts]
    console.print(", ".join([f"python {facts['python']}", *versions]), highlight=False, soft_wrap=True)
    for state in facts.get("clocks", []):
        console.print(f"driver, clocks now and at most, power: {state}", highlight=False, soft_wrap=True)
    for other in results.machine.others:
        console.print(f"[yellow]another process uses the GPU[/]: {other}", highlight=False, soft_wrap=True)


def _table(title: str, columns: tuple[str, ...], left: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


_WHOLE_WIDTH = 180  # characters
# Left out where there are fewer.
_LEFT_OUT = ("skew", "least", "most", "us/token", "host ms", "enqueue us", "GB", "TB/s", "rows TB/s")


def _figures_table(section: str, figures: list[Figure], whole: bool) -> Table:
    rows = [_columns_of(figure) for figure in figures]
    names = tuple(name for name in rows[0] if whole or name not in _LEFT_OUT)
    table = _table(f"{section}: whole calls, slowest rank", names, 2)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _columns_of(figure: Figure) -> dict[str, str]:
    time, shape, number = figure.time_ms, figure.shape, "{:.3f}".format
    return {
        "system": figure.system,
        "collective": figure.name,
        "ranks": str(shape.ranks),
        "tokens": f"{shape.tokens:,}" + (" on rank 0" if shape.alone else ""),
        "SMs": str(figure.num_sms or "-"),
        "skew": f"{shape.skew:g}",
        "ms": number(time.median),
        "least": number(time.least),
        "most": number(time.most),
        "us/token": number(figure.us_per_token),
        "host ms": number(figure.host_ms.median),
        "enqueue us": f"{figure.enqueue_us.median:.0f}",
        "GB": number(figure.bytes.memory / 1e9),
        "TB/s": number(figure.memory_tb_s),
        "rows TB/s": number(figure.rows_tb_s),
        "of ceiling": f"{100 * figure.share:.1f} %",
        "checked": "[red]wrong[/]" if figure.wrong else "yes",
    }


def _peers_table(peers: list[tuple[Figure, Figure, float]]) -> Table:
    table = _table("our time as a part of a peer's", ("collective", "SMs", "peer", "its ms", "ours", "ratio"), 1)
    for ours, peer, ratio in peers:
        times = f"{peer.time_ms.median:.3f}", f"{ours.time_ms.median:.3f}"
        table.add_row(ours.name, str(ours.num_sms), peer.system, *times, f"{ratio:.2f}")
    return table


def _overlap_table(results: Results) -> Table:
    columns = ("collective", "order", "ranks", "SMs a rank", "left free", "GEMM ms", "collective", "both", "hidden")
    table = _table("a matrix product beside a collective, on all SMs or leaving some free", columns, 2)
    for hidden in results.hidden:
        times = (hidden.gemm_ms, hidden.collective_ms, hidden.both_ms)
        table.add_row(
            hidden.collective,
            hidden.order,
            str(hidden.ranks),
            str(hidden.num_sms),
            str(hidden.left_sms),
            *(f"{time.median:.3f}" for time in times),
            f"{100 * hidden.share:.0f} %",
        )
    return table


def _small_table(results: Results) -> Table:
    columns = ("combine", "ranks", "tokens", "SMs", "graph us", "launch", "wait", "move", "eager us", "host us a rank")
    table = _table("small batches: dispatch and combine of all ranks, in us", (*columns, "checked"), 1)
    for one in results.small:
        parts = (one.graph_us.median, one.launch_us, one.wait_us, one.move_us, one.eager_us.median, one.host_us.median)
        table.add_row(
            one.combine,
            str(one.shape.ranks),
            str(one.shape.tokens),
            str(one.num_sms),
            *(f"{value:.1f}" for value in parts),
            "[red]wrong[/]" if one.wrong else "yes",
        )
    return table
