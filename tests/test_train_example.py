"""The training example: the loss falls, and does not depend on the number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_moe.py"


def test_loss_falls_and_agrees_over_ranks(tmp_path: Path) -> None:
    report, picture = tmp_path / "run.json", tmp_path / "loss.png"
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--ranks", "2", "--steps", "15", "--json", report, "--plot", picture],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads(report.read_text())["losses"]
    assert losses.keys() == {"1", "2"}
    for curve in losses.values():
        assert len(curve) == 15
        assert curve[-1] < 0.65 * curve[0]
    differences = [abs(a - b) / b for a, b in zip(losses["2"], losses["1"], strict=True)]
    assert max(differences) < 2e-6  # sums in another order, through 15 steps of Adam
    assert "largest relative difference to ranks=1" in done.stdout
    assert picture.stat().st_size > 10_000
