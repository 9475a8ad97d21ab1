"""`Buffer`: the token exchange of one expert-parallel group, as its users see it."""

from __future__ import annotations

import importlib
import importlib.util
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tile_ep import config as settings
from tile_ep import validation as check
from tile_ep.backends.base import (
    Backend,
    BufferConfig,
    CombineRequest,
    DispatchRequest,
    Payload,
    StreamOptions,
)
from tile_ep.backends.collective import CollectiveBackend
from tile_ep.backends.collective_wire import is_lost_peer
from tile_ep.errors import (
    ArgumentError,
    BackendUnavailableError,
    CaptureError,
    DestroyedError,
    DisagreementError,
    PeerTimeoutError,
)
from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle
from tile_ep.layout import MAX_TOPK, ExpertPartition

Request = TypeVar("Request", DispatchRequest, CombineRequest)
Result = TypeVar("Result")
Event = EventOverlap | torch.cuda.Event

_MOST_ALIGNED = 1 << 16  # rows: sums of aligned counts are int32


@dataclass(frozen=True)
class Traffic:
    """What one dispatch moves from and to a rank, as its plan says.

    Attributes:
        rank: this rank.
        rows_sent_per_rank: rows for each rank, one per (token, rank); entry `rank` never leaves the rank.
        rows_received_per_rank: rows from each rank.
        selections_sent_per_rank: selections of experts on each rank: the rows if nothing were deduplicated.
        row_bytes: bytes of a row, data and scales.
    """

    rank: int
    rows_sent_per_rank: list[int]
    rows_received_per_rank: list[int]
    selections_sent_per_rank: list[int]
    row_bytes: int

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows sent to other ranks."""
        return self._to_others(self.rows_sent_per_rank)

    @property
    def bytes_received(self) -> int:
        """Bytes of rows received from other ranks."""
        return self._to_others(self.rows_received_per_rank)

    @property
    def bytes_sent_without_dedup(self) -> int:
        """Bytes that would have been sent to other ranks, one row per selection."""
        return self._to_others(self.selections_sent_per_rank)

    def _to_others(self, rows: list[int]) -> int:
        return self.row_bytes * (sum(rows) - rows[self.rank])


class Buffer:
    """One rank's side of dispatch and combine over a group of `R` ranks.

    Building it is collective; so are `dispatch`, `combine`, `barrier` and `reset`. Usable as a context manager,
    which calls `destroy` at its end. The conventions of `dispatch` and `combine` are DeepEP's
    (`deep_ep/buffers/elastic.py`, `ElasticBuffer`).

    Args:
        group: the expert-parallel group; `None` is the default process group.
        num_max_tokens_per_rank: most tokens `T` a rank may hold in a call.
        hidden: most elements of `dtype` in a row. A dispatch may use any row of at most that many bytes.
        num_topk: most selections `K` per token; 0 allows any up to 32, but the kernels then have no room for expanded
            dispatches beyond that of the rank layout.
        num_experts: experts over all ranks, at least one per rank; 0 leaves it to each dispatch. A dispatch may
            use fewer than were given here.
        dtype: widest row element of dispatch and combine: bf16, fp16 or fp32.
        use_fp8_dispatch: accepted for DeepEP's sake. Room for fp8 scales is always there, and the payload of
            each call decides.
        max_scale_bytes: most bytes of scales per row; by default one fp32 for each 128 elements of `hidden`.
        expand_factor: rows of the expanded layout, as a multiple of the balanced number.
        num_slots: receive regions. A result is a view of one, which stays taken while any tensor over it is alive; where the
            next dispatch would have none left, the result is a copy.
        backend: `"auto"`, `"collective"` or `"nvlink"`; the environment variable `TILE_EP_BACKEND` overrides it.
            `"auto"` takes `"nvlink"` where every rank is a CUDA device that reaches the memory of all others.
        num_sms: SMs of each collective unless the call says otherwise; 0 is the backend's choice. CPUs have none.
        pipeline_depth: how many collectives the host may run ahead of the device, 0 for any number.
        timeout_s: bound of every wait, in seconds; by default the group's own timeout, else 300.
        device: where the tensors are; by default the current CUDA device for an NCCL group, else the CPU.
        max_bytes: refuse to be built if `get_buffer_size_hint` says that this many bytes are exceeded.

    Attributes:
        group: the process group, `None` where all ranks live in one process.
        rank: this rank, `0 <= rank < num_ranks`.
        num_ranks: size of the group.
        num_bytes: symmetric memory held by this rank, in bytes; 0 for the collective backend.
        backend_name: what moves the rows.
        config: sizes and limits, the same on all ranks.

    Raises:
        ArgumentError: an argument is out of range.
        DisagreementError: the ranks passed different sizes, or one of them passed a wrong argument.
        BackendUnavailableError: `backend="nvlink"` cannot be used here; the message says why, rank by rank.
        PeerTimeoutError: a rank did not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        num_experts: int = 0,
        *,
        dtype: torch.dtype = torch.bfloat16,
        use_fp8_dispatch: bool = False,
        max_scale_bytes: int | None = None,
        expand_factor: float = 2.0,
        num_slots: int = 2,
        backend: str = "auto",
        num_sms: int = 0,
        pipeline_depth: int = 2,
        timeout_s: float | None = None,
        device: torch.device | str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        group = settings.resolve_group(group)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError("Buffer: built during CUDA graph capture. Build and warm it up before the capture")

        def build() -> tuple[BufferConfig, torch.device, str, int]:
            where = settings.resolve_device(group, device)
            limits = settings.make_config(
                group.size(),
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                dtype=dtype,
                max_scale_bytes=max_scale_bytes,
                expand_factor=expand_factor,
                num_slots=num_slots,
                pipeline_depth=pipeline_depth,
                timeout_s=settings.group_timeout_s(group, where) if timeout_s is None else timeout_s,
            )
            settings.check_cap(limits, group.size(), max_bytes)
            return limits, where, settings.backend_choice(backend), check.check_int("num_sms", num_sms, 0)

        limits, where, choice, sms, name, obstacles = _agree_on_construction(group, build)
        made: Backend
        if choice == "nvlink" or (choice == "auto" and not obstacles):
            if obstacles:
                said = "; ".join(f"rank {rank}: {reason}" for rank, reason in obstacles.items())
                raise BackendUnavailableError(f"backend='nvlink' cannot be used: {said}. Use backend='collective'")
            module = importlib.import_module("tile_ep.backends.nvlink")
            made = module.NvlinkBackend.from_process_group(group, limits, where)
        else:
            made = CollectiveBackend.from_process_group(group, limits, where, name)
        self._set_up(made, limits, sms, group)

    @classmethod
    def from_backend(cls, backend: Backend, config: BufferConfig) -> Buffer:
        """A buffer over a backend that is already there. Local; for worlds whose ranks share a process."""
        buffer = cls.__new__(cls)
        buffer._set_up(backend, config, 0, None)
        return buffer

    def _set_up(self, backend: Backend, config: BufferConfig, num_sms: int, group: dist.ProcessGroup | None) -> None:
        self._backend: Backend | None = backend
        self.config = config
        self.group = group
        self.rank, self.num_ranks, self.device = backend.rank, backend.num_ranks, backend.device
        self.backend_name = backend.name
        self.num_bytes: int = getattr(backend, "num_bytes", 0)
        self._num_sms = num_sms
        self._debug = settings.debug_enabled()
        self._id = uuid.uuid4().int >> 65
        self._broken: PeerTimeoutError | None = None
        self._last: tuple[EPHandle, int] | None = None

    # ------------------------------------------------------------ collectives

    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        *,
        previous_event: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send every token to the ranks that hold its experts. Collective.

        Args:
            x: `[T, H]` bf16, fp16 or fp32, or `(data [T, H], scales [T, S])` of any dtypes. `T` may differ from
                rank to rank and be 0; strides are free.
            topk_idx: `[T, K]` int16, int32 or int64, experts `0 .. num_experts - 1`; -1 selects nothing.
                `None` exactly when `handle` is given.
            topk_weights: `[T, K]` fp32, fp16 or bf16, travels as fp32. All ranks give it, or none.
            cumulative_local_expert_recv_stats: `[E_local]` int32, to which the selections of each local expert
                are added, unless the call raises `CapacityError`.
            num_experts: experts over all ranks; by default the buffer's, or the handle's.
            num_max_tokens_per_rank: most tokens of a rank in this call, at most the buffer's.
            expert_alignment: each expert's rows are rounded up to a multiple of this (default 1, at most 65,536; the kernels
                take at most 128 in an expanded dispatch).
            num_sms: SMs to use, 0 for the buffer's choice.
            previous_event: wait for this instead of the current stream's work.
            async_with_compute_stream: leave it to `event` to make the current stream wait.
            allocate_on_comm_stream: outputs belong to the communication stream.
            handle: plan of an earlier dispatch of this buffer; replays it on a new `x` and skips counting.
            do_handle_copy: the handle keeps a copy of `topk_idx`, rather than the tensor itself.
            do_cpu_sync: outputs have exactly the rows received (default), else as many as there can be at most,
                and the count is on the device. Cannot be `True` with a handle, whose sizes are known.
            do_expand: one row per (token, expert), grouped by expert, rather than one per (token, rank).
            do_zero_padding: in the expanded layout, zero the gaps that alignment leaves.
            use_tma_aligned_col_major_sf: scales with stride `(1, rows rounded up to 16 bytes)`.

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, handle, event)`. Rank layout, rows ordered by (source
            rank, source token): `recv_x` `[N, H]` or `(data, scales)`; `recv_topk_idx` `[N, K]`, local experts
            or -1, in the dtype given; `recv_topk_weights` `[N, K]` fp32, all of the token's weights, or `None`.
            Expanded layout: `recv_x` `[rows, H]`, `None`, `[rows]` fp32 or `None`. Without host synchronisation
            the tail of `recv_topk_idx` is -1 and that of the weights 0.

        Raises:
            ArgumentError: an argument is wrong; nothing has moved.
            RoutingError: `topk_idx` is out of range. On CUDA it is seen late, and such entries select nothing.
            CapacityError: a rank receives more expanded rows than it holds; all ranks raise it.
            StaleHandleError: `handle` is of another buffer.
            DisagreementError: the ranks make different calls.
            PeerTimeoutError: a rank did not come.
            CaptureError: host synchronisation was asked for during graph capture.
        """

        def build() -> DispatchRequest:
            plan = None if handle is None else check.check_handle(handle, self._id)
            self._check_dispatch_mode(topk_idx, plan, do_cpu_sync, do_expand)
            experts, tokens, alignment = self._sizes(plan, num_experts, num_max_tokens_per_rank, expert_alignment)
            rows = check.check_payload(x, self.config, tokens, self.device)
            num_tokens = (rows[0] if isinstance(rows, tuple) else rows).shape[0]
            idx = None
            if plan is None:
                idx = check.check_topk_idx(topk_idx, num_tokens, self.config.num_topk or MAX_TOPK, experts, self.device)
                num_topk = idx.shape[1]
            else:
                planned, num_topk = plan.topk_idx.shape
                if num_tokens != planned:
                    raise ArgumentError("x", f"{num_tokens} tokens", f"{planned} tokens, as in the handle")
            words = f"[num_tokens={num_tokens}, num_topk={num_topk}]"
            num_local = ExpertPartition(experts, self.num_ranks).num_local(self.rank)
            weights = check.check_weights(topk_weights, (num_tokens, num_topk), self.device, words)
            return DispatchRequest(
                x=rows,
                topk_idx=idx,
                topk_weights=weights,
                handle=plan,
                stats=check.check_stats(cumulative_local_expert_recv_stats, num_local, self.device),
                num_experts=experts,
                num_max_tokens_per_rank=tokens,
                expert_alignment=alignment,
                num_sms=check.check_int("num_sms", num_sms, 0) or self._num_sms,
                do_handle_copy=do_handle_copy,
                do_cpu_sync=plan is None and do_cpu_sync is not False,
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
                streams=StreamOptions(
                    previous_event,
                    async_with_compute_stream,
                    allocate_on_comm_stream,
                    _any_new((*_parts(rows), idx, weights), (*_parts(x), topk_idx, topk_weights)),
                ),
            )

        backend = self._usable()
        request = self._prepare(backend, "dispatch", build, _dispatch_facts)
        result = self._guarded(lambda: backend.dispatch(request))
        result.handle.buffer_id = self._id
        parts = _parts(request.x)
        self._last = result.handle, sum(part.shape[1] * part.element_size() for part in parts)
        return result.recv_x, result.recv_topk_idx, result.recv_topk_weights, result.handle, result.event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        *,
        apply_weights: bool = False,
        previous_event: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring one row per received row back to its token and sum. Collective.

        Sums are in fp32, first the biases, then the ranks in the order in which the token's `topk_idx` names
        them, rounded once to the dtype of `x`. From an expanded dispatch each rank first sums its rows of a
        token, `k` ascending, in fp32, and rounds that sum to the dtype of `x`.

        Args:
            x: expert outputs, `[N, H]` bf16, fp16 or fp32: one row for each row of the dispatch that made
                `handle`. `H` may differ from that of the dispatch.
            handle: plan of a dispatch of this buffer.
            topk_weights: received weights to bring back, `[N, K]`, or `[rows]` for an expanded plan.
            bias: none, one, or a tuple of at most two `[T, H]` in the dtype of `x`.
            num_sms: SMs to use, 0 for those of the dispatch.
            apply_weights: multiply every expanded row by its `topk_weights` (in fp32) before summing.
            previous_event, async_with_compute_stream, allocate_on_comm_stream: as in `dispatch`.

        Returns:
            `(combined_x, combined_topk_weights, event)`: `[T, H]` in the dtype of `x`; `[T, K]` fp32 with 0
            where nothing was selected, or `None`. A token without any selection gets its bias, or zero.

        Raises:
            ArgumentError: an argument is wrong; nothing has moved.
            StaleHandleError: `handle` is of another buffer.
            CapacityError: the dispatch overflowed, and did not synchronise with the host.
            DisagreementError: the ranks make different calls.
            PeerTimeoutError: a rank did not come.
        """

        def build() -> CombineRequest:
            plan = check.check_handle(handle, self._id)
            if apply_weights and not plan.do_expand:
                raise ArgumentError(
                    "apply_weights", True, "False for a rank-layout handle", "Dispatch with do_expand=True"
                )
            if apply_weights and topk_weights is None:
                raise ArgumentError("topk_weights", None, "the weights that apply_weights=True multiplies by")
            rows = check.check_expert_rows(x, plan, self.config, self.device)
            tokens, num_topk = plan.topk_idx.shape
            shape = (rows.shape[0],) if plan.do_expand else (rows.shape[0], num_topk)
            words = f"[rows={shape[0]}]" if plan.do_expand else f"[rows={shape[0]}, num_topk={num_topk}]"
            weights = check.check_weights(topk_weights, shape, self.device, words)
            biases = check.check_bias(bias, tokens, rows)
            return CombineRequest(
                x=rows,
                handle=plan,
                topk_weights=weights,
                bias=biases,
                apply_weights=apply_weights,
                num_sms=check.check_int("num_sms", num_sms, 0) or plan.num_sms,
                streams=StreamOptions(
                    previous_event,
                    async_with_compute_stream,
                    allocate_on_comm_stream,
                    _any_new((rows, weights, *biases), (x, topk_weights, *_parts(bias))),
                ),
            )

        backend = self._usable()
        request = self._prepare(backend, "combine", build, _combine_facts)
        result = self._guarded(lambda: backend.combine(request))
        return result.combined_x, result.combined_topk_weights, result.event

    def barrier(self) -> None:
        """Wait until every rank has called it. Collective.

        Raises:
            PeerTimeoutError: a rank did not come.
        """
        self._guarded(self._usable().barrier)

    def reset(self) -> None:
        """Make the buffer usable again after a `PeerTimeoutError`. Collective: every rank calls it equally often."""
        backend = self._alive()
        self._guarded(backend.reset)
        self._broken = None

    # ------------------------------------------------------------ local

    def combine_input(self, handle: EPHandle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory for the expert outputs of `handle`, which `combine` reads in place where the backend can.

        Args:
            dtype: bf16, fp16 or fp32, at most as wide as the buffer's, which is the default.

        Returns:
            `[rows of the handle's layout, hidden]`, uninitialised. An expanded plan is read in place where no token has two
            rows on this rank.

        Raises:
            PeerTimeoutError: a peer has not read what the last combine left in this memory. If no dispatch came since that
                combine, this waits for the peers, blocking the host.
            CaptureError: it would have to wait during graph capture.
        """
        plan = check.check_handle(handle, self._id)
        kind = self.config.dtype if dtype is None else dtype
        if kind not in check.ROW_DTYPES or kind.itemsize > self.config.dtype.itemsize:
            raise ArgumentError(
                "dtype", kind, f"bf16, fp16 or fp32, at most as wide as the Buffer's {self.config.dtype}"
            )
        return self._usable().combine_input(plan, kind)

    def traffic(self) -> Traffic:
        """What the last dispatch moved. Local; reads counts from the device.

        Raises:
            ArgumentError: nothing has been dispatched yet.
        """
        if self._last is None:
            raise ArgumentError("traffic", "no dispatch", "at least one dispatch on this Buffer")
        return _traffic(*self._last)

    def destroy(self) -> None:
        """Give everything back. Local, idempotent, and safe after the process group is gone."""
        backend, self._backend = self._backend, None
        self._last = None
        if backend is not None:
            backend.destroy()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | int | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        *,
        num_experts: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        max_scale_bytes: int | None = None,
        expand_factor: float = 2.0,
        num_slots: int = 2,
    ) -> int:
        """Symmetric memory that a buffer of these sizes takes per rank, in bytes. Local, and allocates nothing.

        Args:
            group: the group, or just how many ranks it has.
            num_topk: 0 leaves out the room that the expanded layout needs beyond the rank layout.
            num_experts: 0 counts one per rank.
            num_max_tokens_per_rank, hidden, use_fp8_dispatch, dtype, max_scale_bytes, expand_factor, num_slots: as
                in `Buffer`.

        Raises:
            ArgumentError: an argument is out of range.
        """
        num_ranks = (
            check.check_int("group", group, 1) if isinstance(group, int) else settings.resolve_group(group).size()
        )
        limits = settings.make_config(
            num_ranks,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            max_scale_bytes=max_scale_bytes,
            expand_factor=expand_factor,
            num_slots=num_slots,
            pipeline_depth=0,
            timeout_s=settings.DEFAULT_TIMEOUT_S,
        )
        return settings.size_of(limits, num_ranks, limits.num_max_tokens_per_rank)

    # ------------------------------------------------------------ inside

    def _check_dispatch_mode(
        self, topk_idx: object, handle: EPHandle | None, do_cpu_sync: bool | None, do_expand: bool
    ) -> None:
        if handle is None and topk_idx is None:
            raise ArgumentError("topk_idx", None, "the routing, or the handle of an earlier dispatch")
        if handle is not None and topk_idx is not None:
            raise ArgumentError("topk_idx", check.describe(topk_idx), "None, since handle is given and brings its own")
        if handle is not None and do_cpu_sync:
            raise ArgumentError("do_cpu_sync", True, "None or False with a handle, whose sizes are known")
        if handle is not None and do_expand and not handle.do_expand:
            raise ArgumentError(
                "do_expand",
                True,
                "False, since the handle comes from a rank-layout dispatch",
                "Make the handle with do_expand=True",
            )
        syncs = handle is None and do_cpu_sync is not False
        if syncs and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "do_cpu_sync: host synchronisation cannot be captured in a CUDA graph. Pass do_cpu_sync=False"
            )

    def _sizes(
        self, handle: EPHandle | None, num_experts: int | None, num_max_tokens: int | None, alignment: int | None
    ) -> tuple[int, int, int]:
        """Experts, most tokens per rank and alignment of a dispatch: from its arguments, the handle or the buffer."""
        if handle is not None:
            check.check_matches_handle("num_experts", num_experts, handle.num_experts)
            check.check_matches_handle("num_max_tokens_per_rank", num_max_tokens, handle.num_max_tokens_per_rank)
            check.check_matches_handle("expert_alignment", alignment, handle.expert_alignment)
            return handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment
        if num_experts is None and not self.config.num_experts:
            raise ArgumentError("num_experts", None, "the number of experts, here or when the Buffer is built")
        return (
            check.check_num_experts(
                self.config.num_experts if num_experts is None else num_experts, self.num_ranks, self.config.num_experts
            ),
            self.config.num_max_tokens_per_rank
            if num_max_tokens is None
            else check.check_int(
                "num_max_tokens_per_rank",
                num_max_tokens,
                1,
                self.config.num_max_tokens_per_rank,
                "The Buffer's own num_max_tokens_per_rank is the limit",
            ),
            1 if alignment is None else check.check_int("expert_alignment", alignment, 1, _MOST_ALIGNED),
        )

    def _alive(self) -> Backend:
        if self._backend is None:
            raise DestroyedError("the Buffer was destroyed. Build a new one")
        return self._backend

    def _usable(self) -> Backend:
        backend = self._alive()
        if self._broken is not None:
            raise DestroyedError(
                f"the Buffer is unusable since a peer failed it ({self._broken}). Call reset() on every rank first"
            ) from self._broken
        return backend

    def _guarded(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except PeerTimeoutError as error:
            self._broken = error
            raise

    def _prepare(
        self, backend: Backend, name: str, build: Callable[[], Request], facts: Callable[[Request], dict[str, object]]
    ) -> Request:
        """Validate locally. With `TILE_EP_DEBUG=1` also let all ranks know, so that none is left waiting."""
        if not self._debug:
            return build()
        request: Request | None = None
        problem: Exception | None = None
        try:
            request = build()
        except Exception as error:
            problem = error
        said: dict[str, object] = {"arguments": "valid" if problem is None else f"{type(problem).__name__}: {problem}"}
        if request is not None:
            said.update({"call": name, **facts(request)})
        try:
            self._guarded(lambda: backend.agree(said))
        except DisagreementError as disagreement:
            if problem is None:
                raise
            raise problem from disagreement
        if problem is not None:
            raise problem
        assert request is not None
        return request


def _parts(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _any_new(used: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Whether a tensor is none of those that were given: it has been converted."""
    return any(tensor is not None and all(tensor is not other for other in given) for tensor in used)


# ---------------------------------------------------------------- what ranks compare


def _dispatch_facts(request: DispatchRequest) -> dict[str, object]:
    data, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
    handle = request.handle
    routing = request.topk_idx if handle is None else handle.topk_idx
    assert routing is not None
    return {
        "handle given": handle is not None,
        "num_experts": request.num_experts,
        "num_topk": routing.shape[1],
        "num_max_tokens_per_rank": request.num_max_tokens_per_rank,
        "expert_alignment": request.expert_alignment,
        "dtype of x": str(data.dtype),
        "bytes of data per row": data.shape[1] * data.element_size(),
        "dtype of scales": None if scales is None else str(scales.dtype),
        "bytes of scales per row": None if scales is None else scales.shape[1] * scales.element_size(),
        "topk_weights given": request.topk_weights is not None,
        "do_expand": request.do_expand,
        "do_cpu_sync": request.do_cpu_sync,
    }


def _combine_facts(request: CombineRequest) -> dict[str, object]:
    return {
        "handle.do_expand": request.handle.do_expand,
        "num_experts": request.handle.num_experts,
        "num_topk": request.handle.topk_idx.shape[1],
        "num_max_tokens_per_rank": request.handle.num_max_tokens_per_rank,
        "dtype of x": str(request.x.dtype),
        "bytes of data per row": request.x.shape[1] * request.x.element_size(),
        "topk_weights given": request.topk_weights is not None,
        "apply_weights": request.apply_weights,
    }


def _agree_on_construction(
    group: dist.ProcessGroup, build: Callable[[], tuple[BufferConfig, torch.device, str, int]]
) -> tuple[BufferConfig, torch.device, str, int, str, dict[int, str]]:
    """Let all ranks compare what they are building. A rank whose arguments are wrong takes part too.

    Returns:
        What `build` returned, then a name for the buffer and, by rank, why `nvlink` cannot be used.
    """
    built, problem = None, None
    said: dict[str, object] = {"arguments": "valid"}
    try:
        built = build()
        config, device, choice, _ = built
        said.update(_construction_facts(config), backend=choice, TILE_EP_DEBUG=settings.debug_enabled())
        said["device type"] = device.type
        obstacle = None if choice == "collective" else _nvlink_obstacle(group, device)
    except Exception as error:
        problem, obstacle = error, None
        said = {"arguments": f"{type(error).__name__}: {error}"}
    mine = {"said": said, "name": uuid.uuid4().hex, "obstacle": obstacle}
    everyone = _gather_objects(group, mine, built[1] if built else None)
    if problem is not None:
        raise problem
    assert built is not None
    for key in ("arguments", *said):
        values = [of_rank["said"].get(key) for of_rank in everyone]
        if any(value != values[0] for value in values):
            raise DisagreementError(key, values)
    obstacles = {rank: of_rank["obstacle"] for rank, of_rank in enumerate(everyone) if of_rank["obstacle"]}
    return *built, everyone[0]["name"], obstacles


def _construction_facts(config: BufferConfig) -> dict[str, object]:
    return {
        "num_max_tokens_per_rank": config.num_max_tokens_per_rank,
        "hidden": config.hidden,
        "num_topk": config.num_topk,
        "num_experts": config.num_experts,
        "dtype": str(config.dtype),
        "max_scale_bytes": config.max_scale_bytes,
        "expand_factor": config.expand_factor,
        "num_slots": config.num_slots,
    }


def _gather_objects(group: dist.ProcessGroup, mine: object, device: torch.device | None) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    started = time.monotonic()
    try:
        with _current(device):
            dist.all_gather_object(everyone, mine, group)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        waited = round(time.monotonic() - started, 2)
        raise PeerTimeoutError(group.rank(), "build the Buffer", [], None, waited) from error
    return everyone


# ---------------------------------------------------------------- which backend


def _nvlink_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why this rank cannot use the `nvlink` backend. Local, and imports it only where it might work."""
    if device.type != "cuda":
        return "its device is a CPU"
    try:
        if importlib.util.find_spec("tilelang") is None:
            return "tilelang is not installed (pip install tilelang)"
        importlib.import_module("tile_ep.backends.nvlink")
        world = importlib.import_module("tile_ep.worlds.process_group")
    except (ImportError, BackendUnavailableError) as error:
        return f"the backend cannot be imported ({error})"
    with _current(device):
        reason: str | None = world.unavailable_reason(group)
    return reason


def _current(device: torch.device | None) -> AbstractContextManager[object]:
    """Make a CUDA device the current one; nothing on CPUs."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()


# ---------------------------------------------------------------- figures


def _traffic(handle: EPHandle, row_bytes: int) -> Traffic:
    partition = ExpertPartition(handle.num_experts, handle.num_ranks)
    ends = handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
    selected = handle.dst_buffer_slot_idx.ge(0).cpu()
    experts = handle.topk_idx.cpu().to(torch.int64)
    rows, selections = [], []
    for rank in range(handle.num_ranks):
        here = selected & (experts >= partition.first(rank)) & (experts < partition.first(rank + 1))
        rows.append(int(here.any(dim=1).sum()))
        selections.append(int(here.sum()))
    received = [end - start for start, end in zip([0, *ends][:-1], ends, strict=True)]
    return Traffic(handle.rank, rows, received, selections, row_bytes)
