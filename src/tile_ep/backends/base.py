"""What `Buffer` asks of a backend. Arguments are validated and made contiguous before they get here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle
from tile_ep.layout import align

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""`[T, H]`, or `(data [T, H], scales [T, S])`: the parts of a token that travel, as bytes."""


@dataclass(frozen=True)
class BufferConfig:
    """What all ranks agree on when a buffer is built."""

    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype  # widest row element, of dispatch and of combine
    max_scale_bytes: int  # bytes of scales per token, at most
    expand_factor: float
    num_slots: int
    timeout_s: float
    pipeline_depth: int


@dataclass(frozen=True)
class StreamOptions:
    """How a collective is ordered against the caller's CUDA work. Ignored where there are no streams.

    Attributes:
        inputs_are_new: some were made of the caller's, on the current stream, perhaps after `previous_event`.
    """

    previous_event: EventOverlap | torch.cuda.Event | None = None
    async_with_compute_stream: bool = False
    allocate_on_comm_stream: bool = False
    inputs_are_new: bool = False


@dataclass(frozen=True)
class DispatchRequest:
    """One dispatch. `topk_idx` is `None` exactly when `handle` is given (a cached dispatch)."""

    x: Payload
    topk_idx: torch.Tensor | None  # [T, K] int
    topk_weights: torch.Tensor | None  # [T, K] fp32
    handle: EPHandle | None
    stats: torch.Tensor | None  # [E_local] int32, added to
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    num_sms: int  # 0: the backend's choice
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool
    streams: StreamOptions


@dataclass(frozen=True)
class DispatchResult:
    recv_x: Payload
    recv_topk_idx: torch.Tensor | None
    recv_topk_weights: torch.Tensor | None
    handle: EPHandle
    event: EventOverlap


@dataclass(frozen=True)
class CombineRequest:
    """One combine."""

    x: torch.Tensor  # [N, H], or [rows, H] for an expanded plan
    handle: EPHandle
    topk_weights: torch.Tensor | None  # [N, K] fp32, or [rows] for an expanded plan
    bias: tuple[torch.Tensor, ...]  # 0, 1 or 2 of [T, H], the dtype of x
    apply_weights: bool  # expanded plans only: multiply each row by its weight before the local sum
    num_sms: int
    streams: StreamOptions


@dataclass(frozen=True)
class CombineResult:
    combined_x: torch.Tensor  # [T, H]
    combined_topk_weights: torch.Tensor | None  # [T, K] fp32
    event: EventOverlap


class Backend(Protocol):
    """One rank's side of the exchange. Every method is a collective, except where it says otherwise."""

    name: str
    rank: int
    num_ranks: int
    device: torch.device

    def dispatch(self, request: DispatchRequest) -> DispatchResult: ...

    def combine(self, request: CombineRequest) -> CombineResult: ...

    def combine_input(self, handle: EPHandle, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, H]` memory that `combine` reads in place when it is passed as `x`. Local."""
        ...

    def barrier(self) -> None: ...

    def agree(self, values: dict[str, object]) -> None:
        """Raise `DisagreementError` on every rank if the ranks gave different values for a name."""
        ...

    def reset(self) -> None:
        """Make the buffer usable again after a `PeerTimeoutError`."""
        ...

    def destroy(self) -> None:
        """Give everything back. Local, idempotent, safe at interpreter exit."""
        ...


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same `[N, S]` values with stride `(1, N rounded up to 16 bytes)`, as TMA descriptors want it."""
    num_rows, num_scales = scales.shape
    rows = align(max(num_rows, 1), max(1, 16 // scales.element_size()))
    store = torch.zeros((num_scales, rows * scales.element_size()), dtype=torch.uint8, device=scales.device)
    out = store.view(scales.dtype).t()[:num_rows]
    out.copy_(scales)
    return out
