"""`python scripts/multi_gpu_summary.py OUT --device cuda --ranks N`: how each step went, and the figures beside the targets.

Reads what `multi_gpu.sh` left in OUT, writes OUT/summary.json, prints it, and exits 1 if a step failed or left nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TARGETS = {"dispatch": 0.92, "dispatch, fp8": 0.88, "combine, zero-copy": 0.92}
"""Shares of the rate at which copies to peers run in both directions, at 16 SMs."""
AT_FEWER_SMS = 0.03
"""By how much 8 SMs may fall short of 16, as a part of the time."""
OURS = "TileEP"


def read_steps(out: Path) -> list[dict[str, Any]]:
    """Name, outcome and seconds of every step."""
    lines = (out / "steps.tsv").read_text().splitlines()
    return [dict(zip(("name", "outcome", "seconds"), line.split("\t"), strict=True)) for line in lines]


def read_bench(path: Path) -> dict[str, Any] | None:
    """A JSON of `tile-ep bench`, or `None` where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def of_peer_copy(bench: dict[str, Any], figure: dict[str, Any]) -> float | None:
    """Rate over the links as a share of the rate of copies in both directions, both of this run."""
    both = bench["ceilings"]["peer_both_tb_s"]
    return figure["bytes"]["wire"] / (both * 1e9) / figure["time_ms"]["median"] if both else None


def shares(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Our figures at the base shape."""
    return [
        {
            "collective": figure["name"],
            "sms": figure["num_sms"],
            "ms": figure["time_ms"]["median"],
            "wire_bytes": figure["bytes"]["wire"],
            "of_ceiling": figure["share"],
            "of_peer_copy": of_peer_copy(bench, figure),
            "wrong": figure["wrong"],
        }
        for figure in bench["figures"]
        if figure["section"] == "base" and figure["system"] == OURS
    ]


def judge(found: list[dict[str, Any]]) -> list[str]:
    """Each target, and whether it was reached."""
    said = []
    for name, target in TARGETS.items():
        by_sms = {one["sms"]: one for one in found if one["collective"] == name}
        if 16 not in by_sms or by_sms[16]["of_peer_copy"] is None:
            said.append(f"{name}: not measured")
            continue
        share = by_sms[16]["of_peer_copy"]
        word = "reached" if share >= target else "MISSED"
        said.append(f"{name}, 16 SMs: {100 * share:.1f} % of a peer copy, target {100 * target:.0f} %: {word}")
        if 8 in by_sms:
            more = by_sms[8]["ms"] / by_sms[16]["ms"] - 1
            word = "reached" if more <= AT_FEWER_SMS else "MISSED"
            said.append(f"{name}, 8 SMs: {100 * more:+.1f} % time, target +{100 * AT_FEWER_SMS:.0f} %: {word}")
    return said


def variants(out: Path) -> list[str]:
    """A line for each collective: its time in each variant that was measured, in one run after the other."""
    times: dict[tuple[str, int], list[str]] = {}
    for path in [out / "bench.json", *sorted(out.glob("bench-*.json"))]:
        bench = read_bench(path)
        for one in shares(bench) if bench else []:
            kind = path.stem.removeprefix("bench").removeprefix("-") or "as it is"
            times.setdefault((one["collective"], one["sms"]), []).append(f"{kind} {one['ms']:.3f} ms")
    return [f"{name}, {sms} SMs: {', '.join(said)}" for (name, sms), said in times.items()]


def overlap(bench: dict[str, Any] | None) -> list[str]:
    """A line for each measurement of a matrix product beside a collective."""
    return [
        f"{one['collective']}, {one['num_sms']} SMs, {one['order']}, {one['left_sms']} left free: "
        f"{100 * one['share']:.0f} % hidden"
        for one in (bench or {}).get("overlap", [])
    ]


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--ranks", type=int, required=True)
    options = parser.parse_args()
    steps, bench = read_steps(options.out), read_bench(options.out / "bench.json")
    found = shares(bench) if bench else []
    summary = {
        "device": options.device,
        "ranks": options.ranks,
        "steps": steps,
        "base": found,
        "targets": judge(found) if options.device == "cuda" else [],
        "variants": variants(options.out) if options.device == "cuda" else [],
        "overlap": overlap(read_bench(options.out / "overlap.json")),
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    failed = [step["name"] for step in steps if step["outcome"] != "ok"]
    print(f"\n{options.ranks} processes on {'GPUs' if options.device == 'cuda' else 'CPUs: times say nothing of GPUs'}")
    for title in ("targets", "variants", "overlap"):
        for line in summary[title]:
            print(f"{title.rstrip('s')}: {line}")
    if options.device == "cuda":
        print("not measured: other libraries that are not installed")
    print(f"FAILED: {', '.join(failed)}" if failed else f"all {len(steps)} steps ok")
    return 1 if failed or bench is None or not found else 0


if __name__ == "__main__":
    sys.exit(main())
