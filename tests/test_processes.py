"""The self-test with a process a rank, and the script for several GPUs, as far as CPUs go."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from workers import Pools

from tile_ep import cases
from tile_ep import selftest_processes as selftest
from tile_ep.errors import PeerTimeoutError

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
CPU = selftest.Place("collective", torch.device("cpu"))


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The self-test as the only rank, without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return run([sys.executable, "-m", "tile_ep.selftest_processes", *arguments], **world)


# ---------------------------------------------------------------- the self-test


def test_two_processes_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "-m", "tile_ep.selftest_processes", "--cases", "3", "--rounds", "8", "--absent", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 processes on CPUs, gloo") and lines[-1].startswith("PASS")
    passed = {line[7:39].strip() for line in lines if line.startswith("ok ")}
    assert passed == {
        *(
            f"{check}, {layout}"
            for check in ("cases", "rounds", "handles alive")
            for layout in ("rank layout", "expanded")
        ),
        *("two buffers", "gradients", "absent rank, dispatch", "absent rank, combine"),
    }
    assert sum(line.startswith("skip ") for line in lines) == len(lines) - 2 - len(passed)


def test_a_check_that_takes_too_long_ends_the_process() -> None:
    done = alone("--only", "rounds", "--rounds", "1000000", "--limit", "3")
    assert done.returncode == 1
    assert "still there after 3 s" in done.stderr and "check_rounds" in done.stderr


def test_it_wants_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert selftest.main([]) == 2
    assert "torchrun --nproc-per-node N" in capsys.readouterr().out


def test_kernels_need_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert selftest.main(["--backend", "nvlink"]) == 2
    assert "0 CUDA devices" in capsys.readouterr().err


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("do_expand", [False, True])
def test_there_are_cases_for_any_number_of_ranks(num_ranks: int, do_expand: bool) -> None:
    every = selftest.cases_for(num_ranks, do_expand, 0)
    own = [case for case in cases.GRID if case.num_ranks == num_ranks and case.do_expand == do_expand]
    assert every[: len(own)] == own and len(every) >= 90
    assert all(case.num_ranks == num_ranks and case.do_expand == do_expand for case in every)
    assert len({str(case) for case in every}) == len(every)
    few = selftest.cases_for(num_ranks, do_expand, 12)
    assert len(few) == 12 and sum(case in own for case in few) == min(12, len(own))


@pytest.mark.parametrize("num_ranks", [5, 8])
def test_derived_cases_have_a_reference(num_ranks: int) -> None:
    for do_expand in (False, True):
        for case in selftest.cases_for(num_ranks, do_expand, 0)[-110::10]:
            assert len(cases.run_reference(case)) == num_ranks


def one_fails(rank: int, kinds: list[type[Exception] | None]) -> str | None:
    """What `together` does where each rank raises as told."""
    ranks = selftest.Ranks([CPU], 30.0)
    kind = kinds[rank]

    def call() -> str:
        if kind is PeerTimeoutError:
            raise PeerTimeoutError(rank, "dispatch", [1 - rank], None, 1.0)
        if kind is not None:
            raise kind(f"from rank {rank}")
        return "fine"

    return selftest.together(ranks, call)


def test_a_check_that_fails_on_one_rank_fails_on_all(pools: Pools) -> None:
    assert pools(2).run(one_fails, [None, None]) == ["fine", "fine"]
    for outcome in pools(2).outcomes(one_fails, [PeerTimeoutError, ValueError]):
        assert outcome.error == "AssertionError"
        assert "on ranks [0, 1]; rank 1" in outcome.message and "from rank 1" in outcome.message
    for outcome in pools(2).outcomes(one_fails, [selftest.Skipped, selftest.Skipped]):
        assert outcome.error == "Skipped"
    for outcome in pools(2).outcomes(one_fails, [selftest.Skipped, ValueError]):
        assert outcome.error == "AssertionError" and "on ranks [1]" in outcome.message


def wrong_rows(rank: int) -> str:
    """A whole exchange, with one bit of one rank's rows changed before the comparison."""
    ranks = selftest.Ranks([CPU], 30.0)
    shape = selftest.Shape(2, 12, 64, 2, 5)
    said = ""
    for do_expand in (False, True):
        one = selftest.Exchange(shape, rank, 7, do_expand)
        with ranks.open(CPU, shape) as buffer:
            got = one.run(buffer, 4)
        one.check(got)
        got["recv_x"][one.rows - 1].view(torch.int16)[3] ^= 1
        with pytest.raises(AssertionError, match="recv_x differs"):
            one.check(got)
        got.pop("recv_x")
        with pytest.raises(AssertionError, match="instead of"):
            one.check(got)
        said += f"{one.rows > 0} "
    return said


def test_a_bit_that_differs_is_seen(pools: Pools) -> None:
    assert pools(2).run(wrong_rows) == ["True True "] * 2


def two_places(rank: int) -> tuple[str, str]:
    """The comparison of two backends, of which CPUs have only one: it is compared with itself, and with a wrong one."""
    ranks = selftest.Ranks([CPU, CPU], 30.0)
    shape = selftest.Shape(2, 20, 256, 2, 4)
    said = selftest.check_large(ranks, shape, "fp8")
    exact = selftest._factor
    try:
        calls = iter([1.0, 1.0, 2.0, 2.0])
        selftest._factor = lambda rank: next(calls)
        with pytest.raises(AssertionError, match="combined_x differs") as wrong:
            selftest.check_large(ranks, shape, "bf16")
    finally:
        selftest._factor = exact
    return said, str(wrong.value)


def test_two_backends_are_compared(pools: Pools) -> None:
    for said, wrong in pools(2).run(two_places):
        assert said == "20 tokens x 256 fp8, top-2 of 4" and wrong == "rank layout, combined_x differs"


SIMULATED: dict[str, Callable[[selftest.Ranks], str]] = {
    "rounds, rank layout": lambda ranks: selftest.check_rounds(ranks, False, 12),
    "rounds, expanded": lambda ranks: selftest.check_rounds(ranks, True, 12),
    "handles alive, expanded": lambda ranks: selftest.check_alive(ranks, True),
    "gradients": lambda ranks: selftest.check_gradients(ranks, 2),
    "queued without sync": lambda ranks: selftest.check_queued(ranks, 4),
    "absent from dispatch": lambda ranks: selftest.check_absent(ranks, "dispatch", 1.0),
    "absent from combine": lambda ranks: selftest.check_absent(ranks, "combine", 1.0),
}


@pytest.mark.parametrize("name", SIMULATED)
def test_checks_through_the_kernels(name: str) -> None:
    """What only runs on GPUs otherwise, simulated."""
    pytest.importorskip("tilelang")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    assert selftest.in_threads(2, "sim", SIMULATED[name]) != "None"


@pytest.mark.parametrize("name", selftest.rehearsals(8))
def test_rehearsals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They launch what the check launches."""
    pytest.importorskip("tilelang")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    if name == "streams and events":
        pytest.skip("needs streams")
    from tile_ep.worlds.simulated import SimulatedWorld

    assert name in selftest.all_checks(selftest.ThreadRanks(0, "sim", [0, 1], {}), selftest._parser().parse_args([]))
    launched: list[object] = []
    launch = SimulatedWorld.launch

    def note(world: SimulatedWorld, spec: Any, num_blocks: int, arguments: Any) -> None:
        launched.append(spec)
        launch(world, spec, num_blocks, arguments)

    monkeypatch.setattr(SimulatedWorld, "launch", note)
    monkeypatch.setattr(selftest, "large_shape", lambda ranks, tokens: selftest.Shape(ranks, tokens, 256, 4, 16))
    selftest.in_threads(2, "sim", selftest.rehearsals(8)[name])
    rehearsed = set(launched)
    assert rehearsed
    if name in SIMULATED:
        launched.clear()
        selftest.in_threads(2, "sim", SIMULATED[name])
        assert set(launched) <= rehearsed


# ---------------------------------------------------------------- the script


def test_the_script_is_bash() -> None:
    assert run(["bash", "-n", str(SCRIPTS / "multi_gpu.sh")]).returncode == 0
    assert os.access(SCRIPTS / "multi_gpu.sh", os.X_OK)


@pytest.mark.parametrize("arguments", [[], ["0"], ["--dry-run"], ["two"]])
def test_the_script_says_how_it_is_called(arguments: list[str]) -> None:
    done = run(["bash", str(SCRIPTS / "multi_gpu.sh"), *arguments])
    assert done.returncode == 2 and "multi_gpu.sh [--dry-run] N [OUT]" in done.stdout


def test_a_script_without_time_fails_and_says_so(tmp_path: Path) -> None:
    done = run(
        ["bash", str(SCRIPTS / "multi_gpu.sh"), "--dry-run", "2", str(tmp_path)], BUDGET="0", PYTHON=sys.executable
    )
    assert done.returncode == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {step["outcome"] for step in summary["steps"]} == {"not run"}
    assert [step["name"] for step in summary["steps"]][:4] == ["doctor", "selftest", "dead-rank", "bench"]
    assert "FAILED: doctor, selftest" in done.stdout


def step_alone(tmp_path: Path, limit: int, program: str) -> subprocess.CompletedProcess[str]:
    """The script with one step instead of its own: `program` in Python."""
    lines = (SCRIPTS / "multi_gpu.sh").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step doctor"))
    (tmp_path / "program.py").write_text(program)
    text = "\n".join([*lines[:first], f'step only {limit} "$python" {tmp_path}/program.py', "exit $failed", ""])
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "one.sh").write_text(text.replace("grace=10", "grace=1"))
    return run(
        ["bash", str(tmp_path / "scripts" / "one.sh"), "--dry-run", "1", str(tmp_path / "out")], PYTHON=sys.executable
    )


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
print(os.getpid(), subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
time.sleep(300)
"""


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    done = step_alone(tmp_path, 5, STUBBORN)
    assert done.returncode == 1 and "only\tover 5 s" in done.stdout
    processes = (tmp_path / "out" / "only.log").read_text().split()
    assert len(processes) == 2
    killed = time.monotonic()
    while any(map(_runs, processes)):  # a process that was killed takes a moment to go
        assert time.monotonic() - killed < 30
        time.sleep(0.05)


def test_a_step_that_fails_is_seen(tmp_path: Path) -> None:
    done = step_alone(tmp_path, 20, "print('so it was'); raise SystemExit(3)")
    assert done.returncode == 1 and "only\tstatus 3" in done.stdout
    assert (tmp_path / "out" / "only.log").read_text() == "so it was\n"


def summary_module() -> ModuleType:
    specification = importlib.util.spec_from_file_location("multi_gpu_summary", SCRIPTS / "multi_gpu_summary.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def bench_json(**ms: float) -> dict[str, Any]:
    """1 MB over links that copies cross at 1 TB/s: 1 us is the ceiling. Times in us, as `name_sms`."""
    figures = [
        {
            "section": "base",
            "system": "TileEP",
            "name": name.rpartition("_")[0],
            "num_sms": int(name.rpartition("_")[2]),
            "time_ms": {"median": value / 1e3},
            "bytes": {"wire": 1_000_000},
            "share": 0.5,
            "wrong": "",
        }
        for name, value in ms.items()
    ]
    return {"ceilings": {"peer_both_tb_s": 1.0}, "figures": figures}


def test_targets_are_judged_against_peer_copies() -> None:
    summary = summary_module()
    times = {"dispatch_16": 1.05, "dispatch_8": 1.2, "dispatch, fp8_16": 1.125, "combine, zero-copy_16": 1.25}
    assert summary.judge(summary.shares(bench_json(**times))) == [
        "dispatch, 16 SMs: 95.2 % of a peer copy, target 92 %: reached",
        "dispatch, 8 SMs: +14.3 % time, target +3 %: MISSED",
        "dispatch, fp8, 16 SMs: 88.9 % of a peer copy, target 88 %: reached",
        "combine, zero-copy, 16 SMs: 80.0 % of a peer copy, target 92 %: MISSED",
    ]
    without = bench_json(dispatch_16=1.0)
    without["ceilings"]["peer_both_tb_s"] = 0.0
    assert summary.judge(summary.shares(without)) == [
        "dispatch: not measured",
        "dispatch, fp8: not measured",
        "combine, zero-copy: not measured",
    ]


def test_variants_are_put_side_by_side(tmp_path: Path) -> None:
    for name, value in (("bench", 2.0), ("bench-push", 3.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(bench_json(dispatch_16=value)))
    assert summary_module().variants(tmp_path) == ["dispatch, 16 SMs: as it is 0.002 ms, push 0.003 ms"]


def test_variants_reach_every_world() -> None:
    """In a process of its own: it changes the kernels of all buffers."""
    pytest.importorskip("tilelang")
    code = (
        "from tile_ep.selftest_processes import TUNINGS, use_tuning;"
        "from tile_ep.worlds.loopback import LoopbackCudaWorld as a;"
        "from tile_ep.worlds.process_group import ProcessGroupWorld as b;"
        "print(*[(use_tuning(n), a.tuning is b.tuning, a.tuning.pushes, a.tuning.by_warp)[1:] for n in TUNINGS])"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.strip() == "(True, False, False) (True, True, False) (True, False, True)", done.stderr
