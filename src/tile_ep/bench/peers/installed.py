"""Whether an optional package is there."""

from __future__ import annotations

import importlib


def reason_missing(module: str, *names: str) -> str | None:
    """Why `names` cannot be had from `module`, or `None`."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken installation is no reason to end the run
        return f"{module} cannot be imported ({error})"
    lacking = [name for name in names if not hasattr(found, name)]
    return f"this {module} has no {', '.join(lacking)}" if lacking else None
