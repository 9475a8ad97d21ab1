"""TileEP: the token exchange of expert-parallel Mixture-of-Experts layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tile_ep.buffer import Buffer, Traffic
from tile_ep.errors import (
    ArgumentError,
    BackendUnavailableError,
    CapacityError,
    CaptureError,
    DestroyedError,
    DisagreementError,
    PeerTimeoutError,
    RoutingError,
    StaleHandleError,
    TileEPError,
)
from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle

if TYPE_CHECKING:
    from tile_ep.quantize import per_token_cast_back as per_token_cast_back
    from tile_ep.quantize import per_token_cast_to_fp8 as per_token_cast_to_fp8
    from tile_ep.worlds.loopback import loopback as loopback

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "Buffer",
    "CapacityError",
    "CaptureError",
    "DestroyedError",
    "DisagreementError",
    "EPHandle",
    "EventOverlap",
    "PeerTimeoutError",
    "RoutingError",
    "StaleHandleError",
    "TileEPError",
    "Traffic",
    "loopback",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]


def __getattr__(name: str) -> Any:
    if name in ("per_token_cast_back", "per_token_cast_to_fp8"):
        from tile_ep import quantize

        return getattr(quantize, name)
    if name == "loopback":  # the only name that needs TileLang
        from tile_ep.worlds.loopback import loopback

        return loopback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
