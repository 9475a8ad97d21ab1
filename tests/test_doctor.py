"""`tile-ep doctor`: it says what is there, and the exit status says whether anything works."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tile_ep.cli import app, doctor
from tile_ep.cli.doctor import Finding, State
from tile_ep.errors import BackendUnavailableError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs lacks")


def invoke(*arguments: object, **environment: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "120", **environment})


@needs_no_gpu
def test_a_machine_without_gpus(tmp_path: Path) -> None:
    done = invoke("--json", tmp_path / "doctor.json")
    assert done.exit_code == 0, done.output
    assert f"PyTorch: {torch.__version__}" in done.stdout
    assert "missing nvlink: no GPU" in done.stdout and "to mend: a GPU of compute capability 9.0" in done.stdout
    assert "ok      collective (gloo, CPUs): rows came back right" in done.stdout
    assert "collective: nvlink cannot be used (no GPU)" in done.stdout
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["works"] and found["peers"] == []
    assert [backend["state"] for backend in found["backends"]][:2] == ["missing", "ok"]
    assert found["picks"] == ["collective: nvlink cannot be used (no GPU)"]
    for findings in found["findings"].values():
        for finding in findings:
            assert finding["state"] in ("ok", "missing", "note") and finding["said"]
            assert finding["state"] != "missing" or finding["mend"], f"{finding} does not say how to mend it"


def take_tilelang_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from what has imported it already."""
    monkeypatch.setitem(sys.modules, "tilelang", None)
    needs = ("tile_ep.kernels", "tile_ep.backends.nvlink", "tile_ep.worlds.")
    for name in [name for name in sys.modules if name.startswith(needs)]:
        monkeypatch.delitem(sys.modules, name)


@needs_no_gpu
def test_without_tilelang_collectives_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    take_tilelang_away(monkeypatch)
    done = invoke()
    assert done.exit_code == 0, done.output
    assert "missing TileLang: not installed" in done.stdout and "to mend: pip install 'tilelang" in done.stdout
    assert "missing simulator: the nvlink backend and the simulator need TileLang" in done.stdout


def test_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BackendUnavailableError("not today")

    monkeypatch.setattr(doctor, "Buffer", refuse)
    take_tilelang_away(monkeypatch)
    done = invoke()
    assert done.exit_code == 1
    assert "no backend works here" in done.stdout and "not today" in done.stdout


def test_rows_that_come_back_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor.Buffer.combine
    monkeypatch.setattr(doctor.Buffer, "combine", lambda self, *a, **k: (right(self, *a, **k)[0] + 1, None, None))
    with doctor._group_of_one():
        assert "rows came back wrong" in doctor._collective(torch.device("cpu")).said


def test_the_environment_is_said_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_EP_BACKEND", "nvlink")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    before = dict(os.environ)
    with doctor._group_of_one():
        assert "TILE_EP_BACKEND" not in os.environ and "LOCAL_WORLD_SIZE" not in os.environ
    assert dict(os.environ) == before
    said = {finding.name: finding.said for finding in doctor._environment()}
    assert said["NCCL_NVLS_ENABLE"].startswith("0 (") and said["TILE_EP_BACKEND"].startswith("nvlink (")


def test_a_backend_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_EP_BACKEND", "pigeons")
    (finding,) = (finding for finding in doctor._environment() if finding.name == "TILE_EP_BACKEND")
    assert finding.state is State.missing and "'pigeons'" in finding.said and finding.mend == "unset TILE_EP_BACKEND"
    assert doctor._picks(Finding("nvlink", State.ok, ""), False, True) == ["nothing: TILE_EP_BACKEND names no backend"]


def test_what_a_buffer_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    there, absent = Finding("nvlink", State.ok, "fine"), Finding("nvlink", State.missing, "no peer access")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("TILE_EP_BACKEND", raising=False)
    assert doctor._picks(there, False, True)[0] == "nvlink: up to 4 ranks of this host, a GPU each"
    assert doctor._picks(there, False, True)[1].startswith("collective: more ranks than GPUs")
    assert doctor._picks(absent, True, True) == ["collective: nvlink cannot be used (no peer access)"]
    assert doctor._picks(absent, True, False) == ["nothing: nvlink cannot be used (no peer access)"]
    assert doctor._picks(absent, False, True)[0].endswith("a GPU each, though it failed here")
    monkeypatch.setenv("TILE_EP_BACKEND", "nvlink")
    assert doctor._picks(there, False, True) == ["nvlink: TILE_EP_BACKEND says so"]
    assert doctor._picks(absent, True, True) == ["nvlink: TILE_EP_BACKEND says so, though it does not work here"]


TOPOLOGY = """
        GPU0    GPU1    GPU2    CPU Affinity
GPU0     X      NV18    SYS     0-47
GPU1    NV18     X      NV18    0-47
GPU2    SYS     NV18     X      48-95
NIC0    PIX     SYS     SYS
Legend:
  X    = Self
"""


def test_peers_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(doctor, "_lines", lambda _: [line.strip() for line in TOPOLOGY.splitlines() if line.strip()])
    peers = doctor._peers()
    assert peers == [[True, True, False], [True, True, True], [False, True, True]]
    said = {finding.name: (finding.state, finding.said) for finding in doctor._links(peers)}
    assert said == {
        "from cuda:0": (State.missing, "does not reach 2"),
        "from cuda:1": (State.ok, "reaches all others"),
        "from cuda:2": (State.missing, "does not reach 0"),
        "links of GPU0": (State.note, "NV18, SYS"),
        "links of GPU1": (State.ok, "NV18"),
        "links of GPU2": (State.note, "NV18, SYS"),
    }


@pytest.mark.parametrize(
    ("error", "refused"), [(BackendUnavailableError("no peer access"), True), (RuntimeError("driver"), False)]
)
def test_a_gpu_that_fails_is_not_one_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception, refused: bool
) -> None:
    monkeypatch.setattr(
        doctor, "_devices", lambda: [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    )
    monkeypatch.setattr(doctor, "_on", lambda device, backend: error if device.index == 1 else None)
    finding, was_refused = doctor._nvlink()
    assert finding.state is State.missing and str(error) in finding.said and finding.said.startswith("cuda:1: ")
    assert was_refused is refused


def test_a_version_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang")
    monkeypatch.setattr(doctor, "_pinned_tilelang", lambda: "tilelang==0.0.7")
    finding = doctor._tilelang()
    assert finding.state is State.note and "only tilelang==0.0.7 has been tried" in finding.said
