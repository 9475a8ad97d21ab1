"""Draws the pictures of the documentation: `python docs/figures.py [DIRECTORY]` (default `docs/images`).

Rows and metadata of the layouts come from `tile_ep.reference`, offsets from `tile_ep.layout`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from tile_ep import reference
from tile_ep.layout import ExpertPartition, region_layout

INK, QUIET, PALE = "#1f2933", "#7b8794", "#eef1f4"
SOURCE = ("#2f6fb3", "#c2571a")
TINT = ("#dce9f6", "#fbe5d6")

NAMES = (("a0", "a1", "a2"), ("b0", "b1"))
ROUTING = ([[0, 1], [0, 2], [3, -1]], [[1, 2], [2, 3]])
NUM_EXPERTS, ALIGNMENT = 4, 2


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure whose data units are tenths of an inch, y downwards."""
    figure = plt.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def text(axes: Any, x: float, y: float, words: str, size: float = 9, color: str = INK, **style: Any) -> None:
    style = {"ha": "left", "va": "center", **style}
    axes.text(x, y, words, fontsize=size, color=color, **style)


def box(axes: Any, x: float, y: float, width: float, height: float, face: str, edge: str, **style: Any) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=1, **style))


def panel(axes: Any, x: float, y: float, width: float, height: float, title: str) -> None:
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.8", facecolor=PALE, edgecolor="none"
    )
    axes.add_patch(shape)
    text(axes, x + 1.2, y + 1.7, title, size=9.5, weight="bold")


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0.0) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=9, linewidth=1.2,
            color=color, shrinkA=1, shrinkB=1,
        )
    )  # fmt: skip


def example(do_expand: bool) -> list[reference.DispatchOutput]:
    """The dispatch of both pictures. A row's payload is its source, `(rank, token)`, and its first weight is free."""
    xs = [torch.tensor([[rank, token] for token in range(len(names))]).float() for rank, names in enumerate(NAMES)]
    return reference.dispatch(
        xs, [torch.tensor(rows) for rows in ROUTING], num_experts=NUM_EXPERTS, num_max_tokens_per_rank=3,
        expert_alignment=ALIGNMENT if do_expand else 1, expand_factor=3.0, do_expand=do_expand,
    )  # fmt: skip


ROW, TOKENS_X, ROWS_X = 2.6, 2.0, 40.0


def draw_tokens(axes: Any) -> dict[tuple[int, int], tuple[float, float]]:
    """The sending side; returns where each token's arrows start."""
    starts = {}
    for rank, top in enumerate((6.0, 22.0)):
        panel(axes, TOKENS_X, top, 20, 3.4 + ROW * len(NAMES[rank]) + 0.8, f"rank {rank} sends")
        for token, name in enumerate(NAMES[rank]):
            y = top + 3.4 + ROW * token
            box(axes, TOKENS_X + 1.2, y, 5, 2.1, TINT[rank], SOURCE[rank])
            text(axes, TOKENS_X + 3.7, y + 1.05, name, ha="center", weight="bold")
            chosen = ", ".join(f"{expert}" if expert >= 0 else "−1" for expert in ROUTING[rank][token])
            text(axes, TOKENS_X + 7.4, y + 1.05, f"topk_idx  {chosen}", size=8.5)
            starts[rank, token] = (TOKENS_X + 20.2, y + 1.05)
    return starts


def draw_row(axes: Any, x: float, y: float, source: tuple[int, int] | None) -> None:
    if source is None:
        box(axes, x, y, 5, 2.1, "white", QUIET, linestyle=(0, (3, 2)))
        text(axes, x + 2.5, y + 1.05, "gap", size=8, color=QUIET, ha="center")
        return
    rank, token = source
    box(axes, x, y, 5, 2.1, TINT[rank], SOURCE[rank])
    text(axes, x + 2.5, y + 1.05, NAMES[rank][token], ha="center", weight="bold")


def rank_layout() -> Any:
    """One row per (token, rank)."""
    figure, axes = canvas(74, 39)
    text(
        axes,
        2,
        2.6,
        "Rank layout: one row per (token, rank), ordered by (source rank, token)",
        size=11.5,
        weight="bold",
    )
    starts = draw_tokens(axes)
    outputs = example(do_expand=False)
    top = 6.0
    for rank, output in enumerate(outputs):
        recv_x, recv_idx = output.recv_x, output.recv_topk_idx
        assert isinstance(recv_x, torch.Tensor) and recv_idx is not None
        number = len(recv_x)
        panel(axes, ROWS_X, top, 32, 3.4 + ROW * number + 0.8, f"rank {rank} receives")
        text(
            axes,
            ROWS_X + 31,
            top + 1.7,
            f"experts {2 * rank} and {2 * rank + 1}, here 0 and 1",
            size=8,
            color=QUIET,
            ha="right",
        )
        for row in range(number):
            source = (int(recv_x[row, 0]), int(recv_x[row, 1]))
            y = top + 3.4 + ROW * row
            text(axes, ROWS_X + 1.4, y + 1.05, f"{row}", size=8, color=QUIET)
            draw_row(axes, ROWS_X + 3, y, source)
            local = ", ".join(str(int(e)).replace("-", "−") for e in recv_idx[row])
            text(axes, ROWS_X + 9.4, y + 1.05, f"recv_topk_idx  {local}", size=8.5)
            arrow(axes, starts[source], (ROWS_X - 0.2, y + 1.05), SOURCE[source[0]])
        top += 3.4 + ROW * number + 0.8 + 2.0
    text(
        axes,
        2,
        37.0,
        "a0 has both of its experts on rank 0: it crosses once, and its row says so in both selections.",
        size=8.5,
        color=QUIET,
    )
    return figure


def expanded_layout() -> Any:
    """One row per (token, expert)."""
    figure, axes = canvas(74, 47)
    text(axes, 2, 2.6, "Expanded layout: one row per (token, expert), grouped by expert", size=11.5, weight="bold")
    starts = draw_tokens(axes)
    partition = ExpertPartition(NUM_EXPERTS, len(NAMES))
    top = 6.0
    for rank, output in enumerate(example(do_expand=True)):
        recv_x, handle = output.recv_x, output.handle
        assert isinstance(recv_x, torch.Tensor)
        counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
        aligned = handle.num_recv_tokens_per_expert_list
        number = sum(aligned)
        panel(axes, ROWS_X, top, 32, 3.4 + ROW * number + 0.8, f"rank {rank} receives")
        row = 0
        for expert, (count, rows) in enumerate(zip(counts, aligned, strict=True)):
            first = top + 3.4 + ROW * row
            axes.plot([ROWS_X + 9.2] * 2, [first, first + ROW * rows - 0.5], color=INK, linewidth=1.6)
            text(
                axes,
                ROWS_X + 10.2,
                first + ROW * rows / 2 - 0.25,
                f"expert {partition.first(rank) + expert}: {count} rows"
                + (f", aligned to {ALIGNMENT}" if rows > count else ""),
                size=8.5,
            )
            for place in range(rows):
                y = top + 3.4 + ROW * row
                source = (int(recv_x[row, 0]), int(recv_x[row, 1])) if place < count else None
                text(axes, ROWS_X + 1.4, y + 1.05, f"{row}", size=8, color=QUIET)
                draw_row(axes, ROWS_X + 3, y, source)
                if source:
                    arrow(axes, starts[source], (ROWS_X - 0.2, y + 1.05), SOURCE[source[0]])
                row += 1
        top += 3.4 + ROW * number + 0.8 + 2.0
    text(
        axes,
        2,
        44.8,
        "Each segment is the input of one expert's matrix product: a grouped GEMM runs over it without any sorting.",
        size=8.5,
        color=QUIET,
    )
    return figure


def memory() -> Any:
    """A rank's symmetric memory, to scale but for the control block."""
    ranks, tokens, hidden, topk, experts = 8, 4096, 7168, 8, 256
    layout = region_layout(ranks, tokens, 2 * hidden, 4 * hidden // 128, topk, experts, expand_factor=1.0, num_slots=2)
    slot = layout.slot
    figure, axes = canvas(84, 27)
    text(axes, 2, 2.4, "Symmetric memory of one rank", size=11.5, weight="bold")
    text(
        axes,
        2,
        5.0,
        f"{ranks} ranks × {tokens:,} tokens × {hidden:,} bf16, top-{topk} of {experts}, expand_factor 1, two slots: "
        f"{layout.allocation / 2**30:.2f} GiB",
        size=9,
        color=QUIET,
    )
    sizes = [
        ("control", layout.slots),
        ("receive slot 0", slot.num_bytes),
        ("receive slot 1", slot.num_bytes),
        ("combine input", layout.num_bytes - layout.combine_rows),
    ]
    left, width, top = 2.0, 80.0, 7.6
    total = sum(size for _, size in sizes[1:])
    x = left
    places = {}
    for name, size in sizes:
        wide = 5.5 if name == "control" else (width - 5.5) * size / total
        box(axes, x, top, wide, 4.2, "#dfe4ea" if name == "control" else TINT[name == "combine input"], INK)
        shown = f"{size / 2**20:.1f} MiB" if size < 2**28 else f"{size / 2**30:.2f} GiB"
        text(axes, x + wide / 2, top + 1.5, name, size=8.5, ha="center", weight="bold")
        text(axes, x + wide / 2, top + 3.1, shown, size=7.5, ha="center", color=QUIET)
        places[name] = (x, wide)
        x += wide
    x, wide = places["receive slot 0"]
    low = 16.2
    for here, there in ((x, left), (x + wide, left + 62)):
        axes.plot([here, there], [top + 4.2, low], color=QUIET, linewidth=0.8, linestyle=(0, (3, 2)))
    parts = [
        ("data", slot.scales, "rows × row bytes"),
        ("scales", slot.topk_idx - slot.scales, "rows × scale bytes"),
        ("topk_idx", slot.topk_weights - slot.topk_idx, "rows × K"),
        ("topk_weights", slot.source - slot.topk_weights, "rows × K"),
        ("source", slot.num_bytes - slot.source, "rows × 2"),
    ]
    x = left
    for (name, size, shape), wide in zip(parts, (26, 10, 8.5, 9.5, 8), strict=True):
        box(axes, x, low, wide, 4.6, "white", SOURCE[0])
        text(axes, x + wide / 2, low + 1.3, name, size=8.5, ha="center", weight="bold")
        text(axes, x + wide / 2, low + 3.0, shape, size=7, ha="center", color=QUIET)
        text(axes, x + wide / 2, low + 5.8, f"{size / 2**20:.1f} MiB", size=7.5, ha="center", color=QUIET)
        x += wide
    text(axes, left + 64, low + 1.3, "dense arrays over rows:", size=8.5)
    text(axes, left + 64, low + 3.1, "what dispatch returns", size=8.5)
    text(axes, left + 64, low + 4.9, "are views of them", size=8.5)
    text(
        axes,
        2,
        24.8,
        "The upper bar is to scale except for the control block, the lower one is not.",
        size=8,
        color=QUIET,
    )
    return figure


def stage(axes: Any, x: float, y: float, width: float, title: str, lines: Iterable[str], color: str) -> None:
    lines = list(lines)
    box(axes, x, y, width, 3.0 + 1.7 * len(lines), "white", color)
    box(axes, x, y, width, 2.4, color, color)
    text(axes, x + 0.9, y + 1.2, title, size=9, color="white", weight="bold")
    for number, line in enumerate(lines):
        text(axes, x + 0.9, y + 3.6 + 1.7 * number, line, size=8)


def protocol() -> Any:
    """What a rank does in dispatch and combine, and what it shares with a peer."""
    figure, axes = canvas(94, 67)
    columns = (2.0, 37.5, 63.0)
    for x, words in zip(
        columns, ("rank s, one launch of num_sms blocks", "crosses the link", "memory of rank d"), strict=True
    ):
        text(axes, x, 5.6, words, size=9, color=QUIET)
    text(axes, 2, 2.6, "Dispatch", size=12, weight="bold")
    blue, brown = SOURCE
    stage(axes, 2, 7.2, 29, "1  count", ["a block tallies its tokens per destination", "and numbers its rows"], blue)
    stage(
        axes,
        2,
        14.8,
        29,
        "2  exchange",
        ["the last block sends words, all blocks", "wait for the words of all peers"],
        blue,
    )
    stage(
        axes,
        2,
        22.4,
        29,
        "3  scatter",
        ["a warp takes a chunk: one load into", "shared memory, one store per destination"],
        blue,
    )
    stage(
        axes,
        2,
        30.0,
        29,
        "4  finish",
        ["a block has written its rows, tells every", "peer, and waits for all peers"],
        blue,
    )
    box(axes, 63, 14.8, 29, 6.4, "#dfe4ea", INK)
    text(axes, 64, 16.8, "control block, words[s]", size=8.5, weight="bold")
    text(axes, 64, 19.0, "slot of s, count per rank, per expert", size=8)
    box(axes, 63, 22.4, 29, 6.4, TINT[0], INK)
    text(axes, 64, 24.4, "receive slot", size=8.5, weight="bold")
    text(axes, 64, 26.6, "row base[s, d] + number of earlier rows", size=8)
    box(axes, 63, 30.0, 29, 6.4, "#dfe4ea", INK)
    text(axes, 64, 32.0, "control block, done[s]", size=8.5, weight="bold")
    text(axes, 64, 34.2, "dispatches that s is through with", size=8)
    for y, words in (
        (18.0, "epoch | count, also “entered”"),
        (25.6, "data, scales, metadata"),
        (33.2, "each block's part of one, released"),
    ):
        arrow(axes, (31.2, y), (62.8, y), blue)
        text(axes, 47, y - 1.1, words, size=8, ha="center", color=blue)
    text(axes, 2, 40.6, "Combine", size=12, weight="bold")
    stage(
        axes,
        2,
        43.2,
        29,
        "1  stage,  2  announce",
        ["copy y into the combine input, or nothing;", "fence, tell every peer, wait for all"],
        brown,
    )
    stage(
        axes,
        2,
        50.8,
        29,
        "3  pull and reduce",
        ["a warp takes a chunk of a token: rows come", "through shared memory into an fp32 sum"],
        brown,
    )
    stage(axes, 2, 58.4, 29, "4  leave", ["tell every peer that its rows are read;", "wait for nobody"], brown)
    box(axes, 63, 43.2, 29, 6.4, "#dfe4ea", INK)
    text(axes, 64, 45.2, "control block, ready[s]", size=8.5, weight="bold")
    text(axes, 64, 47.4, "epoch", size=8)
    box(axes, 63, 50.8, 29, 6.4, TINT[1], INK)
    text(axes, 64, 52.8, "combine input of d", size=8.5, weight="bold")
    text(axes, 64, 55.0, "one row per received row", size=8)
    box(axes, 63, 58.4, 29, 6.4, "#dfe4ea", INK)
    text(axes, 64, 60.4, "control block, read_done[s]", size=8.5, weight="bold")
    text(axes, 64, 62.6, "combines that s is through with", size=8)
    arrow(axes, (31.2, 46.4), (62.8, 46.4), brown)
    text(axes, 47, 45.3, "epoch, released", size=8, ha="center", color=brown)
    arrow(axes, (62.8, 54.0), (31.2, 54.0), brown)
    text(axes, 47, 52.9, "rows of this rank's tokens", size=8, ha="center", color=brown)
    arrow(axes, (31.2, 61.6), (62.8, 61.6), brown)
    text(axes, 47, 60.5, "each block's part of one, released", size=8, ha="center", color=brown)
    return figure


FIGURES = {"rank-layout": rank_layout, "expanded-layout": expanded_layout, "memory": memory, "protocol": protocol}


def main(directory: Path) -> None:
    """Write every picture."""
    directory.mkdir(parents=True, exist_ok=True)
    plt.rcParams["font.family"] = "DejaVu Sans"
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(directory / f"{name}.png", dpi=130, facecolor="white", metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
