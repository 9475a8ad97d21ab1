"""The picture of a replay: rows from rank to rank, and the load of every expert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tile_ep.cli.report import Report
from tile_ep.errors import TileEPError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NUMBERS = 16  # ranks; with more the cells are too small for numbers


def draw(report: Report, path: Path) -> None:
    """Write a PNG.

    Raises:
        TileEPError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TileEPError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    trace = report.trace
    figure.suptitle(
        f"{trace['tokens']:,} tokens, top-{trace['topk']} of {trace['experts']} experts on {len(report.ranks)} ranks",
        fontsize=13,
        fontweight="bold",
    )
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    _draw_traffic(figure, left, report)
    _draw_load(right, report)
    figure.savefig(path, dpi=130, format="png")


def _draw_traffic(figure: Figure, axes: Axes, report: Report) -> None:
    rows = [result.rows_sent_per_rank for result in report.ranks]
    ranks = range(len(rows))
    most = max(1, max(map(max, rows)))
    image = axes.imshow(rows, cmap="Blues", vmin=0, vmax=most)
    figure.colorbar(image, ax=axes, label="rows", shrink=0.85)
    if len(rows) <= _MOST_NUMBERS:
        for source in ranks:
            for target in ranks:
                count = rows[source][target]
                colour = "white" if count > 0.6 * most else "#1b2a41"
                axes.text(
                    target, source, f"{count:,}", ha="center", va="center", color=colour, fontsize=_font(len(rows))
                )
        axes.set_xticks(ranks)
        axes.set_yticks(ranks)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(f"Dispatch: {report.rows_are}", fontsize=11)


def _font(num_ranks: int) -> float:
    return max(5.5, 11 - 0.5 * max(0, num_ranks - 4))


def _draw_load(axes: Axes, report: Report) -> None:
    from matplotlib import colormaps

    load = report.load_per_expert
    mean = sum(load) / len(load)
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    for result, first in zip(report.ranks, report.first_experts, strict=True):
        experts = range(first, first + len(result.load_per_expert))
        axes.bar(experts, result.load_per_expert, width=0.85, color=colours[result.rank % len(colours)])
        middle = first + (len(experts) - 1) / 2
        if len(report.ranks) <= _MOST_NUMBERS:
            axes.annotate(
                f"rank {result.rank}",
                (middle, 1.0),
                (0, -5),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=9 if len(report.ranks) <= 8 else 6,
                color=colours[result.rank % len(colours)],
                fontweight="bold",
            )
        if first:
            axes.axvline(first - 0.5, color="#c8ccd4", linewidth=0.8, zorder=0)
    axes.axhline(mean, color="#333333", linewidth=1, linestyle="--", label=f"mean {mean:,.0f}")
    axes.set_xlim(-0.7, len(load) - 0.3)
    axes.set_ylim(0, 1.15 * max(1, *load))
    axes.set_xlabel("expert")
    axes.set_ylabel("selections")
    axes.set_title(f"Load per expert, busiest {max(load) / mean if mean else 0:.1f}x the mean", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.94), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
