"""Pictures of a run: time against tokens, SMs, skew and ranks; overlap; small batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tile_ep.bench.exchange import NAME
from tile_ep.bench.measure import Figure
from tile_ep.bench.overlap import Hidden
from tile_ep.bench.session import Results
from tile_ep.bench.small import SmallBatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXES: dict[str, tuple[str, Callable[[Figure], float]]] = {
    "tokens": ("tokens a rank", lambda figure: figure.shape.tokens),
    "sms": ("SMs a rank", lambda figure: figure.num_sms),
    "skew": ("Zipf exponent of the experts", lambda figure: figure.shape.skew),
    "ranks": ("ranks", lambda figure: figure.shape.ranks),
}


def draw(results: Results, folder: Path) -> list[Path]:
    """Write a PNG for each sweep and section that was measured; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for section, (label, place) in _AXES.items():
        figures = [figure for figure in results.figures if figure.section == section]
        if figures:
            drawn.append(_draw_sweep(folder / f"{section}.png", section, label, place, figures))
    if results.hidden:
        drawn.append(_draw_overlap(folder / "overlap.png", results.hidden))
    if results.small:
        drawn.append(_draw_small(folder / "small.png", results.small))
    return drawn


def _plainly(value: float, _: float) -> str:
    return f"{value:,g}"


def _save(path: Path, width: float, fill: Callable[[Axes], None]) -> Path:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, 5), layout="constrained")
    axes = canvas.subplots()
    fill(axes)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, dpi=130, format="png")
    return path


def _draw_sweep(path: Path, section: str, label: str, place: Callable[[Figure], float], figures: list[Figure]) -> Path:
    groups: dict[str, list[Figure]] = {}
    split_ranks = section == "sms" and len({figure.shape.ranks for figure in figures}) > 1
    for figure in figures:
        who = f"{figure.system}: {figure.name}" + (f", {figure.shape.ranks} ranks" if split_ranks else "")
        groups.setdefault(who, []).append(figure)

    def fill(axes: Axes) -> None:
        for who, group in groups.items():
            group = sorted(group, key=place)
            x, y = [place(figure) for figure in group], [figure.time_ms.median for figure in group]
            style = "-" if group[0].system == NAME else "--"
            axes.plot(x, y, style, marker="o", markersize=4, label=who)
            lower, upper = [f.time_ms.least for f in group], [f.time_ms.most for f in group]
            axes.fill_between(x, lower, upper, alpha=0.15)
        if section in ("tokens", "sms", "ranks"):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(_plainly)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plainly)
        axes.set_xlabel(label)
        axes.set_ylabel("ms, whole call, slowest rank")
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        shape = figures[0].shape
        axes.set_title(f"{shape.hidden:,} bf16, top-{shape.topk} of {shape.experts}", fontsize=11)

    return _save(path, 8, fill)


def _draw_overlap(path: Path, hidden: list[Hidden]) -> Path:
    def fill(axes: Axes) -> None:
        lines: dict[tuple[str, str, bool], list[Hidden]] = {}
        for one in hidden:
            lines.setdefault((one.collective, one.order, one.left_sms > 0), []).append(one)
        colors = {pair: f"C{number}" for number, pair in enumerate(dict.fromkeys(line[:2] for line in lines))}
        for (collective, order, leaves), some in lines.items():
            label = f"{collective}, {order}" + (", SMs left free" if leaves else "")
            shares = [100 * one.share for one in some]
            style = "o-" if leaves else "o:"
            axes.plot([one.num_sms for one in some], shares, style, color=colors[collective, order], label=label)
        axes.set_xlabel(f"SMs a rank, {hidden[0].ranks} ranks")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({one.num_sms for one in hidden}))
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(_plainly)
        axes.set_ylabel("% of the collective hidden")
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return _save(path, 10, fill)


def _draw_small(path: Path, small: list[SmallBatch]) -> Path:
    def fill(axes: Axes) -> None:
        ways = list(dict.fromkeys(one.combine for one in small))
        batches = sorted({one.shape.tokens for one in small})
        for place, way in enumerate(ways):
            some = {one.shape.tokens: one for one in small if one.combine == way}
            at = [number + 0.4 * (place - (len(ways) - 1) / 2) for number in range(len(batches))]
            bottom = [0.0] * len(batches)
            for part, colour in (("launch", "#8b95a7"), ("wait", "#e0a44a"), ("move", "#3f7fbf")):
                heights = [getattr(some[tokens], f"{part}_us") for tokens in batches]
                label = part if place == 0 else None
                axes.bar(at, heights, 0.36, bottom=bottom, color=colour, alpha=1 - 0.35 * place, label=label)
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(batches)), [str(tokens) for tokens in batches])
        axes.set_xlabel(f"tokens a rank; left {', right '.join(ways)}")
        axes.set_ylabel("us, dispatch + combine, one graph")
        axes.legend(frameon=False, fontsize=9)

    return _save(path, 8, fill)
