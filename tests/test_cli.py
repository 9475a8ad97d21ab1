"""The command line, as a user runs it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tile_ep import reference
from tile_ep.cli import app
from tile_ep.cli.layer import Experts, dense_layer, relative_error
from tile_ep.cli.rank import LayoutName, PayloadName, RankResult, RankTask
from tile_ep.cli.report import PHASES, Report
from tile_ep.cli.roundtrip import expected_sums, inexact_tokens
from tile_ep.cli.worlds import BackendName, WorkerError, run_ranks
from tile_ep.layout import ExpertPartition
from tile_ep.trace import Trace

RANKS, EXPERTS, HIDDEN, TOPK = 2, 5, 160, 3


def small_trace() -> Trace:
    """Skewed, with masks, a token without selections and one that names an expert twice."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([9, 4, 6])
    scores = torch.rand(19, EXPERTS, generator=generator) + torch.tensor([0.6, 0, 0, 0, 0.2])
    idx = scores.argsort(dim=1, descending=True)[:, :TOPK].to(torch.int16)
    idx[2, 1] = -1
    idx[5] = -1
    idx[7] = torch.tensor([3, 3, 0])
    return Trace(
        torch.randn(19, HIDDEN, generator=generator).bfloat16(),
        idx,
        torch.rand(19, TOPK, generator=generator),
        torch.repeat_interleave(torch.arange(3), lengths),
        {"experts": str(EXPERTS)},
    )


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    small_trace().save(tmp_path / "trace.safetensors")
    return tmp_path / "trace.safetensors"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def task(**changes: Any) -> RankTask:
    fields: dict[str, Any] = {
        "num_ranks": RANKS,
        "num_experts": EXPERTS,
        "num_max_tokens_per_rank": 19,
        "hidden": HIDDEN,
        "num_topk": TOPK,
        "layout": LayoutName.rank,
        "payload": PayloadName.bf16,
        "expand_factor": 2.0,
        "seed": 0,
        "timeout_s": 60.0,
    }
    return RankTask(**{**fields, **changes})


# ---------------------------------------------------------------- the main job


def test_a_replay_in_a_shell(trace_file: Path, tmp_path: Path) -> None:
    """Two real processes; every figure of the JSON against a count of the trace's own."""
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = [sys.executable, "-m", "tile_ep.cli", "replay", str(trace_file), "--ranks", str(RANKS), "--seed", "4"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--plot", str(picture)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout.splitlines()[-1]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 10_000
    check_figures(json.loads(figures.read_text()))


def check_figures(said: dict[str, Any]) -> None:
    trace = small_trace()
    experts_of = [[0, 1, 2], [3, 4]]
    tokens_of = [list(range(9)), list(range(9, 19))]  # the longest document, then the two that balance it
    row_bytes = 2 * HIDDEN
    rows = [[0, 0], [0, 0]]
    selections = [[0, 0], [0, 0]]
    load = [0] * EXPERTS
    for source, tokens in enumerate(tokens_of):
        for token in tokens:
            chosen = [expert for expert in trace.topk_idx[token].tolist() if expert >= 0]
            for expert in chosen:
                load[expert] += 1
            for target in range(RANKS):
                hits = sum(expert in experts_of[target] for expert in chosen)
                selections[source][target] += hits
                rows[source][target] += hits > 0
    assert said["traffic_rows"] == rows
    assert said["load_per_expert"] == load
    assert (said["passed"], said["num_ranks"], said["layout"], said["payload"]) == (True, 2, "rank", "bf16")
    assert said["trace"]["tokens"] == 19
    for rank, of_rank in enumerate(said["ranks"]):
        other = 1 - rank
        here = [load[expert] for expert in experts_of[rank]]
        assert of_rank["tokens"] == len(tokens_of[rank])
        assert of_rank["rows_sent"] == rows[rank][other]
        assert of_rank["rows_received"] == rows[other][rank]
        assert of_rank["rows_kept"] == rows[rank][rank]
        assert of_rank["rows_received_per_rank"] == [rows[source][rank] for source in range(RANKS)]
        assert of_rank["row_bytes"] == row_bytes
        assert of_rank["bytes_sent"] == row_bytes * rows[rank][other]
        assert of_rank["bytes_received"] == row_bytes * rows[other][rank]
        assert of_rank["bytes_sent_without_dedup"] == row_bytes * selections[rank][other]
        assert of_rank["combine_bytes_sent"] == row_bytes * rows[other][rank]
        assert of_rank["load_per_expert"] == here
        assert load[of_rank["busiest_expert"]] == max(here)
        assert load[of_rank["idlest_expert"]] == min(here)
        assert of_rank["backend"] == "collective"
        assert set(of_rank["seconds"]) == {"dispatch", "experts", "combine"}
        assert all(seconds > 0 for seconds in of_rank["seconds"].values())
        assert 0 < of_rank["error"] <= said["error"] <= said["tolerance"]
        assert of_rank["inexact_tokens"] == 0
    assert said["bytes_sent"] == row_bytes * (rows[0][1] + rows[1][0])
    assert said["bytes_sent_without_dedup"] == row_bytes * (selections[0][1] + selections[1][0])


def test_too_strict_a_tolerance_fails(trace_file: Path, tmp_path: Path) -> None:
    """And fp8 rows carry their scales: 160 bytes and two fp32 numbers."""
    figures = tmp_path / "out.json"
    options = ("--ranks", 2, "--layout", "expanded", "--payload", "fp8", "--tolerance", 0, "--json", figures)
    result = invoke("replay", trace_file, *options)
    assert result.exit_code == 1, result.output
    assert "FAIL: output of rank(s) 0, 1 is off" in result.output
    said = json.loads(figures.read_text())
    assert said["passed"] is False
    assert said["inexact_tokens"] == 0
    assert 5e-3 < said["error"] < 8e-2
    assert [of_rank["row_bytes"] for of_rank in said["ranks"]] == [168, 168]
    assert [of_rank["combine_row_bytes"] for of_rank in said["ranks"]] == [320, 320]


def test_the_expanded_layout_with_a_rank_without_tokens(trace_file: Path) -> None:
    """Three documents on four ranks; fp32 leaves only the order of sums to differ."""
    result = invoke("replay", trace_file, "--ranks", 4, "--layout", "expanded", "--payload", "fp32")
    assert result.exit_code == 0, result.output
    assert "PASS: outputs of 4 ranks agree" in result.output


def simulate(tmp_path: Path, *options: object) -> tuple[str, dict[str, Any]]:
    """A replay of the demo's trace on the simulated kernels: what it printed, and its JSON."""
    pytest.importorskip("tilelang")
    result = invoke("demo", "--backend", "sim", "--ranks", 2, "--json", tmp_path / "out.json", *options)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((tmp_path / "out.json").read_text())


def test_demo_in_the_simulator_says_that_it_takes_few_tokens(tmp_path: Path) -> None:
    printed, said = simulate(tmp_path)
    assert "using 32 tokens" in printed
    assert said["trace"]["tokens"] == 32
    assert said["trace"]["documents"] == 9
    assert said["backend"] == "sim"


def test_expanded_rows_of_the_kernels_cross_once_per_selection(tmp_path: Path) -> None:
    """And come back once per (token, rank)."""
    printed, said = simulate(tmp_path, "--layout", "expanded", "--tokens", 18)
    assert "one row per (token, expert)" in printed
    first, second = said["ranks"]
    assert sum(map(sum, said["traffic_rows"])) == 18 * 8
    for here, there in ((first, second), (second, first)):
        other = there["rank"]
        assert here["rows_sent_per_rank"] == here["selections_sent_per_rank"]
        assert here["rows_received_per_rank"][other] == there["rows_sent_per_rank"][here["rank"]]
        assert here["bytes_sent"] == here["bytes_sent_without_dedup"] == 768 * here["rows_sent_per_rank"][other]
        assert here["bytes_received"] == there["bytes_sent"]
        assert here["combine_bytes_sent"] <= 768 * there["tokens"] < here["bytes_received"]


# ---------------------------------------------------------------- what is exact


def test_sums_of_a_round_trip_are_those_of_the_reference() -> None:
    """Fifths of fp32: every addition rounds, so the order and the number of them show."""
    trace = small_trace()
    xs = [trace.x.float()[:9] / 5, trace.x.float()[9:] / 5]
    idx, weights = [trace.topk_idx[:9], trace.topk_idx[9:]], [trace.topk_weights[:9], trace.topk_weights[9:]]
    for expand in (False, True):
        received = reference.dispatch(
            xs, idx, weights, num_experts=EXPERTS, num_max_tokens_per_rank=10, expand_factor=4.0, do_expand=expand
        )
        rows = [output.recv_x for output in received]
        combined = reference.combine(rows, [output.handle for output in received])  # type: ignore[arg-type]
        for rank in range(RANKS):
            got = expected_sums(xs[rank], idx[rank], ExpertPartition(EXPERTS, RANKS), expand)
            assert torch.equal(got, combined[rank].combined_x)


class Altered:
    """A buffer of one rank that returns rows or weights with one bit or one element changed."""

    def __init__(self, part: int) -> None:
        self.part = part

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, do_expand: bool) -> tuple[Any, ...]:
        return x, idx, weights, None, None

    def combine(self, y: torch.Tensor, handle: None, weights: torch.Tensor) -> tuple[Any, ...]:
        returned = [y.clone(), weights.clone()]
        if self.part < 2:
            bits = returned[self.part].view(torch.int16 if self.part == 0 else torch.int32)
            bits[3, 1] ^= 1
        return (*returned, None)


@pytest.mark.parametrize(("part", "changed"), [(0, 1), (1, 1), (2, 0)])
def test_one_bit_of_a_row_or_a_weight_is_a_token_that_came_back_changed(part: int, changed: int) -> None:
    x, idx = torch.ones(5, 4, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.int64)
    buffer: Any = Altered(part)
    weights = torch.full((5, 2), 0.5)
    assert inexact_tokens(buffer, x, idx, weights, ExpertPartition(1, 1), False, torch.bfloat16) == changed


def test_a_token_that_came_back_changed_fails_whatever_the_error() -> None:
    seconds = dict.fromkeys(PHASES, 0.0)
    result = RankResult(0, 4, "rank", [4], [4], [4], 8, 0, 0, 0, 8, 0, [4], seconds, 1, "collective")
    facts = {"tokens": 4, "documents": None, "hidden": 4, "topk": 1, "experts": 1, "skew": 1.0}
    report = Report("made up", facts, "rank", "bf16", "collective", 0, 1.0, [0], [result], [0.0])
    assert not report.passed
    assert "FAIL[/]: 1 tokens of rank(s) 0 came back changed" in report.verdict
    assert "3 of 4 tokens came back exact" in report.round_trip
    assert report.as_dict()["inexact_tokens"] == 1
    assert replace(report, ranks=[replace(result, inexact_tokens=0)]).passed


# ---------------------------------------------------------------- the layer it is checked against


def test_the_dense_layer_is_the_sum_over_selections() -> None:
    trace, experts = small_trace(), Experts(HIDDEN, seed=9)
    expected = torch.zeros(19, HIDDEN, dtype=torch.float64)
    for token in range(19):
        for k in range(TOPK):
            expert = int(trace.topk_idx[token, k])
            if expert < 0:
                continue
            weights = experts.weights(expert)
            gate, up = (trace.x[token].double() @ weights.gate_up.double()).split(experts.intermediate)
            inner = gate / (1 + torch.exp(-gate)) * up
            expected[token] += float(trace.topk_weights[token, k]) * (inner @ weights.down.double())
    steps: list[None] = []
    got = dense_layer(trace, experts, lambda: steps.append(None))
    assert len(steps) == EXPERTS
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert not got[5].any()


def test_weights_depend_on_seed_and_expert_alone() -> None:
    first = Experts(HIDDEN, 1).weights(3)
    assert torch.equal(first.gate_up, Experts(HIDDEN, 1).weights(3).gate_up)
    assert not torch.equal(first.gate_up, Experts(HIDDEN, 2).weights(3).gate_up)
    assert not torch.equal(first.down, Experts(HIDDEN, 1).weights(4).down)


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.ones(4), torch.zeros(4)) == 2.0
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


# ---------------------------------------------------------------- what goes wrong


ELSEWHERE = set(multiprocessing.active_children())


@pytest.fixture(autouse=True)
def remember_children() -> None:
    """Pools of other test modules may be open."""
    ELSEWHERE.update(multiprocessing.active_children())


def own_children() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child not in ELSEWHERE]


def kill_rank(rank: int) -> bool:
    for child in own_children():
        if child.name == f"rank {rank}" and child.pid:
            os.kill(child.pid, signal.SIGKILL)
            return True
    return False


def test_a_worker_killed_before_it_has_joined_is_reported_at_once() -> None:
    start = time.monotonic()

    def kill_when_it_is_there() -> None:
        while not kill_rank(1) and time.monotonic() < start + 30:
            time.sleep(0.01)

    shards = [small_trace().take(tokens) for tokens in small_trace().split(RANKS)]
    killer = threading.Thread(target=kill_when_it_is_there)
    killer.start()
    with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
        run_ranks(BackendName.collective, shards, task(), lambda: None)
    killer.join()
    assert time.monotonic() - start < 30
    assert not own_children()


def test_a_worker_killed_at_work_is_reported_at_once() -> None:
    """Seconds of work are left on both ranks when the first of them reports progress."""
    trace = small_trace().take(torch.arange(19).repeat(4000))
    killed: list[float] = []

    def kill_once() -> None:
        if not killed and kill_rank(1):
            killed.append(time.monotonic())

    with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
        run_ranks(BackendName.collective, [trace, trace], task(num_max_tokens_per_rank=trace.num_tokens), kill_once)
    assert time.monotonic() - killed[0] < 20
    assert not own_children()


def test_a_rank_that_fails_is_named_and_not_the_one_that_missed_it() -> None:
    """Rows of rank 1 are longer than the buffer's; rank 0 waits for it in vain."""
    trace = small_trace()
    wide = Trace(torch.ones(19, 2 * HIDDEN), trace.topk_idx, trace.topk_weights, None, trace.metadata)
    with pytest.raises(WorkerError, match="rank 1 failed: x: ") as caught:
        run_ranks(BackendName.collective, [trace, wide], task(timeout_s=20.0), lambda: None)
    assert "ArgumentError" in caught.value.details
    assert not own_children()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "nothing.safetensors"], "nothing.safetensors: no such file"),
        (["replay", "TEXT"], "not a safetensors file"),
        (["replay", "TRACE", "--ranks", 6], "5 experts cannot be spread over 6 ranks"),
        (["replay", "TRACE", "--experts", 4], "entries are outside -1..3"),
        (["replay", "TRACE", "--plot", "no/where.png"], "expected a file in a folder that exists"),
        (["replay", "TRACE", "--plot", "picture.jpg"], "ends in .png"),
        (["replay", "TRACE", "--json", "no/where.json"], "expected a file in a folder that exists"),
        (["replay", "TRACE", "--ranks", 0], "Invalid value"),
        (["replay", "TRACE", "--layout", "sideways"], "Invalid value"),
        (["demo", "--ranks", 65], "64 experts cannot be spread over 65 ranks"),
    ],
)
def test_mistakes_are_explained_in_a_line(trace_file: Path, tmp_path: Path, arguments: list[object], said: str) -> None:
    (tmp_path / "text").write_text("no trace")
    names = {"TRACE": trace_file, "TEXT": tmp_path / "text"}
    result = invoke(*(names.get(str(argument), argument) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_values_that_the_payload_cannot_hold_are_named(tmp_path: Path) -> None:
    trace = small_trace()
    trace.x[3, 7] = 70_000
    trace.save(tmp_path / "large.safetensors")
    result = invoke("replay", tmp_path / "large.safetensors", "--ranks", 2, "--payload", "fp16")
    assert result.exit_code == 2
    assert "--payload fp16 goes to 65504; use bf16 or fp32" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_explained() -> None:
    result = invoke("demo", "--backend", "cuda-loopback", "--ranks", 2)
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_help_names_the_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "replay" in result.output
    assert "demo" in result.output
