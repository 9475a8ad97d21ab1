"""Every size formula: who owns which expert, what fits, and that no two arrays share a byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tile_ep.layout import (
    BUFFER_GRANULARITY,
    MAX_BLOCKS,
    MAX_TOPK,
    ROW_ALIGNMENT,
    ControlLayout,
    ExpertPartition,
    RegionLayout,
    SlotLayout,
    align,
    balanced_rows,
    ceil_div,
    expand_factor_for,
    expanded_capacity,
    expanded_starts,
    rank_capacity,
    region_layout,
)


@st.composite
def partitions(draw: st.DrawFn) -> ExpertPartition:
    num_ranks = draw(st.integers(1, 80))
    return ExpertPartition(num_ranks + draw(st.integers(0, 300)), num_ranks)


@given(st.integers(0, 10**15), st.integers(1, 10**6))
def test_rounding(value: int, unit: int) -> None:
    assert unit * (ceil_div(value, unit) - 1) < value <= unit * ceil_div(value, unit)
    rounded = align(value, unit)
    assert rounded % unit == 0 and value <= rounded < value + unit


# ---------------------------------------------------------------- experts


@given(partitions())
def test_experts_are_dealt_in_contiguous_ranges(partition: ExpertPartition) -> None:
    hands = [partition.num_local(rank) for rank in range(partition.num_ranks)]
    assert sum(hands) == partition.num_experts
    assert hands == sorted(hands, reverse=True) and hands[0] - hands[-1] <= 1 and hands[-1] >= 1
    assert [partition.first(rank) for rank in range(partition.num_ranks + 1)] == [
        sum(hands[:rank]) for rank in range(partition.num_ranks + 1)
    ]


@given(partitions())
def test_rank_of_inverts_first(partition: ExpertPartition) -> None:
    owners = [partition.rank_of(expert) for expert in range(partition.num_experts)]
    assert owners == [rank for rank in range(partition.num_ranks) for _ in range(partition.num_local(rank))]
    assert all(owners[partition.first(rank)] == rank for rank in range(partition.num_ranks))
    assert all(partition.first(owner) <= expert < partition.first(owner + 1) for expert, owner in enumerate(owners))


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "hands"),
    [(256, 3, [86, 85, 85]), (8, 8, [1] * 8), (1, 1, [1]), (7, 4, [2, 2, 2, 1]), (64, 5, [13, 13, 13, 13, 12])],
)
def test_hands(num_experts: int, num_ranks: int, hands: list[int]) -> None:
    partition = ExpertPartition(num_experts, num_ranks)
    assert [partition.num_local(rank) for rank in range(num_ranks)] == hands


# ---------------------------------------------------------------- segments and capacities


def test_starts_by_hand() -> None:
    assert expanded_starts([], 4) == [0]
    assert expanded_starts([3, 0, 4, 5], 1) == [0, 3, 3, 7, 12]
    assert expanded_starts([3, 0, 4, 5], 4) == [0, 4, 4, 8, 16]


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 130))
def test_segments(counts: list[int], alignment: int) -> None:
    starts = expanded_starts(counts, alignment)
    assert len(starts) == len(counts) + 1 and starts[0] == 0
    for count, start, end in zip(counts, starts[:-1], starts[1:], strict=True):
        assert start % alignment == 0 and start + count <= end < start + count + alignment
        assert end > start or count == 0


def test_capacities_by_hand() -> None:
    assert rank_capacity(8, 4096) == 32768
    # 3 ranks of 10 tokens of 4 selections are 120; ranks of 86, 85, 85 experts in 256 get 40.3, 39.8, 39.8 of them.
    partition = ExpertPartition(256, 3)
    assert [balanced_rows(partition, rank, 10, 4) for rank in range(3)] == [41, 40, 40]
    assert [expanded_capacity(partition, rank, 10, 4, 1, 1.0) for rank in range(3)] == [41, 40, 40]
    assert [expanded_capacity(partition, rank, 10, 4, 1, 1.01) for rank in range(3)] == [42, 41, 41]
    assert [expanded_capacity(partition, rank, 10, 4, 8, 2.0) for rank in range(3)] == [82 + 602, 80 + 595, 80 + 595]
    assert [expanded_capacity(partition, rank, 10, 4, 8, 99.0) for rank in range(3)] == [
        120 + 602,
        120 + 595,
        120 + 595,
    ]


@st.composite
def exchanges(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `expanded_capacity` but the factor."""
    partition = draw(partitions())
    return {
        "partition": partition,
        "rank": draw(st.integers(0, partition.num_ranks - 1)),
        "num_max_tokens_per_rank": draw(st.integers(1, 10_000)),
        "num_topk": draw(st.integers(1, MAX_TOPK)),
        "expert_alignment": draw(st.integers(1, 256)),
    }


def selections(exchange: dict[str, Any]) -> int:
    return exchange["partition"].num_ranks * exchange["num_max_tokens_per_rank"] * exchange["num_topk"]


@given(exchanges(), st.floats(0.01, 1000.0), st.floats(0.01, 1000.0))
def test_capacity_grows_with_the_factor(exchange: dict[str, Any], one: float, other: float) -> None:
    lower, upper = sorted((one, other))
    assert expanded_capacity(**exchange, expand_factor=lower) <= expanded_capacity(**exchange, expand_factor=upper)


@given(exchanges(), st.data())
def test_the_number_of_ranks_as_factor_holds_everything(exchange: dict[str, Any], data: st.DataObject) -> None:
    """However the selections are spread over the experts of a rank, gaps included."""
    hand = exchange["partition"].num_local(exchange["rank"])
    everything = selections(exchange)
    cuts = sorted(data.draw(st.lists(st.integers(0, everything), min_size=hand - 1, max_size=hand - 1)))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, everything], strict=True)]
    capacity = expanded_capacity(**exchange, expand_factor=float(exchange["partition"].num_experts))
    assert expanded_starts(counts, exchange["expert_alignment"])[-1] <= capacity
    assert capacity == everything + hand * (exchange["expert_alignment"] - 1)


@given(exchanges(), st.data())
def test_the_factor_needed_holds_the_rows(exchange: dict[str, Any], data: st.DataObject) -> None:
    """And a hundredth less does not hold them, whole rows counted."""
    slack = exchange["partition"].num_local(exchange["rank"]) * (exchange["expert_alignment"] - 1)
    rows = data.draw(st.integers(0, selections(exchange) + slack))
    factor = expand_factor_for(**exchange, rows_needed=rows)
    hundredths = round(100 * factor)
    assert factor == hundredths / 100
    assert expanded_capacity(**exchange, expand_factor=factor) >= rows
    sizes = {name: exchange[name] for name in ("partition", "rank", "num_max_tokens_per_rank", "num_topk")}
    if rows > slack:
        assert (hundredths - 1) * balanced_rows(**sizes) < 100 * (rows - slack)
    else:
        assert factor == 0.0, "the room for gaps is enough"


@given(exchanges(), st.data())
def test_the_factor_needed_is_tight(exchange: dict[str, Any], data: st.DataObject) -> None:
    """Where a hundredth is at least a row, 0.02 less is always too little."""
    exchange["num_max_tokens_per_rank"] *= 1000
    slack = exchange["partition"].num_local(exchange["rank"]) * (exchange["expert_alignment"] - 1)
    rows = data.draw(st.integers(slack + 1, selections(exchange) + slack))
    factor = expand_factor_for(**exchange, rows_needed=rows)
    assert expanded_capacity(**exchange, expand_factor=factor) >= rows
    assert factor <= 0.02 or expanded_capacity(**exchange, expand_factor=factor - 0.02) < rows


# ---------------------------------------------------------------- memory

Array = tuple[str, int, int]  # name, offset, bytes


def check_arrays(arrays: list[Array], num_bytes: int, aligned: int) -> None:
    """In bounds, without overlap, on boundaries; zero-sized arrays take no room."""
    end, last = 0, "the start"
    for name, offset, size in sorted(arrays, key=lambda array: array[1:]):
        assert offset % aligned == 0, f"{name} starts at {offset}"
        assert offset >= end, f"{name} at {offset} overlaps {last}, which ends at {end}"
        end, last = offset + size, name
    assert end <= num_bytes, f"{last} ends at {end} of {num_bytes}"


def control_arrays(control: ControlLayout) -> list[Array]:
    ranks = control.num_ranks
    return [
        ("words", control.words, ranks * control.word_stride),
        ("done", control.done, 8 * ranks),
        ("ready", control.ready, 8 * ranks),
        ("read_done", control.read_done, 8 * ranks),
        ("tallies", control.tallies, 4 * MAX_BLOCKS * control.columns),
        ("taken", control.taken, 8),
        ("staged", control.staged, 8),
    ]


def control_counters(control: ControlLayout) -> list[Array]:
    names = ("num_bad", "failed", "count_arrivals")
    return [(name, getattr(control, name), 4) for name in names]


def slot_arrays(slot: SlotLayout) -> list[Array]:
    return [
        ("data", slot.data, slot.rows * slot.row_bytes),
        ("scales", slot.scales, slot.rows * slot.scale_bytes),
        ("topk_idx", slot.topk_idx, slot.rows * slot.num_topk * 8),
        ("topk_weights", slot.topk_weights, slot.rows * slot.num_topk * 4),
        ("source", slot.source, slot.rows * 8),
    ]


controls = st.builds(ControlLayout, st.integers(1, 80), st.integers(1, 512))
slots = st.builds(
    SlotLayout,
    rows=st.integers(0, 5000),
    row_bytes=st.integers(1, 2000).map(lambda units: 16 * units),
    scale_bytes=st.integers(0, 500),
    num_topk=st.integers(1, MAX_TOPK),
)


@given(controls)
def test_control_block(control: ControlLayout) -> None:
    check_arrays(control_arrays(control), control.num_bytes, 8)
    check_arrays([*control_arrays(control), *control_counters(control)], control.num_bytes, 4)
    check_arrays([("words", control.words, 0), ("done", control.done, 0), ("tallies", control.tallies, 0)], 2**62, 128)
    # One word for the slot, one for each destination, one for each expert.
    assert control.columns == control.num_ranks + control.num_experts
    assert control.word_stride == 8 * (1 + control.columns)
    assert control.num_bytes % ROW_ALIGNMENT == 0


@given(slots)
def test_slot(slot: SlotLayout) -> None:
    check_arrays(slot_arrays(slot), slot.num_bytes, 128)
    assert slot.num_bytes % ROW_ALIGNMENT == 0


@given(controls, slots, st.integers(1, 4))
def test_region(control: ControlLayout, slot: SlotLayout, num_slots: int) -> None:
    region = RegionLayout(control, slot, num_slots)
    arrays = [("control", 0, control.num_bytes)]
    for number in range(num_slots):
        base = region.slots + number * slot.num_bytes
        arrays += [(f"{name} of slot {number}", base + offset, size) for name, offset, size in slot_arrays(slot)]
    arrays.append(("combine_rows", region.combine_rows, slot.rows * slot.row_bytes))
    arrays.append(("combine_weights", region.combine_weights, slot.rows * slot.num_topk * 4))
    check_arrays(arrays, region.num_bytes, 128)
    assert region.allocation % BUFFER_GRANULARITY == 0
    assert region.num_bytes <= region.allocation < region.num_bytes + BUFFER_GRANULARITY


@given(slots, st.sampled_from(("rows", "row_bytes", "scale_bytes", "num_topk")), st.integers(1, 100))
def test_larger_parts_make_larger_slots(slot: SlotLayout, name: str, more: int) -> None:
    larger = replace(slot, **{name: getattr(slot, name) + 16 * more})
    assert larger.num_bytes >= slot.num_bytes
    smaller, bigger = (RegionLayout(ControlLayout(4, 8), size, 2) for size in (slot, larger))
    assert bigger.num_bytes >= smaller.num_bytes and bigger.allocation >= smaller.allocation


@given(controls, st.integers(0, 9), st.integers(0, 64))
def test_more_ranks_and_experts_make_larger_control_blocks(control: ControlLayout, ranks: int, experts: int) -> None:
    larger = ControlLayout(control.num_ranks + ranks, control.num_experts + experts)
    assert larger.num_bytes >= control.num_bytes


@st.composite
def buffers(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `region_layout`."""
    num_ranks = draw(st.integers(1, 72))
    return {
        "num_ranks": num_ranks,
        "num_max_tokens_per_rank": draw(st.integers(1, 5000)),
        "row_bytes": draw(st.integers(1, 40_000)),
        "scale_bytes": draw(st.integers(0, 1000)),
        "num_topk": draw(st.integers(1, MAX_TOPK)),
        "num_experts": draw(st.one_of(st.just(0), st.integers(num_ranks, num_ranks + 300))),
        "expand_factor": draw(st.sampled_from((0.5, 1.0, 1.25, 2.0, 100.0))),
        "num_slots": draw(st.integers(1, 3)),
        "expert_alignment": draw(st.sampled_from((1, 7, 128))),
    }


@given(buffers())
def test_region_holds_both_layouts_on_every_rank(arguments: dict[str, Any]) -> None:
    region = region_layout(**arguments)
    num_ranks, tokens = arguments["num_ranks"], arguments["num_max_tokens_per_rank"]
    partition = ExpertPartition(arguments["num_experts"] or num_ranks, num_ranks)
    assert region.slot.rows >= rank_capacity(num_ranks, tokens)
    for rank in range(num_ranks):
        capacity = expanded_capacity(
            partition,
            rank,
            tokens,
            arguments["num_topk"],
            arguments["expert_alignment"],
            arguments["expand_factor"],
        )
        assert region.slot.rows >= capacity
    assert region.slot.row_bytes >= arguments["row_bytes"] and region.slot.row_bytes % 16 == 0
    assert region.slot.scale_bytes == arguments["scale_bytes"] and region.slot.num_topk == arguments["num_topk"]
    assert (region.control.num_ranks, region.control.num_experts) == (num_ranks, partition.num_experts)


@given(
    buffers(),
    st.sampled_from(
        (
            "num_max_tokens_per_rank",
            "row_bytes",
            "scale_bytes",
            "num_topk",
            "expand_factor",
            "num_slots",
            "expert_alignment",
        )
    ),
    st.integers(1, 50),
)
def test_asking_for_more_takes_no_less(arguments: dict[str, Any], name: str, more: int) -> None:
    larger = region_layout(**arguments | {name: arguments[name] + more})
    region = region_layout(**arguments)
    assert larger.num_bytes >= region.num_bytes and larger.allocation >= region.allocation


def test_without_topk_only_the_rank_layout_is_provided_for() -> None:
    region = region_layout(8, 100, 32, 4, 0, 64, 2.0, 2)
    assert region.slot.rows == 800 and region.slot.num_topk == MAX_TOPK
    assert region_layout(8, 100, 32, 4, 8, 64, 2.0, 2).slot.rows == 1600 + 8 * 127
