"""The measuring harness: what it counts, checks and writes. Nothing here depends on how long anything takes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tile_ep import reference
from tile_ep.bench import session as sessions
from tile_ep.bench.ceilings import Ceilings
from tile_ep.bench.clocks import Spread, slowest
from tile_ep.bench.exchange import Exchange
from tile_ep.bench.launch import execute
from tile_ep.bench.machine import Machine, gpu_processes
from tile_ep.bench.measure import Figure, Operation, measure
from tile_ep.bench.overlap import Gemm, Hidden, leaving, next_rows
from tile_ep.bench.peers import all_peers
from tile_ep.bench.peers.plain_torch import PlainTorch
from tile_ep.bench.plots import draw
from tile_ep.bench.ranks import SimulatedRanks
from tile_ep.bench.report import against_peers, as_dict, print_report, read_json, write_json
from tile_ep.bench.session import Points, Results, Settings, check
from tile_ep.bench.small import SmallBatch
from tile_ep.bench.workload import (
    FIGURES,
    HOW_COUNTED,
    RANK_LAYOUT,
    Bytes,
    Routed,
    Shape,
    Workload,
    WrongResultError,
    count_bytes,
    require,
)
from tile_ep.cli import app
from tile_ep.quantize import per_token_cast_to_fp8

SHAPE = Shape(ranks=2, tokens=4, hidden=32, topk=2, experts=4)
CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"

needs_simulator = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None or shutil.which("g++") is None, reason="needs tilelang and g++"
)


# ---------------------------------------------------------------- bytes


# Two ranks of 3 and 2 tokens. Rank 0 sends 2 rows to itself and 3 to rank 1; rank 1 sends 1 to rank 0 and 2 to itself.
ROUTED = Routed(tokens=[3, 2], rows=[[2, 3], [1, 2]], selections=[[2, 4], [1, 3]])


@pytest.mark.parametrize(
    ("name", "memory", "busiest", "wire", "rows"),
    [
        # own + received: 5 + 8 over both; rank 0 has 3 + 3, rank 1 has 2 + 5; 3 rows leave rank 0 and reach rank 1.
        ("dispatch", 13, 7, 3, 8),
        ("dispatch, fp8", 13, 7, 3, 8),
        ("dispatch, cached", 13, 7, 3, 8),
        ("combine, zero-copy", 13, 7, 3, 8),
        # received rows twice more.
        ("combine, staged", 29, 17, 3, 8),
        # own + selections: 5 + 10; rank 0 has 3 + 3, rank 1 has 2 + 7; 4 selections leave rank 0.
        ("dispatch, expanded", 15, 9, 4, 10),
        # own + 2 received + selections: 5 + 16 + 10; rank 1 has 2 + 10 + 7; rows cross, not selections.
        ("combine, expanded", 31, 19, 3, 8),
    ],
)
def test_bytes_by_hand(name: str, memory: int, busiest: int, wire: int, rows: int) -> None:
    assert count_bytes(name, ROUTED, 100, one_device=True) == Bytes(100 * memory, 0, 100 * rows)
    assert count_bytes(name, ROUTED, 100, one_device=False) == Bytes(100 * busiest, 100 * wire, 100 * rows)


def test_every_figure_says_how_its_bytes_are_counted() -> None:
    assert set(HOW_COUNTED) == set(FIGURES)
    assert set(RANK_LAYOUT) < set(FIGURES)


def test_the_ideal_time_is_that_of_the_slower_of_memory_and_links() -> None:
    ceilings = Ceilings(num_bytes=1, copy=10.0, fill=5.0, peer=3.0, peer_both=2.0)
    assert ceilings.ideal_ms(Bytes(100, 10, 5)) == 10.0
    assert ceilings.ideal_ms(Bytes(100, 60, 5)) == 30.0
    assert replace(ceilings, peer=0.0, peer_both=0.0).ideal_ms(Bytes(100, 0, 5)) == 10.0


# ---------------------------------------------------------------- clocks


def test_what_samples_say() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0, 3)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0, 2)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_the_slowest_rank_counts_in_each_round() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError):
        slowest([[1.0], [1.0, 2.0]])


# ---------------------------------------------------------------- inputs and their checks


def test_a_workload_is_the_same_on_whichever_rank_asks() -> None:
    everywhere, alone = Workload(SHAPE, [0, 1], CPU, 2), Workload(SHAPE, [1], CPU, 2)
    for number in range(2):
        assert torch.equal(everywhere.x[number][1], alone.x[number][1])
        assert torch.equal(everywhere.make_x(0, number), everywhere.x[number][0])
        assert alone.routed[number] == everywhere.routed[number]
        for peer in range(2):
            for expert in range(SHAPE.experts):
                rows = alone.rows_for_expert(peer, expert, number)
                assert torch.equal(rows, everywhere.rows_for_expert(peer, expert, number))
    assert not torch.equal(everywhere.x[0][0], everywhere.x[1][0])


def test_counts_of_a_workload() -> None:
    work = Workload(Shape(3, 20, 8, 3, 7), [0, 1, 2], CPU, 1)
    partition = work.shape.partition
    for source, idx in work.topk_idx[0].items():
        assert all(len(set(row)) == 3 for row in idx.tolist())
        owners = [[partition.rank_of(expert) for expert in row] for row in idx.tolist()]
        for target in range(3):
            assert work.routed[0].rows[source][target] == sum(target in owner for owner in owners)
            assert work.routed[0].selections[source][target] == sum(owner.count(target) for owner in owners)
            tokens = [token for token, owner in enumerate(owners) if target in owner]
            assert work.tokens_for(source, target, 0).tolist() == tokens


def test_skew_and_lone_ranks() -> None:
    even, skewed = (Workload(Shape(2, 200, 8, 2, 16, skew=skew), [0, 1], CPU, 1) for skew in (0.0, 1.5))
    most = [int(torch.bincount(torch.cat([*work.topk_idx[0].values()]).flatten()).max()) for work in (even, skewed)]
    assert most[1] > 2 * most[0]
    assert skewed.expand_factor > even.expand_factor >= 1
    alone = Workload(replace(SHAPE, alone=True), [0, 1], CPU, 1)
    assert alone.routed[0].tokens == [4, 0] and sum(alone.routed[0].rows[1]) == 0


@pytest.fixture(name="dispatched")
def make_dispatched() -> tuple[Workload, list[reference.DispatchOutput]]:
    shape = Shape(ranks=3, tokens=6, hidden=16, topk=3, experts=7)
    work = Workload(shape, range(3), CPU, 1)
    x, idx = [*work.x[0].values()], [*work.topk_idx[0].values()]
    return work, reference.dispatch(list(x), idx, num_experts=7, num_max_tokens_per_rank=6)


def rows_of(output: reference.DispatchOutput) -> torch.Tensor:
    assert isinstance(output.recv_x, torch.Tensor)
    return output.recv_x


def test_checks_pass_what_is_right_and_see_what_is_wrong(
    dispatched: tuple[Workload, list[reference.DispatchOutput]],
) -> None:
    work, outputs = dispatched
    sums = reference.combine([rows_of(output) for output in outputs], [output.handle for output in outputs])
    for rank, (output, back) in enumerate(zip(outputs, sums, strict=True)):
        rows, source = rows_of(output), output.handle.recv_src_metadata[:, 0]
        work.check_rows(rank, 0, rows, source)
        work.check_sums(rank, 0, back.combined_x)
        work.check_sums(rank, 0, back.combined_x, exact=False)
        with pytest.raises(WrongResultError, match="are due"):
            work.check_rows(rank, 0, rows[:-1], source[:-1])
        with pytest.raises(WrongResultError, match="other tokens"):
            work.check_rows(rank, 0, rows.flip(0), source.flip(0))
        changed = rows.clone()
        changed[-1, -1] += 1
        with pytest.raises(WrongResultError, match="rows differ"):
            work.check_rows(rank, 0, changed, source)
        nearly = back.combined_x.clone()
        nearly.view(torch.int16)[0, 0] ^= 1
        with pytest.raises(WrongResultError, match="sums differ"):
            work.check_sums(rank, 0, nearly)
        work.check_sums(rank, 0, nearly, exact=False)
        with pytest.raises(WrongResultError, match="sums differ, by"):
            work.check_sums(rank, 0, back.combined_x * 1.1, exact=False)


def test_checks_of_what_is_quantised_before_it_is_sent(
    dispatched: tuple[Workload, list[reference.DispatchOutput]],
) -> None:
    work, _ = dispatched
    x, idx = [per_token_cast_to_fp8(x) for x in work.x[0].values()], [*work.topk_idx[0].values()]
    for rank, output in enumerate(reference.dispatch(list(x), idx, num_experts=7, num_max_tokens_per_rank=6)):
        scales, source = output.recv_x[1], output.handle.recv_src_metadata[:, 0]
        work.check_rows(rank, 0, scales, source, lambda x: per_token_cast_to_fp8(x)[1])
        with pytest.raises(WrongResultError, match="rows differ"):
            work.check_rows(rank, 0, scales.nextafter(scales + 1), source, lambda x: per_token_cast_to_fp8(x)[1])
    # 16 elements and one scale of 4 bytes.
    assert work.count_bytes("dispatch, fp8", True) == count_bytes("dispatch, fp8", work.routed[0], 20, True)


def test_checks_of_expanded_sums(dispatched: tuple[Workload, list[reference.DispatchOutput]]) -> None:
    work, _ = dispatched
    x, idx = [*work.x[0].values()], [*work.topk_idx[0].values()]
    outputs = reference.dispatch(list(x), idx, num_experts=7, num_max_tokens_per_rank=6, do_expand=True)
    sums = reference.combine([rows_of(output) for output in outputs], [output.handle for output in outputs])
    for rank, back in enumerate(sums):
        work.check_expanded_sums(rank, 0, back.combined_x)
        work.check_selection_sums(rank, 0, back.combined_x)
        wrong = back.combined_x.clone()
        wrong[0] = 0
        with pytest.raises(WrongResultError, match="expanded sums differ"):
            work.check_expanded_sums(rank, 0, wrong)
        with pytest.raises(WrongResultError, match="sums of selections differ"):
            work.check_selection_sums(rank, 0, wrong)


def test_plain_torch_gives_what_the_reference_gives(
    dispatched: tuple[Workload, list[reference.DispatchOutput]],
) -> None:
    work, outputs = dispatched
    plain = PlainTorch(SimulatedRanks(3), work)
    tokens = {rank: plain.pack(rank, 0).token for rank in range(3)}
    for rank, output in enumerate(outputs):
        rows, idx = plain.exchange(rank, 0)
        assert torch.equal(rows, rows_of(output)) and torch.equal(idx, output.recv_topk_idx)
    random = torch.Generator().manual_seed(3)
    y = [torch.randn(rows_of(output).shape, generator=random) for output in outputs]
    sums = reference.combine(list(y), [output.handle for output in outputs])
    for rank, back in enumerate(sums):
        got = plain.combine(rank, 0, dict(enumerate(y)), tokens[rank])
        torch.testing.assert_close(got, back.combined_x, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- measuring


class CountingRanks(SimulatedRanks):
    """Ranks whose calls are counted."""

    def __init__(self) -> None:
        super().__init__(2)
        self.rounds = 0

    def round(self, phases: Sequence[Callable[[int], Any]], before: Callable[[int], None] | None = None) -> Any:
        self.rounds += 1
        return super().round(phases, before)


CEILINGS = Ceilings(1, 1e9, 1e9)


def test_a_figure_is_checked_before_and_after_it_is_timed() -> None:
    ranks, work = CountingRanks(), Workload(SHAPE, [0, 1], CPU, 2)
    sets: list[tuple[int, int]] = []
    checked: list[int] = []
    prepared: list[tuple[int, int]] = []

    def call(rank: int, number: int) -> int:
        sets.append((rank, number))
        return rank

    def right(rank: int, number: int, result: Any) -> None:
        require(result == rank and number == 0, "another result")
        checked.append(ranks.rounds)

    operation = Operation("dispatch", (call,), right, before=lambda rank, number: prepared.append((rank, number)))
    figure = measure("base", "mine", operation, ranks, work, CEILINGS, 3, repeat=4)
    assert checked == [1, 1, ranks.rounds, ranks.rounds]  # both ranks, first and last round
    assert {number for _, number in sets} == {0, 1}
    assert set(prepared) == set(sets)
    assert (figure.time_ms.samples, figure.wrong, figure.clock, figure.num_sms) == (4, "", "host", 3)
    assert figure.bytes == work.count_bytes("dispatch", True)
    assert figure.share == figure.ideal_ms / figure.time_ms.median


@pytest.mark.parametrize("when", [1, 2])
def test_a_wrong_result_is_told(when: int) -> None:
    seen = 0

    def sometimes(rank: int, number: int, result: Any) -> None:
        nonlocal seen
        seen += rank == 0
        require(not (seen == when and rank == 0), "off by one")

    operation = Operation("dispatch", (lambda rank, number: None,), sometimes)
    work = Workload(SHAPE, [0, 1], CPU, 1)
    figure = measure("base", "mine", operation, SimulatedRanks(2), work, CEILINGS, 0, repeat=1)
    assert figure.wrong == "off by one"
    results = Results(Machine({}), "here", CEILINGS, [figure])
    assert results.wrong == ["base: mine, dispatch: off by one"]


TINY = Points(tokens=[2, 4], sms=[1, 2], skew=[0.0, 1.0], ranks=[1, 2], overlap=[1], small=[1])


@pytest.fixture(scope="module", name="simulated")
def make_simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, Results, Path]]:
    """One run on the simulator: everything that it can do, at one point."""
    folder = tmp_path_factory.mktemp("bench")
    settings = Settings(
        "sim", SHAPE, sms=[2], sweeps=["tokens"], peers=[*all_peers()], points=TINY, repeat=1, trace=folder / "t.json"
    )
    done = execute(settings, lambda said: None, folder / "kept.json")
    assert done is not None
    yield (*done, folder)


@needs_simulator
def test_a_run_on_the_simulator(simulated: tuple[Settings, Results, Path]) -> None:
    _, results, _ = simulated
    assert results.wrong == [] and results.failed == {}
    base = [figure for figure in results.figures if figure.section == "base"]
    assert [figure.name for figure in base if figure.system == "TileEP"] == [*FIGURES]
    assert {figure.name for figure in base if figure.system == "plain PyTorch"} == {"dispatch", "combine, staged"}
    tokens = [figure.shape.tokens for figure in results.figures if figure.section == "tokens"]
    assert set(tokens) == {2, 4}
    assert {figure.name for figure in results.figures if figure.section == "alone"} == {
        "dispatch",
        "combine, zero-copy",
    }
    assert all(figure.time_ms.least > 0 and figure.bytes.memory > 0 for figure in results.figures)
    assert {"overlap", "small batches in a graph", "classic design", "DeepEP", "FlashInfer"} <= set(results.skipped)
    assert all(results.skipped.values())


@needs_simulator
def test_a_run_is_told_again_from_its_file(simulated: tuple[Settings, Results, Path], tmp_path: Path) -> None:
    settings, results, folder = simulated
    write_json(tmp_path / "out.json", settings, results)
    again = read_json(tmp_path / "out.json")
    assert (again[0].shape, again[0].repeat, again[0].points) == (settings.shape, settings.repeat, settings.points)
    assert again[1].figures == results.figures and again[1].machine == results.machine
    kept = read_json(folder / "kept.json")[1]  # written before the end
    assert kept.figures == results.figures and kept.machine.facts["torch"] == torch.__version__

    done = CliRunner().invoke(app, ["bench", "--from", f"{tmp_path / 'out.json'}", "--plots", f"{tmp_path / 'drawn'}"])
    assert done.exit_code == 0 and "dispatch, cached" in done.output
    assert (tmp_path / "drawn" / "tokens.png").read_bytes().startswith(PNG)
    (tmp_path / "out.json").write_text("{}")
    done = CliRunner().invoke(app, ["bench", "--from", f"{tmp_path / 'out.json'}"])
    assert done.exit_code == 2 and "is not what tile-ep bench --json writes" in done.output


class _Again:
    """A graph that runs its step again, in the simulator."""

    def __init__(self, ranks: SimulatedRanks, step: Callable[[int], Any]) -> None:
        self._ranks, self._step = ranks, step
        self.results = ranks.each(step)
        self.graph = self

    def replay(self) -> None:
        for rank, out in self._ranks.each(self._step).items():
            if out is not None:
                self.results[rank].copy_(out)


@needs_simulator
def test_small_batches_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of inputs is put in place, and what comes out of a replay is compared, with rows staged and in place."""
    from tile_ep.bench import small

    replayed: list[int | None] = []

    def train(ranks: Any, graph: Any, repeat: int, before: Callable[[int], None] | None = None) -> Spread:
        if before is not None:
            before(repeat)
        replayed.append(None if before is None else repeat)
        graph.graph.replay()
        return Spread.of([10.0 * len(replayed)])

    monkeypatch.setattr(small, "_Graph", _Again)
    monkeypatch.setattr(small, "_train_us", train)
    monkeypatch.setattr(small, "_empty_kernels", lambda rank: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks: Any = SimulatedRanks(2)
    found = list(small.measure_small(ranks, SHAPE, [1, 4], num_sms=2, num_sets=3, repeat=2))
    assert [(one.shape.tokens, one.combine) for one in found] == [
        (1, "staged"),
        (1, "zero-copy"),
        (4, "staged"),
        (4, "zero-copy"),
    ]
    assert [one.wrong for one in found] == [""] * 4
    assert replayed == [None, *[2, None] * 4]
    assert all(one.launch_us == 10.0 and one.graph_us.median == 10.0 + one.wait_us + one.move_us for one in found)

    monkeypatch.setattr(small._Batch, "_place", lambda self, number: None)  # inputs stay those of set 0
    (staged, _) = small.measure_small(ranks, SHAPE, [4], num_sms=2, num_sets=3, repeat=2)
    assert "sums differ" in staged.wrong


@needs_simulator
def test_json_holds_everything_and_is_kept_along_the_way(
    simulated: tuple[Settings, Results, Path], tmp_path: Path
) -> None:
    settings, results, folder = simulated
    write_json(tmp_path / "out.json", settings, results)
    said = json.loads((tmp_path / "out.json").read_text())
    assert set(said) == {
        *("schema", "machine", "other_processes", "world", "settings", "bytes_counted", "ceilings", "figures"),
        *("against_peers", "overlap", "small", "skipped", "failed", "wrong"),
    }
    assert said["settings"]["shape"]["hidden"] == SHAPE.hidden and said["settings"]["sms"] == [2]
    assert said["machine"]["torch"] == torch.__version__
    assert said["ceilings"]["copy_tb_s"] > 0 and said["ceilings"]["fill_tb_s"] > 0
    first = said["figures"][0]
    assert set(first) == {
        *("section", "system", "name", "shape", "num_sms", "time_ms", "host_ms", "enqueue_us", "clock", "bytes"),
        *("ideal_ms", "wrong", "share", "memory_tb_s", "rows_tb_s", "us_per_token"),
    }
    assert set(first["time_ms"]) == {"median", "least", "most", "samples"}
    assert {(one["ours"], one["peer"]) for one in said["against_peers"]} == {
        ("dispatch", "plain PyTorch"),
        ("combine, zero-copy", "plain PyTorch"),
        ("combine, staged", "plain PyTorch"),
    }
    kept = json.loads((folder / "kept.json").read_text())
    assert kept["figures"] == said["figures"]
    assert not [*folder.glob("*.part")]


@needs_simulator
def test_the_timeline_is_a_trace(simulated: tuple[Settings, Results, Path]) -> None:
    _, _, folder = simulated
    assert {"round 0", "round 1"} <= names_in(folder / "t.json")


def names_in(trace: Path) -> set[str]:
    return {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}


@needs_simulator
def test_the_printed_report(simulated: tuple[Settings, Results, Path]) -> None:
    from rich.console import Console

    settings, results, _ = simulated
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_report(console, settings, results)
    text = console.export_text()
    for words in (
        "ceilings in TB/s",
        "base: whole calls",
        "our time as a part of a peer's",
        "plain PyTorch",
        "bytes of combine, staged: as zero-copy",
        "skipped:",
    ):
        assert words in text
    assert "wrong" not in text and "failed" not in text
    results.machine.others.append("17, train.py, 3000 MiB")
    print_report(console, settings, results)
    assert "another process uses the GPU: 17, train.py, 3000 MiB" in console.export_text()
    results.machine.others.clear()


def test_a_part_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Exchange) -> Iterator[Operation]:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(Exchange, "operations", broken)
    settings = Settings("sim", SHAPE, sms=[2], sweeps=["skew"], peers=["plain_torch"], points=TINY, repeat=1)
    kept: list[int] = []
    results = sessions.run(settings, Machine({}), lambda said: None, lambda so_far: kept.append(len(so_far.figures)))
    assert set(results.failed.values()) == {"RuntimeError: out of luck"}
    assert len(results.failed) == 4  # base, alone, two points of the sweep
    assert {figure.system for figure in results.figures} == {"plain PyTorch"}
    assert kept == sorted(kept) and kept[-1] == len(results.figures)
    assert as_dict(settings, results)["failed"] == results.failed


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="4 experts for 5 ranks"):
        check(Settings("sim", replace(SHAPE, ranks=5), [1]))
    with pytest.raises(ValueError, match="top-5 of 4 experts"):
        check(Settings("sim", replace(SHAPE, topk=5), [1]))


# ---------------------------------------------------------------- reports of what needs a GPU


def figure_of(system: str, name: str, ms: float, section: str = "base", **shape: Any) -> Figure:
    spread, point = Spread(ms, ms, ms, 1), replace(SHAPE, **shape)
    return Figure(section, system, name, point, 4, spread, spread, spread, "device", Bytes(8, 0, 6), ms / 2, "")


def test_ratios_to_peers_are_those_of_the_same_point() -> None:
    figures = [
        figure_of("TileEP", "dispatch", 1.0),
        figure_of("TileEP", "dispatch", 9.0),  # other SMs: the first one counts
        figure_of("TileEP", "dispatch", 5.0, tokens=9),
        figure_of("TileEP", "dispatch", 7.0, section="tokens"),
        figure_of("TileEP", "combine, zero-copy", 2.0),
        figure_of("TileEP", "combine, staged", 3.0),
        figure_of("other", "dispatch", 4.0),
        figure_of("other", "combine, staged", 4.0),
    ]
    ratios = [(ours.name, peer.name, ratio) for ours, peer, ratio in against_peers(figures)]
    assert ratios == [
        ("dispatch", "dispatch", 0.25),
        ("combine, zero-copy", "combine, staged", 0.5),
        ("combine, staged", "combine, staged", 0.75),
    ]
    assert (figures[0].share, figures[0].rows_tb_s, figures[0].us_per_token) == (0.5, 6e-9, 250.0)


def hidden_of(gemm: float, collective: float, both: float, order: str = "collective first", sms: int = 8) -> Hidden:
    spreads = [Spread(ms, ms, ms, 1) for ms in (gemm, collective, both)]
    return Hidden("dispatch", 2, sms, order, 1024, *spreads)


def test_the_hidden_share() -> None:
    assert hidden_of(1.0, 1.0, 1.0).share == 1.0
    assert hidden_of(1.0, 1.0, 2.0).share == 0.0
    assert hidden_of(1.0, 0.5, 1.1).share == pytest.approx(0.8)


def test_products_are_told_how_many_sms_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int | str | None] = []

    def library(name: str | None = None) -> str:
        return "cublas" if name is None else str(told.append(name))

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", told.append, raising=False)
    with leaving(0) as can:
        assert can and told == []
    with pytest.raises(ZeroDivisionError), leaving(32) as can:
        assert can and told == ["cublaslt", 32]
        raise ZeroDivisionError
    assert told == ["cublaslt", 32, None, "cublas"]
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with leaving(32) as can:
        assert not can
    assert len(told) == 4


def test_a_gemm_is_sized_to_a_time() -> None:
    assert next_rows(1024, took_ms=1.0, target_ms=2.0) == 2048
    assert next_rows(1024, took_ms=1.0, target_ms=1.05) == 1024 + 128 * round(0.05 * 8)
    assert next_rows(1024, took_ms=1.0, target_ms=1e-9) == 128
    assert next_rows(1024, took_ms=1.0, target_ms=1e9) == 1 << 16


@pytest.mark.parametrize(("target_ms", "best_ms"), [(3.4, 3.0), (3.6, 4.0), (0.1, 1.0), (1e9, 128.0)])
def test_a_gemm_in_leaps_gets_the_nearest_one(target_ms: float, best_ms: float) -> None:
    gemm = Gemm.__new__(Gemm)
    gemm.rows = 1024

    def time_ms() -> float:
        assert 128 <= gemm.rows <= 1 << 16
        return float(-(-gemm.rows // 512))

    gemm.fit(target_ms, time_ms)
    assert time_ms() == best_ms


def test_pictures_of_all_sections(tmp_path: Path) -> None:
    figures = [
        figure_of("TileEP", "dispatch", 1.0 + n, section, tokens=4 << n, ranks=1 + n, skew=float(n))
        for section in ("tokens", "sms", "skew", "ranks")
        for n in range(2)
    ]
    spread = Spread(20.0, 19.0, 21.0, 3)
    small = [
        SmallBatch(replace(SHAPE, tokens=tokens), 2, combine, spread, spread, spread, 5.0, 7.0, 8.0, "")
        for tokens in (1, 2)
        for combine in ("staged", "zero-copy")
    ]
    orders = ("collective first", "GEMM first")
    hidden = [hidden_of(1.0, 1.0, 1.2, order, sms) for order in orders for sms in (8, 16)]
    hidden += [replace(one, left_sms=2 * one.num_sms) for one in hidden]
    results = Results(Machine({}), "here", CEILINGS, figures, hidden, small)
    drawn = draw(results, tmp_path / "pictures")
    assert sorted(path.stem for path in drawn) == ["overlap", "ranks", "skew", "small", "sms", "tokens"]
    assert all(path.read_bytes()[:8] == PNG and path.stat().st_size > 5000 for path in drawn)


def test_other_processes_on_the_gpu_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in *compute-apps*) echo "17, train.py, 3000 MiB";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_processes() == ["17, train.py, 3000 MiB"]
    assert Machine.look().others == ["17, train.py, 3000 MiB"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_processes() == []


# ---------------------------------------------------------------- the command


def test_every_peer_says_why_it_cannot_run() -> None:
    peers = all_peers()
    assert set(peers) == {"plain_torch", "classic", "deepep", "flashinfer", "vdev2d"}
    reasons = {name: peer.available(SimulatedRanks(2)) for name, peer in peers.items()}
    assert reasons.pop("plain_torch") is None
    assert all(reasons.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "nvlink"], "under torchrun"),
        (["--backend", "sim", "--peer", "nobody"], "expected one of"),
        (["--backend", "sim", "--ranks", "4", "--experts", "2", "--topk", "1"], "every rank needs one"),
    ],
)
def test_arguments_that_cannot_be(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output


@needs_simulator
def test_without_a_gpu_a_few_tokens_are_checked(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["bench", "--repeat", "1", "--json", f"{tmp_path / 'out.json'}"], env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.exit_code == 0 and "times say nothing" in done.output
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["settings"]["backend"] == "sim" and said["settings"]["shape"]["tokens"] == 4
    assert {figure["section"] for figure in said["figures"]} == {"base"} and not said["wrong"]


def test_a_run_of_processes_that_it_starts() -> None:
    """gloo on CPUs. That backend has no zero-copy combine."""
    settings = Settings("collective", SHAPE, sms=[2], sweeps=[], alone=False, repeat=1)
    done = execute(settings, lambda said: None)
    assert done is not None and not done[1].wrong
    assert [figure.name for figure in done[1].figures] == [name for name in FIGURES if name != "combine, zero-copy"]


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    """gloo on CPUs; plain PyTorch through `all_to_all_single`."""
    shape = ["--tokens", "4", "--hidden", "32", "--topk", "2", "--experts", "4", "--repeat", "1"]
    files = ["--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots")]
    files += ["--trace", str(tmp_path / "trace.json")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tile_ep.cli", "bench", "--quick", "--section", "skew", "--section", "ranks", *shape, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "out.json").read_text())
    assert {figure["system"] for figure in said["figures"]} == {"TileEP", "plain PyTorch"}
    assert {figure["section"] for figure in said["figures"]} == {"skew"}
    assert {figure["shape"]["ranks"] for figure in said["figures"]} == {2}
    assert {figure["shape"]["skew"] for figure in said["figures"]} == {0.0, 1.0}
    assert not said["wrong"] and not said["failed"] and "sweep over ranks" in said["skipped"]
    assert all(figure["bytes"]["wire"] > 0 for figure in said["figures"])
    assert done.stdout.count("skew: whole calls, slowest rank") == 1  # the first rank speaks for all
    assert (tmp_path / "plots" / "skew.png").read_bytes()[:8] == PNG
    assert {"rank 0: dispatch", "rank 0: combine"} <= names_in(tmp_path / "trace.json")


def test_streams_get_queues_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setenv(name, "")  # so that it is taken away again
    monkeypatch.delenv(name)

    def look() -> bool:
        seen.append(os.environ.get(name))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", look)
    assert CliRunner().invoke(app, ["bench", "--backend", "cuda-loopback"]).exit_code == 2
    assert seen == ["32"]
