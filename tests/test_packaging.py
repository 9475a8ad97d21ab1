"""What is installed: the wheel holds all that the package needs, and every dependency has a pinned version."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import tile_ep

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tile_ep"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

needs_build = pytest.mark.skipif(
    importlib.util.find_spec("build") is None or importlib.util.find_spec("hatchling") is None,
    reason="needs build and hatchling (pip install build hatchling)",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The package, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def read_metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


@needs_build
def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    here = {
        f"tile_ep/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == here
    for kind in (".py", ".cuh", ".h", ".cpp"):
        assert any(name.endswith(kind) for name in held)
    assert {
        "tile_ep/py.typed",
        "tile_ep/data/demo_trace.safetensors",
        "tile_ep/data/README.md",
        "tile_ep/sim/README.md",
    } <= held


@needs_build
def test_what_the_wheel_says_of_itself(wheel: zipfile.ZipFile) -> None:
    said = read_metadata(wheel)
    assert (said["Name"], said["Version"]) == ("tile-ep", tile_ep.__version__)
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "MIT"
    assert {"gpu", "dev"} <= set(said.get_all("Provides-Extra") or [])
    needed = [line for line in said.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert "torch>=2.6" in needed  # no upper bound
    names = wheel.namelist()
    (entry,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    assert "tile-ep = tile_ep.cli:main" in wheel.read(entry).decode()
    assert any(name.endswith("/LICENSE") for name in names)


@needs_build
def test_the_wheel_works_away_from_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """One rank over the first 64 tokens of the trace that came with it."""
    wheel.extractall(tmp_path / "site")
    script = "import tile_ep, sys; from tile_ep.cli import main; print(tile_ep.__file__, flush=True); main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "demo", "--ranks", "1", "--tokens", "64"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert Path(lines[0]).is_relative_to(tmp_path)
    assert lines[-1].startswith("PASS")


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@needs_build
@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_one_pinned_version(wheel: zipfile.ZipFile, python: str) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    environment = {"python_version": python, "extra": "dev"}
    pinned: list[str] = []
    for pin in map(Requirement, pins()):
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{pin} is not one version"
        if pin.marker is None or pin.marker.evaluate(environment):
            pinned.append(canonicalize_name(pin.name))
    assert len(pinned) == len(set(pinned))
    needed = [Requirement(line) for line in read_metadata(wheel).get_all("Requires-Dist") or []]
    assert needed
    for requirement in needed:
        assert canonicalize_name(requirement.name) in pinned, f"{requirement} has no pin for Python {python}"


@needs_build
def test_what_dependencies_need_is_pinned_too(wheel: zipfile.ZipFile) -> None:
    """Of what is installed here. A requirement of exactly one version needs no pin."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = {canonicalize_name(pin.name) for pin in map(Requirement, pins())}
    todo = [Requirement(line) for line in read_metadata(wheel).get_all("Requires-Dist") or []]
    seen: set[tuple[str, str]] = set()
    unpinned: set[str] = set()
    walked: set[str] = set()
    while todo:
        above = todo.pop()
        try:
            lines = importlib.metadata.requires(above.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, another Python or another build
        walked.add(canonicalize_name(above.name))
        if canonicalize_name(above.name) not in pinned and [part.operator for part in above.specifier] != ["=="]:
            unpinned.add(canonicalize_name(above.name))
        for below in map(Requirement, lines):
            wanted = below.marker is None or any(below.marker.evaluate({"extra": e}) for e in ("", *above.extras))
            if wanted and (key := (canonicalize_name(above.name), str(below))) not in seen:
                seen.add(key)
                todo.append(below)
    assert {"torch", "numpy", "jinja2"} <= walked
    # Named without a version by a library of torch's, and with one by torch.
    assert {name for name in unpinned if not name.startswith("nvidia-")} == set()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run"])
def test_no_package_index_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|--index-url|--extra-index-url|--find-links", text)


def summary_of(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """`.ci/run` beside a Makefile whose `test` is `script`."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "tests.sh").write_text(script)
    (tmp_path / "Makefile").write_text("lint:\n\t@true\ntest:\n\t@sh tests.sh\n")
    return subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=30,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"},
    )


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ("3 passed in 0.52s", 0),
        ("1 failed, 2 passed, 4 warnings in 70.10s (0:01:10)", 1),
        ("===== 1 failed in 2.00s =====", 1),
        ("no tests ran in 0.01s", 5),
    ],
)
def test_continuous_integration_ends_with_the_summary(tmp_path: Path, summary: str, status: int) -> None:
    done = summary_of(tmp_path, f"echo '{summary}'\nexit {status}\n")
    assert done.stdout.splitlines()[-1] == summary
    assert done.returncode == status


def test_continuous_integration_says_when_nothing_could_be_tested(tmp_path: Path) -> None:
    done = summary_of(tmp_path, "echo cannot install\nexit 1\n")
    assert done.returncode == 1
    assert "cannot install" in done.stdout


def test_continuous_integration_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
