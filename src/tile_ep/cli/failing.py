"""How every command ends that could not do its work."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console


def fail(console: Console, error: Exception) -> NoReturn:
    """Say what went wrong, whole and as it is, and exit with 2."""
    console.print("error: ", style="bold red", end="")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2) from None
