"""`tile-ep doctor`: what this machine offers, which backend a `Buffer` would pick here, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from tile_ep import config as settings
from tile_ep.bench.machine import query
from tile_ep.buffer import Buffer
from tile_ep.cli.worlds import _use_loopback_interface
from tile_ep.errors import BackendUnavailableError, TileEPError

_TIMEOUT_S = 60.0
_CAPABILITY = 9, 0
_VARIABLES = {
    "TILE_EP_BACKEND": "overrides the backend of every Buffer",
    "TILE_EP_DEBUG": "compares the ranks' arguments before each call",
    "TILE_EP_CACHE": "where the simulator keeps compiled kernels",
    "CUDA_VISIBLE_DEVICES": "which GPUs this process sees",
    "NCCL_NVLS_ENABLE": "0 keeps NCCL from NVLink multicast",
    "NCCL_P2P_DISABLE": "1 keeps NCCL from peer memory: the collective backend gets slow",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1 keeps symmetric memory from NVLink multicast",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1 lets several ranks share a GPU, for tests",
    "TORCH_SYMMMEM": "which symmetric memory torch uses",
    "NVSHMEM_DISABLE_NVLS": "1 keeps NVSHMEM from NVLink multicast",
    "NCCL_SOCKET_IFNAME": "the network interface of NCCL",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo",
    "CUDA_HOME": "the CUDA toolkit",
    "CXX": "the C++ compiler of the simulator",
    "WORLD_SIZE": "the number of ranks",
    "LOCAL_WORLD_SIZE": "the number of ranks on this host",
}


class State(str, Enum):
    """Of one line: there and working; not there, or broken; something to know."""

    ok = "ok"
    missing = "missing"
    note = "note"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at.
        said: what was found.
        mend: how to get it, where it is missing.
    """

    name: str
    state: State
    said: str
    mend: str = ""


@dataclass
class Diagnosis:
    """Everything found.

    Attributes:
        findings: by section.
        backends: a line for each way to run; it is ok if rows came back right.
        picks: what `Buffer(backend="auto")` takes, and why.
        peers: whether a GPU reaches another one's memory, `[from][to]`.
    """

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    backends: list[Finding] = field(default_factory=list)
    picks: list[str] = field(default_factory=list)
    peers: list[list[bool]] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether rows can be exchanged here at all."""
        return any(finding.state is State.ok for finding in self.backends)


def doctor(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
    look: Annotated[
        bool, typer.Option("--look", help="Only look; do not run a small exchange on each backend.")
    ] = False,
) -> None:
    """What this machine offers, what is missing and how to mend it, and which backend a Buffer would pick here, and why."""
    found = diagnose()
    _print(Console(), found)
    if json_file is not None:
        facts = {**asdict(found), "works": found.works}
        json_file.write_text(json.dumps(facts, indent=1) + "\n")
    if not found.works:
        raise typer.Exit(1)


def diagnose() -> Diagnosis:
    """Look at everything, and exchange a few rows on each backend."""
    found = Diagnosis()
    found.findings["software"] = _software()
    found.findings["GPUs"] = _gpus()
    found.peers = _peers()
    if found.peers:
        found.findings["peers"] = _links(found.peers)
    found.findings["environment"] = _environment()
    with _group_of_one():
        nvlink, refused = _nvlink()
        collective = [_collective(device) for device in _devices()[:2]]
        found.backends = [nvlink, *collective, _simulator()]
    found.picks = _picks(nvlink, refused, collective[-1].state is State.ok)
    return found


# ---------------------------------------------------------------- what there is


def _software() -> list[Finding]:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return [
        Finding("Python", State.ok, platform.python_version()),
        Finding("PyTorch", State.ok, f"{torch.__version__}, {cuda}"),
        _tilelang(),
        _compiler(),
        _nvcc(),
        _symmetric_memory(),
    ]


def _tilelang() -> Finding:
    pinned = _pinned_tilelang()
    mend = f"pip install '{pinned}'"
    if importlib.util.find_spec("tilelang") is None:
        return Finding("TileLang", State.missing, "not installed: no kernels, neither on GPUs nor simulated", mend)
    version = importlib.metadata.version("tilelang")
    if "==" in pinned and version != pinned.rpartition("==")[2]:
        return Finding("TileLang", State.note, f"{version}; only {pinned} has been tried", mend)
    return Finding("TileLang", State.ok, f"{version} ({pinned} is what TileEP asks for)")


def _pinned_tilelang() -> str:
    """The requirement of the extra `gpu`; any version, where TileEP itself runs from a folder."""
    try:
        lines = importlib.metadata.requires("tile-ep") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    return next((line.partition(";")[0].strip() for line in lines if line.startswith("tilelang")), "tilelang")


def _compiler() -> Finding:
    named = os.environ.get("CXX", "g++")
    said = _first_line([named, "--version"])
    if said is None:
        return Finding("C++ compiler", State.missing, f"no {named}: no simulator", "apt install g++, or set CXX")
    return Finding("C++ compiler", State.ok, said)


def _nvcc() -> Finding:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [f"{home}/bin/nvcc" for home in homes if home]
    program = next((path for path in paths if os.access(path, os.X_OK)), shutil.which("nvcc"))
    if program is not None:
        release = next((line for line in _lines([program, "--version"]) if "release" in line), program)
        return Finding("nvcc", State.ok, release)
    if not torch.cuda.is_available():
        return Finding("nvcc", State.note, "not installed; without a GPU nothing needs it")
    return Finding(
        "nvcc", State.missing, "TileLang compiles kernels with it", "install the CUDA toolkit, or set CUDA_HOME"
    )


def _symmetric_memory() -> Finding:
    name, mend = "symmetric memory", "a PyTorch that has torch.distributed._symmetric_memory with empty and rendezvous"
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError as error:
        return Finding(name, State.missing, str(error), mend)
    lacking = [part for part in ("empty", "rendezvous") if not hasattr(symmetric, part)]
    if lacking:
        return Finding(name, State.missing, f"without {', '.join(lacking)}", mend)
    if not torch.cuda.is_available():
        return Finding(name, State.note, "PyTorch has it; it needs GPUs")
    return Finding(name, State.ok, "PyTorch has it")


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            mend = "a PyTorch built with CUDA"
        else:
            mend = "a driver for CUDA " + torch.version.cuda + " and a GPU that this process may see"
        return [Finding("GPUs", State.missing, "PyTorch sees none", mend)]
    drivers = query("gpu", "driver_version")
    found = [Finding("driver", State.ok, drivers[0])] if drivers else []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        said = (
            f"{gpu.name}, {gpu.multi_processor_count} SMs, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}"
        )
        if (gpu.major, gpu.minor) < _CAPABILITY:
            found.append(
                Finding(f"cuda:{index}", State.missing, said, "the kernels need compute capability 9.0 or later")
            )
        else:
            found.append(Finding(f"cuda:{index}", State.ok, said))
    return found


def _peers() -> list[list[bool]]:
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number < 2:
        return []
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(number)] for a in range(number)]


def _links(peers: list[list[bool]]) -> list[Finding]:
    found = []
    for index, reached in enumerate(peers):
        unreached = [str(other) for other, reaches in enumerate(reached) if not reaches]
        if unreached:
            mend = "GPUs joined by NVLink, all of them visible to this process"
            found.append(Finding(f"from cuda:{index}", State.missing, f"does not reach {', '.join(unreached)}", mend))
        else:
            found.append(Finding(f"from cuda:{index}", State.ok, "reaches all others"))
    return [*found, *_nvlinks()]


def _nvlinks() -> list[Finding]:
    """As far as nvidia-smi tells: its matrix says NV and the number of links between two GPUs."""
    rows = [line.split() for line in _lines(["nvidia-smi", "topo", "-m"])]
    rows = [row for row in rows if row[0].startswith("GPU") and "X" in row]
    if not rows:
        return [Finding("NVLink", State.note, "nvidia-smi does not tell")]
    found = []
    for row in rows:
        kinds = sorted({cell for cell in row[1 : 1 + len(rows)] if cell != "X"})
        state = State.ok if kinds and all(kind.startswith("NV") for kind in kinds) else State.note
        found.append(Finding(f"links of {row[0]}", state, ", ".join(kinds) or "none"))
    return found


def _environment() -> list[Finding]:
    found = [
        Finding(name, State.note, f"{os.environ[name]} ({meaning})")
        for name, meaning in _VARIABLES.items()
        if os.environ.get(name)
    ]
    try:
        settings.backend_choice("auto")
    except TileEPError as error:
        found = [finding for finding in found if finding.name != "TILE_EP_BACKEND"]
        found.append(Finding("TILE_EP_BACKEND", State.missing, str(error), "unset TILE_EP_BACKEND"))
    return found or [Finding("variables", State.note, "none that matters is set")]


def _first_line(command: list[str]) -> str | None:
    lines = _lines(command)
    return lines[0] if lines else None


def _lines(command: list[str]) -> list[str]:
    """What a program prints; nothing where there is none or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


# ---------------------------------------------------------------- what works


@contextmanager
def _group_of_one() -> Iterator[None]:
    """A default group of this process alone, whatever the environment says about backends and other ranks."""
    before = dict(os.environ)
    for name in ("TILE_EP_BACKEND", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    _use_loopback_interface()
    try:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=_TIMEOUT_S)
        )
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _exchange(buffer: Buffer) -> None:
    """Four tokens to both experts of each rank and back, their rows doubled: a sum of one row for each rank."""
    x = torch.arange(4 * 64, dtype=torch.float32).view(4, 64).to(buffer.device, torch.bfloat16)
    experts = 2 * buffer.num_ranks
    topk_idx = torch.arange(experts, device=buffer.device).repeat(4, 1)
    received, _, _, handle, _ = buffer.dispatch(x, topk_idx)
    assert isinstance(received, torch.Tensor)
    out = buffer.combine(received * 2, handle)[0]
    if not torch.equal(out, x * (2 * buffer.num_ranks)):
        raise AssertionError("rows came back wrong")


def _limits(num_ranks: int) -> dict[str, Any]:
    return {
        "num_max_tokens_per_rank": 4,
        "hidden": 64,
        "num_topk": 2 * num_ranks,
        "num_experts": 2 * num_ranks,
        "timeout_s": _TIMEOUT_S,
    }


def _devices() -> list[torch.device]:
    """The CPU, and every GPU."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(number))]


def _problem(run: Callable[[], object]) -> Exception | None:
    """What `run` raises, or `None`."""
    try:
        run()
    except Exception as error:  # a broken driver or library can raise anything
        return error
    return None


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TileEPError) else f"{type(error).__name__}: {error}"


def _on(device: torch.device, backend: str) -> Exception | None:
    """What is wrong with an exchange of one rank there, or `None`."""

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with Buffer(backend=backend, device=device, **_limits(1)) as buffer:
            _exchange(buffer)

    return _problem(run)


def _nvlink() -> tuple[Finding, bool]:
    """The second: whether a Buffer refuses it, rather than fail with it."""
    gpus = _devices()[1:]
    if not gpus:
        return Finding("nvlink", State.missing, "no GPU", "a GPU of compute capability 9.0 or later"), True
    problems = {device: problem for device in gpus if (problem := _on(device, "nvlink"))}
    if problems:
        said = "; ".join(f"{device}: {_words(problem)}" for device, problem in problems.items())
        refused = any(isinstance(problem, BackendUnavailableError) for problem in problems.values())
        return Finding("nvlink", State.missing, said, "what is missing above"), refused
    return Finding("nvlink", State.ok, f"rows came back right on {', '.join(map(str, gpus))}, each for itself"), False


def _collective(device: torch.device) -> Finding:
    library = "gloo, CPUs" if device.type == "cpu" else "NCCL, GPUs"
    problem = _on(device, "collective")
    if problem is not None:
        return Finding(f"collective ({library})", State.missing, _words(problem), "a PyTorch with gloo and NCCL")
    return Finding(f"collective ({library})", State.ok, "rows came back right")


def _simulator() -> Finding:
    def run() -> None:
        from tile_ep.worlds.loopback import loopback

        with loopback(2, "sim", **_limits(2)) as ranks:
            ranks.run(lambda rank, buffer: _exchange(buffer))

    problem = _problem(run)
    if problem is not None:
        return Finding("simulator", State.missing, _words(problem), "what is missing above")
    return Finding("simulator", State.ok, "2 ranks through the kernels, rows came back right")


def _picks(nvlink: Finding, refused: bool, collective: bool) -> list[str]:
    """What a Buffer takes that is not told."""
    if _problem(lambda: settings.backend_choice("auto")) is not None:
        return ["nothing: TILE_EP_BACKEND names no backend"]
    choice = settings.backend_choice("auto")
    other = "collective" if collective else "nothing"
    if choice != "auto":
        works = nvlink.state is State.ok if choice == "nvlink" else collective
        return [f"{choice}: TILE_EP_BACKEND says so" + ("" if works else ", though it does not work here")]
    if refused:
        return [f"{other}: nvlink cannot be used ({nvlink.said})"]
    gpus = len(_devices()) - 1
    failed = "" if nvlink.state is State.ok else ", though it failed here"
    return [
        f"nvlink: up to {gpus} ranks of this host, a GPU each{failed}",
        f"{other}: more ranks than GPUs, or several hosts, or tensors on CPUs",
    ]


# ---------------------------------------------------------------- for people

_COLOURS = {State.ok: "green", State.missing: "red", State.note: "dim"}


def _print(console: Console, found: Diagnosis) -> None:
    for section, findings in {**found.findings, "backends": found.backends}.items():
        console.print(section, style="bold")
        for finding in findings:
            console.print(f"  {finding.state.value:8}", style=_COLOURS[finding.state], end="")
            console.print(f"{finding.name}: {finding.said}", markup=False, highlight=False, soft_wrap=True)
            if finding.mend:
                console.print(f"          to mend: {finding.mend}", markup=False, highlight=False, soft_wrap=True)
    console.print("Buffer() picks", style="bold")
    for pick in found.picks:
        console.print(f"  {pick}", markup=False, highlight=False, soft_wrap=True)
    console.print("an exchange works here" if found.works else "no backend works here")
