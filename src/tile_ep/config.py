"""What the environment says. Read when a buffer is built, never at import and never per call."""

from __future__ import annotations

import os

from tile_ep.errors import ArgumentError

BACKENDS = ("auto", "collective", "nvlink")


def debug_enabled() -> bool:
    """Whether `TILE_EP_DEBUG` asks for a collective check of every call's arguments."""
    return os.environ.get("TILE_EP_DEBUG", "0") not in ("", "0")


def backend_choice(argument: str) -> str:
    """The backend to use: `TILE_EP_BACKEND` where it is set, else `argument`.

    Raises:
        ArgumentError: the name is not one of `BACKENDS`.
    """
    override = os.environ.get("TILE_EP_BACKEND", "")
    name, choice = ("TILE_EP_BACKEND", override) if override else ("backend", argument)
    if choice not in BACKENDS:
        raise ArgumentError(name, repr(choice), "one of " + ", ".join(map(repr, BACKENDS)))
    return choice
