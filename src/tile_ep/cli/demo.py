"""`tile-ep demo`: replay of the trace that is shipped with the package."""

from __future__ import annotations

from importlib import resources

from tile_ep.cli import options as opt
from tile_ep.cli.rank import LayoutName, PayloadName
from tile_ep.cli.replay import Settings, execute
from tile_ep.cli.worlds import BackendName


def demo(
    ranks: opt.Ranks = 4,
    layout: opt.Layout = LayoutName.rank,
    payload: opt.Payload = PayloadName.bf16,
    backend: opt.Backend = BackendName.collective,
    tokens: opt.Tokens = None,
    experts: opt.Experts = None,
    seed: opt.Seed = 0,
    tolerance: opt.Tolerance = None,
    timeout: opt.Timeout = 300.0,
    plot: opt.Plot = None,
    json_file: opt.Json = None,
) -> None:
    """Replay the trace that comes with TileEP: 2,304 tokens of real text, 64 experts, top-8."""
    shipped = resources.files("tile_ep") / "data" / "demo_trace.safetensors"
    with resources.as_file(shipped) as path:
        execute(
            Settings(path, ranks, layout, payload, backend, tokens, experts, seed, tolerance, timeout, plot, json_file)
        )
