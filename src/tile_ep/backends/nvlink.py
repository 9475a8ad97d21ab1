"""The kernels over peer memory, behind the interface of a backend."""

from __future__ import annotations

import functools
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tile_ep.backends.base import (
    BufferConfig,
    CombineRequest,
    CombineResult,
    DispatchRequest,
    DispatchResult,
    Payload,
    StreamOptions,
    column_major,
)
from tile_ep.errors import (
    ArgumentError,
    CapacityError,
    CaptureError,
    DisagreementError,
    PeerTimeoutError,
    RoutingError,
    StaleHandleError,
)
from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle
from tile_ep.kernels import combine as combine_kernel
from tile_ep.kernels import dispatch as dispatch_kernel
from tile_ep.kernels.combine import CombineSpec
from tile_ep.kernels.dispatch import DispatchSpec
from tile_ep.layout import (
    MAX_BLOCKS,
    ExpertPartition,
    align,
    expand_factor_for,
    expanded_capacity,
    rank_capacity,
    region_layout,
)
from tile_ep.worlds.base import World

_PHASES = {**dispatch_kernel.PHASES, **combine_kernel.PHASES}
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_DEFAULT_MAX_EXPERTS = 1024
_MOST_AHEAD = 1 << 16  # collectives, as in the kernels' `ep_has_come`
_OVERFLOWS_KEPT = 256  # dispatches whose overflow the host can look up without asking the device


@dataclass(frozen=True)
class _Plan:
    """What only these kernels read of a handle."""

    sources: torch.Tensor  # [T, K] int32
    counts: (
        torch.Tensor
    )  # int32: psum over ranks [R], psum over experts [E_local], real counts [E_local], rows needed [R]
    src_metadata: torch.Tensor  # [rows, 2] int32
    row_metadata: torch.Tensor | None  # [rows, K] int32, expanded plans: the rows of each received token
    exact: bool  # the host knows the number of rows
    one_row_each: bool = False  # expanded: no token has two rows on this rank, for all the host knows
    serial: int = -1  # expanded without host synchronisation: number among such dispatches


class _Handle(EPHandle):
    """A handle whose source metadata is put together when somebody asks."""

    @property
    def recv_src_metadata(self) -> torch.Tensor:  # type: ignore[override]
        source = self.plan.src_metadata[: self.num_recv_tokens]
        rows = self.plan.row_metadata
        rest = source.new_full((source.shape[0], self.topk_idx.shape[1]), -1) if rows is None else rows[: len(source)]
        return torch.cat([source, rest], dim=1)

    @recv_src_metadata.setter
    def recv_src_metadata(self, value: torch.Tensor) -> None:
        pass


def _present(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


class _Slots:
    """Which receive slots are free. A slot is taken while any tensor over it is alive."""

    def __init__(self, number: int) -> None:
        self._leases: list[weakref.ref[Any] | None] = [None] * number
        self._next = 0
        self._captured: set[int] = set()

    def _is_free(self, slot: int) -> bool:
        lease = self._leases[slot]
        return lease is None or lease() is None

    def take(self) -> int:
        """A free slot, in turn. There is always one: see `may_keep`."""
        for _ in self._leases:
            slot = self._next
            self._next = (self._next + 1) % len(self._leases)
            if self._is_free(slot):
                return slot
        raise AssertionError("every receive slot is leased")

    def may_keep(self, slot: int, capturing: bool) -> bool:
        """Whether another slot stays free for the next dispatch if this one is handed out. A slot in which the dispatch of a
        captured graph lands is overwritten by each replay: from then on it is handed out to captured dispatches only.
        """
        if capturing:
            self._captured.add(slot)
        elif slot in self._captured:
            return False
        return any(self._is_free(other) for other in range(len(self._leases)) if other != slot)

    def keep(self, slot: int, lease: weakref.ref[Any]) -> None:
        self._leases[slot] = lease


class NvlinkBackend:
    """Dispatch and combine by the project's kernels, in the rank layout.

    A dispatch lands in a receive slot; what it returns are views of the slot while another slot is free for the next
    dispatch to land in, and copies where not. So a result is never overwritten while anything refers to it.
    """

    name = "nvlink"

    def __init__(self, world: World, config: BufferConfig) -> None:
        self.world, self.config = world, config
        self.rank, self.num_ranks, self.device = world.rank, world.num_ranks, world.device
        self._max_experts = max(config.num_experts or _DEFAULT_MAX_EXPERTS, world.num_ranks)
        self._layout = region_layout(
            world.num_ranks,
            config.num_max_tokens_per_rank,
            config.hidden * config.dtype.itemsize,
            config.max_scale_bytes,
            config.num_topk,
            self._max_experts,
            config.expand_factor,
            config.num_slots,
        )
        self.num_bytes = self._layout.allocation
        world.allocate(self.num_bytes)
        self._slots = _Slots(config.num_slots)
        self._status = world.host_words(world.num_ranks)
        self._host = world.host_words(
            2 + ExpertPartition(self._max_experts, world.num_ranks).num_local(0) + world.num_ranks
        )
        self._overflow = world.host_words(_OVERFLOWS_KEPT * world.num_ranks).view(_OVERFLOWS_KEPT, world.num_ranks)
        self._num_unsynchronised = 0
        self._status_view, self._host_view = self._status.numpy(), self._host.numpy()
        self._overflow_view = self._overflow.numpy()
        self._input: tuple[weakref.ref[EPHandle], weakref.ref[Any]] | None = None
        self._read_since_combine = True
        self._input_free: EventOverlap | None = None
        self._destroyed = False

    @classmethod
    def from_process_group(cls, group: dist.ProcessGroup, config: BufferConfig, device: torch.device) -> NvlinkBackend:
        """One rank a process, memory from torch symmetric memory. Collective."""
        from tile_ep.worlds.process_group import ProcessGroupWorld

        return cls(ProcessGroupWorld(group, device), config)

    # ------------------------------------------------------------ dispatch

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """See `Buffer.dispatch`."""
        self._check_status()
        world, handle = self.world, request.handle
        data, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
        topk_idx = request.topk_idx if handle is None else handle.topk_idx
        assert topk_idx is not None
        (num_tokens, num_topk), partition = topk_idx.shape, ExpertPartition(request.num_experts, self.num_ranks)
        num_local = partition.num_local(self.rank)
        capacity = rank_capacity(self.num_ranks, request.num_max_tokens_per_rank)
        num_blocks = self._num_blocks(request.num_sms)
        exact = request.do_cpu_sync if handle is None else handle.plan.exact
        spec = self._dispatch_spec(request, data, scales, topk_idx, exact, num_blocks)
        larger, smaller = 0, 0  # expanded rows of the first rank, which has most experts, and of the last
        if request.do_expand:
            larger, smaller = (self._expanded_capacity(request, topk_idx, at) for at in (0, self.num_ranks - 1))
        self._check_room(request, spec, larger)
        # Memory of the current stream may still be in use there by what was queued after the event.
        on_comm = request.streams.allocate_on_comm_stream or request.streams.previous_event is not None

        world.bound_run_ahead(self.config.pipeline_depth)
        world.begin(request.streams)
        kept_idx = topk_idx
        if handle is None:
            if request.do_handle_copy:
                kept_idx = world.empty((num_tokens, num_topk), topk_idx.dtype, on_comm)
            rows = world.empty((num_tokens, num_topk), torch.int32, on_comm)
            expanded_rows, row_metadata = None, None
            if request.do_expand:
                expanded_rows = world.empty((num_tokens, num_topk), torch.int32, on_comm)
                row_metadata = world.empty((capacity, num_topk), torch.int32, on_comm)
            serial = -1
            if request.do_expand and not request.do_cpu_sync:
                serial = self._num_unsynchronised
                self._num_unsynchronised += 1
                self._overflow_view[serial % _OVERFLOWS_KEPT] = 0
            plan = _Plan(
                sources=world.empty((num_tokens, num_topk), torch.int32, on_comm),
                counts=world.empty((2 * self.num_ranks + 2 * num_local,), torch.int32, on_comm),
                src_metadata=world.empty((capacity, 2), torch.int32, on_comm),
                row_metadata=row_metadata,
                exact=exact,
                serial=serial,
            )
        else:
            rows, expanded_rows, plan = handle.dst_buffer_slot_idx, handle.dst_expanded_idx, handle.plan
        slot = self._slots.take()
        layout = self._layout.slot
        if request.do_cpu_sync:
            self._host_view[:] = 0
        world.launch(
            spec,
            num_blocks,
            {
                "region": world.base,
                "topk_idx": topk_idx,
                "idx_copy": kept_idx,
                "topk_weights": request.topk_weights,
                "x": data,
                "x_scales": scales,
                "rows": rows,
                "sources": plan.sources,
                "expanded_rows": expanded_rows,
                "counts": plan.counts,
                "src_metadata": plan.src_metadata,
                "row_metadata": plan.row_metadata,
                "stats": request.stats,
                "host": self._host,
                "overflow": self._overflow[plan.serial % _OVERFLOWS_KEPT],
                "status": self._status,
                "rank": self.rank,
                "num_tokens": num_tokens,
                "max_tokens": request.num_max_tokens_per_rank,
                "alignment": request.expert_alignment,
                "larger_rows": larger,
                "smaller_rows": smaller,
                "slot": slot,
                "slots_at": self._layout.slots,
                "slot_bytes": layout.num_bytes,
                "scales_at": layout.scales,
                "idx_at": layout.topk_idx,
                "weights_at": layout.topk_weights,
                "source_at": layout.source,
                "timeout_ns": self._timeout_ns,
                "num_blocks": num_blocks,
            },
        )
        num_rows = capacity
        num_expanded = self._expanded_capacity(request, topk_idx, self.rank) if request.do_expand else 0
        expert_counts: list[int] = []
        if handle is not None:
            num_rows, num_expanded = handle.num_recv_tokens, handle.num_expanded_tokens
        elif request.do_cpu_sync:
            num_rows, expert_counts, needed = self._wait_host_counts(num_local, request)
            if request.do_expand:
                error = self._capacity_error(
                    needed,
                    request.num_experts,
                    request.num_max_tokens_per_rank,
                    num_topk,
                    request.expert_alignment,
                )
                if error is not None:
                    world.synchronize()
                    raise error
                num_expanded = needed[self.rank]

        received = self._received(
            slot, request, data, scales, topk_idx, num_expanded if request.do_expand else num_rows
        )
        touched = (data, scales, topk_idx, kept_idx, request.topk_weights, request.stats, rows, expanded_rows)
        kept = (plan.sources, plan.counts, plan.src_metadata, plan.row_metadata)
        event = world.end(request.streams.async_with_compute_stream, _present(*touched, *kept))
        if not self._read_since_combine:
            self._read_since_combine, self._input_free = True, event
        if handle is None:
            if request.do_expand:
                alone = sum(expert_counts) == num_rows if request.do_cpu_sync else num_topk == 1
                plan = replace(plan, one_row_each=alone)
            ranks, experts = self.num_ranks, self.num_ranks + num_local
            handle = _Handle(
                do_expand=request.do_expand,
                num_experts=request.num_experts,
                expert_alignment=request.expert_alignment,
                num_max_tokens_per_rank=request.num_max_tokens_per_rank,
                num_sms=num_blocks,
                topk_idx=kept_idx,
                num_recv_tokens=num_rows,
                num_expanded_tokens=num_expanded,
                num_recv_tokens_per_expert_list=[align(n, request.expert_alignment) for n in expert_counts],
                psum_num_recv_tokens_per_scaleup_rank=plan.counts[:ranks],
                psum_num_recv_tokens_per_expert=plan.counts[ranks:experts],
                num_unaligned_recv_tokens_per_expert=plan.counts[experts : experts + num_local],
                recv_src_metadata=plan.src_metadata,
                dst_buffer_slot_idx=rows,
                dst_expanded_idx=expanded_rows,
                num_rows_needed=plan.counts[experts + num_local :] if request.do_expand else None,
                rank=self.rank,
                num_ranks=self.num_ranks,
                plan=plan,
            )
        recv_x, recv_topk_idx, recv_topk_weights = received
        return DispatchResult(recv_x, recv_topk_idx, recv_topk_weights, handle, event)

    def _dispatch_spec(
        self,
        request: DispatchRequest,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        exact: bool,
        num_blocks: int,
    ) -> DispatchSpec:
        cached = request.handle is not None
        data_bytes = data.shape[1] * data.element_size()
        tuning = self.world.tuning
        few = not cached and topk_idx.numel() <= tuning.few
        shape = tuning.shape(tuning.expanded if request.do_expand else tuning.dispatch, data_bytes)
        return DispatchSpec(
            num_ranks=self.num_ranks,
            num_experts=request.num_experts,
            num_topk=topk_idx.shape[1],
            max_experts=self._max_experts,
            index_dtype=str(topk_idx.dtype).removeprefix("torch."),
            data_bytes=data_bytes,
            scale_bytes=0 if scales is None else scales.shape[1] * scales.element_size(),
            has_weights=request.topk_weights is not None,
            has_stats=request.stats is not None,
            copies_idx=request.do_handle_copy and not cached,
            cached=cached,
            expanded=request.do_expand,
            zero_gaps=request.do_expand and request.do_zero_padding,
            fill_tail=not exact,
            host_counts=request.do_cpu_sync,
            few=tuning.few if few else 0,
            bulk=not tuning.by_warp and data_bytes % 16 == 0 and data.data_ptr() % 16 == 0,
            num_warps=shape.num_warps,
            chunk_bytes=shape.chunk_bytes,
            depth=shape.depth,
            cluster=self._cluster(num_blocks, request.streams),
        )

    def _received(
        self,
        slot: int,
        request: DispatchRequest,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        num_rows: int,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None]:
        """The received rows, as views of the slot where it may be kept."""
        layout = self._layout.slot
        memory, lease = self.world.lease(self._layout.slots + slot * layout.num_bytes, layout.num_bytes)

        def rows(offset: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            num_bytes = num_rows * width * dtype.itemsize
            return memory[offset : offset + num_bytes].view(dtype).view(num_rows, width)

        recv_data = rows(layout.data, data.shape[1], data.dtype)
        recv_scales = None if scales is None else rows(layout.scales, scales.shape[1], scales.dtype)
        recv_idx = None if request.do_expand else rows(layout.topk_idx, topk_idx.shape[1], topk_idx.dtype)
        recv_weights = None
        if request.topk_weights is not None:
            recv_weights = rows(layout.topk_weights, 1 if request.do_expand else topk_idx.shape[1], torch.float32)
            recv_weights = recv_weights[:, 0] if request.do_expand else recv_weights
        after = self.world.after
        columns = request.use_tma_aligned_col_major_sf
        if recv_scales is not None and columns:
            recv_scales = after(functools.partial(column_major, recv_scales))
        if self._slots.may_keep(slot, self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._slots.keep(slot, lease)
        else:
            recv_data = after(recv_data.clone)
            recv_idx = None if recv_idx is None else after(recv_idx.clone)
            recv_weights = None if recv_weights is None else after(recv_weights.clone)
            recv_scales = recv_scales if recv_scales is None or columns else after(recv_scales.clone)
        return (recv_data if recv_scales is None else (recv_data, recv_scales)), recv_idx, recv_weights

    def _wait_host_counts(self, num_local: int, request: DispatchRequest) -> tuple[int, list[int], list[int]]:
        """The number of rows, each local expert's selections, and, expanded, the rows that each rank needs, once the kernel
        has told them.
        """
        words = self._host_view[: 2 + num_local + (self.num_ranks if request.do_expand else 0)]
        deadline = time.monotonic() + self.config.timeout_s + 60.0
        while not words.all():
            self._check_status()
            if time.monotonic() > deadline:
                raise PeerTimeoutError(self.rank, "dispatch launch", [], None, self.config.timeout_s)
            self.world.pause()
        values = [int(word) & 0xFFFFFFFF for word in words]
        if values[1 + num_local]:
            self.world.synchronize()
            raise RoutingError(values[1 + num_local], request.num_experts)
        return values[0], values[1 : 1 + num_local], values[2 + num_local :]

    def _expanded_capacity(self, request: DispatchRequest, topk_idx: torch.Tensor, rank: int) -> int:
        return expanded_capacity(
            ExpertPartition(request.num_experts, self.num_ranks),
            rank,
            request.num_max_tokens_per_rank,
            topk_idx.shape[1],
            request.expert_alignment,
            self.config.expand_factor,
        )

    def _capacity_error(
        self, needed: list[int], num_experts: int, num_max_tokens: int, num_topk: int, alignment: int
    ) -> CapacityError | None:
        """For the ranks that hold fewer rows than they need, if any. `needed`: by rank."""
        partition, factor = ExpertPartition(num_experts, self.num_ranks), self.config.expand_factor
        sizes = num_max_tokens, num_topk, alignment
        capacity = {rank: expanded_capacity(partition, rank, *sizes, factor) for rank in range(self.num_ranks)}
        over = {rank: rows for rank, rows in enumerate(needed) if rows > capacity[rank]}
        if not over:
            return None
        return CapacityError(
            over,
            {rank: capacity[rank] for rank in over},
            factor,
            max(expand_factor_for(partition, rank, *sizes, rows) for rank, rows in over.items()),
        )

    def _check_room(self, request: DispatchRequest, spec: DispatchSpec, most: int) -> None:
        """The buffer's memory was sized for its own `num_experts` and `num_topk`, and alignments up to 128; that of a block for
        some thousand experts.
        """
        if spec.shared_bytes > dispatch_kernel.MOST_SHARED_BYTES:
            raise ArgumentError(
                "num_experts",
                request.num_experts,
                f"at most as many as the tables of a block have room for, {dispatch_kernel.MOST_SHARED_BYTES} bytes",
            )
        if request.num_experts > self._max_experts:
            raise ArgumentError("num_experts", request.num_experts, f"at most {self._max_experts} on this Buffer")
        if most > self._layout.slot.rows:
            raise ArgumentError(
                "do_expand",
                f"a dispatch that may bring {most} rows",
                f"at most the {self._layout.slot.rows} rows that this Buffer has room for",
                "Build it with the num_topk and num_experts of its expanded dispatches, and align experts to at most 128",
            )

    def _check_overflow(self, handle: EPHandle) -> None:
        """Raise what the expanded dispatch of `handle`, without host synchronisation, has left behind."""
        serial = handle.plan.serial
        if serial < 0:
            return
        if self._num_unsynchronised - serial <= _OVERFLOWS_KEPT:
            needed = [int(word) & 0xFFFFFFFF for word in self._overflow_view[serial % _OVERFLOWS_KEPT]]
        else:
            assert handle.num_rows_needed is not None
            needed = handle.num_rows_needed.tolist()
        error = self._capacity_error(
            needed,
            handle.num_experts,
            handle.num_max_tokens_per_rank,
            handle.topk_idx.shape[1],
            handle.expert_alignment,
        )
        if error is not None:
            raise error

    # ------------------------------------------------------------ combine

    def combine(self, request: CombineRequest) -> CombineResult:
        """See `Buffer.combine`."""
        self._check_status()
        if request.handle.do_expand:
            self._check_overflow(request.handle)
        world, handle, x = self.world, request.handle, request.x
        plan: _Plan = handle.plan
        num_tokens, num_topk = handle.topk_idx.shape
        num_blocks = self._num_blocks(request.num_sms)
        # Memory of the current stream may still be in use there by what was queued after the event.
        on_comm = request.streams.allocate_on_comm_stream or request.streams.previous_event is not None
        staged = world.tuning.pushes or self._must_stage(x, handle)

        world.bound_run_ahead(self.config.pipeline_depth)
        world.begin(request.streams)
        if request.apply_weights and not staged:  # weights are applied on the way in
            x, staged = world.after(x.clone), True
        out = world.empty((num_tokens, x.shape[1]), x.dtype, on_comm)
        out_weights = None
        if request.topk_weights is not None:
            out_weights = world.empty((num_tokens, num_topk), torch.float32, on_comm)
        row_bytes = x.shape[1] * x.element_size()
        few = handle.topk_idx.numel() <= world.tuning.few
        shape = world.tuning.shape(world.tuning.combine_few if few else world.tuning.combine, row_bytes)
        touched = (out, *request.bias, *((x,) if staged else ()))
        spec = CombineSpec(
            num_ranks=self.num_ranks,
            num_experts=handle.num_experts,
            num_topk=num_topk,
            max_experts=self._max_experts,
            index_dtype=str(handle.topk_idx.dtype).removeprefix("torch."),
            dtype=_DTYPE_NAMES[x.dtype],
            hidden=x.shape[1],
            num_bias=len(request.bias),
            has_weights=out_weights is not None,
            staged=staged,
            pushed=world.tuning.pushes,
            expanded=handle.do_expand,
            apply_weights=request.apply_weights,
            bulk=row_bytes % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in touched),
            num_warps=shape.num_warps,
            chunk_bytes=shape.chunk_bytes,
            depth=shape.depth,
            cluster=self._cluster(num_blocks, request.streams),
        )
        bias = (*request.bias, None, None)[:2]
        world.launch(
            spec,
            num_blocks,
            {
                "region": world.base,
                "y": x,
                "y_weights": request.topk_weights,
                "bias_0": bias[0],
                "bias_1": bias[1],
                "topk_idx": handle.topk_idx,
                "rows": handle.dst_expanded_idx if handle.do_expand else handle.dst_buffer_slot_idx,
                "sources": handle.dst_buffer_slot_idx if spec.mixed else plan.sources,
                "counts": plan.counts,
                "src_metadata": plan.src_metadata,
                "row_metadata": plan.row_metadata,
                "out": out,
                "out_weights": out_weights,
                "status": self._status,
                "rank": self.rank,
                "num_tokens": num_tokens,
                "y_rows": x.shape[0],
                "capacity": self._layout.slot.rows
                if spec.mixed
                else rank_capacity(self.num_ranks, handle.num_max_tokens_per_rank),
                "rows_at": self._layout.combine_rows,
                "weights_at": self._layout.combine_weights,
                "timeout_ns": self._timeout_ns,
                "num_blocks": num_blocks,
            },
        )
        self._read_since_combine, self._input_free = False, None
        self._input = None
        touched = (x, request.topk_weights, *request.bias, handle.topk_idx, out, out_weights)
        kept = (handle.dst_buffer_slot_idx, handle.dst_expanded_idx, plan.sources, plan.counts)
        metadata = (plan.src_metadata, plan.row_metadata)
        event = world.end(request.streams.async_with_compute_stream, _present(*touched, *kept, *metadata))
        return CombineResult(out, out_weights, event)

    def combine_input(self, handle: EPHandle, dtype: torch.dtype) -> torch.Tensor:
        """`[N, hidden]`: this rank's combine rows themselves. The latest handle it was asked for owns them."""
        self._check_status()
        # Peers may still be reading what the last combine left here. A dispatch since then shows that they are done, once it is
        # through; without one, ask.
        if not self._read_since_combine:
            self._wait_until_read()
            self._read_since_combine = True
        if self._input_free is not None:
            self._input_free.current_stream_wait()
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        if self.world.tuning.pushes or (handle.do_expand and not handle.plan.one_row_each):
            # What crosses is pushed, or one sum per token and rank: nothing can be read in place.
            return self.world.empty((rows, self.config.hidden), dtype, False)
        memory, lease = self.world.lease(self._layout.combine_rows, rows * self.config.hidden * dtype.itemsize)
        self._input = weakref.ref(handle), lease
        return memory.view(dtype).view(rows, self.config.hidden)

    def _wait_until_read(self) -> None:
        """Until every peer has read what the last combine left in this rank's rows. Blocks the host; local."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "combine_input waits for the readers of the last combine if no dispatch came since, which cannot be captured. "
                "Dispatch first, or pass other memory to combine"
            )
        self.world.synchronize()
        self._check_status()
        control = self._layout.control
        deadline = time.monotonic() + self.config.timeout_s
        while True:
            numbers = [word >> 32 & 0xFFFFFFFF for word in self.world.words(control.read_done, self.num_ranks)]
            combines = numbers[self.rank]
            missing = [peer for peer, number in enumerate(numbers) if (number - combines) & 0xFFFFFFFF >= _MOST_AHEAD]
            if not missing:
                return
            if time.monotonic() > deadline:
                phase = _PHASES[combine_kernel.PHASE_REUSE]
                (dispatches,) = self.world.words(control.done + 8 * self.rank, 1)
                epoch = (dispatches >> 32) + combines & 0xFFFFFFFF  # that of the combine: no dispatch came since
                raise PeerTimeoutError(self.rank, phase, missing, epoch, self.config.timeout_s)
            self.world.pause()

    def _must_stage(self, x: torch.Tensor, handle: EPHandle) -> bool:
        """Whether `x` has to be copied into the combine rows.

        Raises:
            StaleHandleError: `x` lies in the combine rows, which have since been handed out for another handle.
        """
        start = self.world.base + self._layout.combine_rows
        if not start <= x.data_ptr() < start + self._layout.slot.rows * self._layout.slot.row_bytes:
            return True
        owner = None if self._input is None else self._input[0]()
        if owner is not handle or x.data_ptr() != start:
            raise StaleHandleError(
                "x: a view of the combine input that was handed out for another handle or already combined. "
                "Call combine_input(handle) again and write the rows into what it returns"
            )
        return False

    # ------------------------------------------------------------ the rest

    def barrier(self) -> None:
        """Every rank has come, and everything enqueued before has been done. Collective."""
        self.world.synchronize()
        self._check_status()
        self.world.gather(None)

    def agree(self, values: dict[str, object]) -> None:
        """Raise `DisagreementError` on every rank if the ranks gave different values for a name. Collective."""
        said = self.world.gather(values)
        for name in dict.fromkeys(name for one in said for name in one):
            column = [one.get(name) for one in said]
            if any(value != column[0] for value in column):
                raise DisagreementError(name, column)

    def reset(self) -> None:
        """After a `PeerTimeoutError`: every rank stops, clears its flags and starts counting anew. Collective."""
        self.world.synchronize()
        self.world.gather(None)
        self._status_view[:] = 0
        self._overflow_view[:] = 0
        self.world.zero(0, self._layout.control.num_bytes)
        self._read_since_combine, self._input_free = True, None
        self.world.gather(None)

    def destroy(self) -> None:
        """Give the memory back. Local, idempotent."""
        if not self._destroyed:
            self._destroyed = True
            self.world.destroy()

    @property
    def _timeout_ns(self) -> int:
        return int(self.config.timeout_s * 1e9)

    def _num_blocks(self, num_sms: int) -> int:
        most = min(self.world.max_blocks, MAX_BLOCKS)
        if num_sms > most:
            raise ArgumentError("num_sms", num_sms, f"at most {most} for each of the ranks on this device")
        return num_sms or min(self.world.tuning.default_sms, most)

    def _cluster(self, num_blocks: int, streams: StreamOptions) -> int:
        """Blocks of a cluster. 1 where other ranks of this device, with blocks that stand alone on one SM of a pair, might
        leave too few pairs: their collective and this one wait for each other.
        """
        world = self.world
        cluster = world.tuning.cluster if streams.async_with_compute_stream else 1
        pairs_taken = (world.ranks_on_device - 1) * num_blocks
        finds_room = cluster * pairs_taken + num_blocks <= world.max_blocks * world.ranks_on_device
        return cluster if finds_room and num_blocks % cluster == 0 else 1

    def _check_status(self) -> None:
        """Raise what a kernel's expired wait has left behind."""
        if self._status_view.any():
            peers = [peer for peer, word in enumerate(self._status_view) if word]
            word = int(self._status_view[peers[0]])
            phase = _PHASES.get(word & 0xFFFFFFFF, "unknown")
            raise PeerTimeoutError(self.rank, phase, peers, (word >> 32) & 0xFFFFFFFF, self.config.timeout_s)
