"""The examples of the README run as they stand, every relative link leads somewhere, the API reference builds."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tile_ep

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return [body for language, body in FENCED.findall(text) if language == "python"]


def run_python(script: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_runs_as_it_stands(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(python_blocks()[0])
    printed = run_python(script)
    # Two processes write: their line ends may change places.
    told = re.findall(r"rank ([01]): sent 16 tokens, ran its experts on \d+ rows, got 16 sums back", printed)
    assert sorted(told) == ["0", "1"], printed


def test_example_is_the_file_beside_it() -> None:
    assert python_blocks()[0] == (ROOT / "examples" / "quickstart.py").read_text()


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang (pip install tilelang)")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_loopback_example_runs_as_it_stands(tmp_path: Path) -> None:
    script = tmp_path / "loopback.py"
    script.write_text(python_blocks()[1] + "\nprint([output[:, 0].tolist() for output in outputs])\n")
    assert run_python(script).strip() == "[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]"


def shown(printed: str) -> list[str]:
    """Words of a replay's output, without what differs from run to run: times, and last digits of errors."""
    printed = re.sub(r"\d\.\d+e-\d\d", "ERROR", re.sub(r"(?<= )\d+\.\d(?= )", "MS", printed))
    return re.sub("─+", "", printed).split()


def test_the_output_of_the_demo_is_the_one_in_the_documentation() -> None:
    text = (ROOT / "docs" / "replay.md").read_text()
    (documented,) = (body for _, body in FENCED.findall(text) if "PASS" in body)
    done = subprocess.run(
        [sys.executable, "-m", "tile_ep.cli", "demo"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown(done.stdout) == shown(documented)


def test_first_screen_has_the_commands() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    for command in ("make demo", "make test", "pip install tile-ep", "tile-ep demo"):
        assert command in screen


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_reference_builds(tmp_path: Path) -> None:
    load(ROOT / "docs" / "api.py").build(tmp_path)
    page = (tmp_path / "tile_ep.html").read_text()
    missing = [name for name in tile_ep.__all__ if f'id="{name}"' not in page]
    assert not missing
    assert 'id="Buffer.dispatch"' in page
    assert (tmp_path / "tile_ep" / "reference.html").exists()
