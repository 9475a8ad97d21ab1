"""The command line, `tile-ep`: one module a command."""

from __future__ import annotations

import typer

from tile_ep.cli import bench, demo, doctor, replay

app = typer.Typer(
    name="tile-ep",
    help="The token exchange of expert-parallel Mixture-of-Experts layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("replay")(replay.replay)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point of `tile-ep` and of `python -m tile_ep.cli`."""
    app()
