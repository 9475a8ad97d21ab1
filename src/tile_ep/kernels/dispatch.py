"""Dispatch: one launch that counts, exchanges counts, scatters rows to their final index, finishes.

Data flow of one block on rank `rank` (`d` a destination, `s` a source)::

    topk_idx -> tallies[block, d], row numbers within the block            1. count
    tallies  -> words at every peer; words of every peer -> base[warp, d]  2. exchange
    x        -> shared memory -> slot of d, row base[warp, d] + number     3. scatter
    done word at every peer; done words of every peer                      4. announce, finish

In the expanded layout a row has one place per selection, in the segment of its expert; every rank derives where the segments
start from everybody's counts. A cached dispatch takes its rows from the handle and exchanges entry words alone. Where there
are few tokens, every block counts all of them, keeps their row numbers in its shared memory, and waits for no other block.

Conditions below never read memory that their own body changes: TileLang distributes an `if` over the statements in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from tile_ep.kernels import counting, scattering
from tile_ep.kernels import primitives as ep
from tile_ep.kernels.spec import Spec
from tile_ep.layout import ROW_ALIGNMENT, align, ceil_div

MOST_SHARED_BYTES = 48 * 1024
"""Of tables: what CUDA gives a block without being asked."""

PHASES = {
    counting.PHASE_ENTRY: "dispatch entry",
    counting.PHASE_COUNTS: "dispatch counts",
    scattering.PHASE_DONE: "dispatch rows",
}


@dataclass(frozen=True, kw_only=True)
class DispatchSpec(Spec):
    """What a dispatch kernel is specialised for. Everything else is a run-time argument."""

    data_bytes: int  # of a row
    scale_bytes: int  # of a row, 0 without scales
    has_weights: bool
    has_stats: bool
    copies_idx: bool  # the handle keeps a copy of topk_idx
    cached: bool
    expanded: bool  # one row for each selection, rows of one expert together
    zero_gaps: bool  # expanded: zero the rows that alignment adds
    fill_tail: bool  # no host synchronisation: mark the rows past the count
    host_counts: bool  # host synchronisation: tell the host the counts as soon as they are known
    few: int = 0  # every block counts all tokens, which have at most this many selections; 0: each counts its share

    @property
    def num_chunks(self) -> int:
        return ceil_div(self.data_bytes, self.chunk_bytes)

    @property
    def shared_bytes(self) -> int:
        """Of tables; what is staged comes on top of it."""
        ranks, experts = self.num_ranks, self.num_experts
        words = ranks * (self.num_warps + ranks + 5) + experts + self.partition.num_local(0) + 4
        words += experts * (self.num_warps + 2) if self.expanded else 3
        words += self.few * (3 if self.expanded else 2)
        return 4 * words + 8 * self.num_warps * self.depth + 16 * 16  # each table begins at a multiple of 16

    @property
    def columns(self) -> int:
        """Tallies of a block in use: tokens for each rank, selections for each expert."""
        return self.num_ranks + self.num_experts


def build(spec: DispatchSpec) -> Any:
    """The kernel of `spec`, a TileLang `PrimFunc`."""
    R, W = spec.num_ranks, spec.num_warps
    stage_shape = (W, spec.depth, align(spec.chunk_bytes, ROW_ALIGNMENT)) if spec.bulk else (1, 1, 16)

    @T.prim_func
    def dispatch(
        peers: T.Tensor((R,), "uint64"),  # address of every rank's region
        region: T.int64,  # that of this rank. All addresses are int64, since TileLang launches take no uint64
        topk_idx: T.int64,  # [T, K] index_dtype
        idx_copy: T.int64,  # the same, written
        topk_weights: T.int64,  # [T, K] fp32
        x: T.int64,  # [T, data_bytes]
        x_scales: T.int64,  # [T, scale_bytes]
        rows: T.int64,  # [T, K] int32: row at the rank of selection k, or -1. Cached: read; else written, and on the
        # way -2 - r where only r, the row among those from the same block, is known
        sources: T.int64,  # [T, K] int32: rank * capacity + row of each destination in first-named order, -1 after
        expanded_rows: T.int64,  # [T, K] int32: row of selection k in its expert's segment, or -1; as for `rows`
        counts: T.int64,  # int32: psum over ranks [R], psum over experts [E_local], real counts [E_local], and, expanded,
        # rows that each rank needs [R]
        src_metadata: T.int64,  # [capacity, 2] int32, a copy that outlives the slot
        row_metadata: T.int64,  # [capacity, K] int32, expanded: the rows of each received token, likewise
        stats: T.int64,  # [E_local] int32, added to
        host: T.int64,  # words for the host: rows, selections of each local expert, entries out of range since the last
        # time, and, expanded, rows that each rank needs
        overflow: T.int64,  # a word per rank, written for the host where the expanded rows do not fit
        status: T.int64,  # a word per peer: what a wait that gave up waited for
        rank: T.int32,
        num_tokens: T.int32,
        max_tokens: T.int32,  # T_max; the capacity is R times as much
        alignment: T.int32,  # of expert counts
        larger_rows: T.int32,  # expanded rows that a rank with one expert more holds
        smaller_rows: T.int32,  # and the other ranks
        slot: T.int32,  # this rank's receive slot
        slots_at: T.int64,  # offset of the slots in a region
        slot_bytes: T.int64,
        scales_at: T.int64,  # offsets in a slot
        idx_at: T.int64,
        weights_at: T.int64,
        source_at: T.int64,
        timeout_ns: T.int64,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=spec.threads, cluster_dims=spec.cluster_dims) as block:
            T.import_source(ep.leaves())
            stage = T.alloc_shared(stage_shape, "uint8", scope="shared.dyn")
            bars = T.alloc_shared((W, spec.depth), "uint64", scope="shared")
            base = T.alloc_shared((W, R), "int32", scope="shared")  # [warp, destination]: see stage 1
            totals = T.alloc_shared((R + spec.num_experts,), "int32", scope="shared")
            count = T.alloc_shared((R, R), "int32", scope="shared")  # [source, destination]
            peer_slot = T.alloc_shared((R,), "uint64", scope="shared")  # address
            local_count = T.alloc_shared((spec.partition.num_local(0),), "int32", scope="shared")
            start = T.alloc_shared((R,), "int32", scope="shared")  # [destination]: see stage 2
            table = spec.num_experts if spec.expanded else 1
            expert_base = T.alloc_shared((W, table), "int32", scope="shared")  # [warp, expert]: see stage 1
            expert_count = T.alloc_shared((table,), "int32", scope="shared")  # of all ranks
            expert_start = T.alloc_shared((table,), "int32", scope="shared")  # this rank's first row in the segment
            needed = T.alloc_shared(
                (R,), "int32", scope="shared"
            )  # expanded rows n of a rank, -1 - n if they do not fit
            drawn = T.alloc_shared((max(spec.few, 1),), "int32", scope="shared")  # few: entries of topk_idx, and what
            number = T.alloc_shared(
                (max(spec.few, 1),), "int32", scope="shared"
            )  # `rows` else is on the way: see stage 1
            expanded_number = T.alloc_shared((max(spec.few, 1) if spec.expanded else 1,), "int32", scope="shared")
            flags = T.alloc_shared(
                (3,), "int32", scope="shared"
            )  # a wait gave up; last to count; an earlier collective gave up

            drawn_ahead = T.alloc_local((counting.AHEAD,), "int64")  # entries of topk_idx that were asked for
            item = T.alloc_local((1,), "int32")  # what a warp scatters, and what is good for its next piece
            ticket = T.alloc_local((1,), "int32")
            ahead = SimpleNamespace(  # what says where that piece goes, lane by lane
                row=T.alloc_local((1,), "int32"),
                expanded_row=T.alloc_local((1,), "int32"),
                expert=T.alloc_local((1,), "int32"),
                weight=T.alloc_local((1,), "float32"),
            )

            tid = T.get_thread_binding()
            block_begin = T.alloc_var("int32")
            block_end = T.alloc_var("int32")
            block_share = T.alloc_var("int32")  # tokens that a block counts
            share = T.alloc_var("int32")  # tokens that a warp counts
            dispatches = T.alloc_var("uint64")  # that this rank has been through
            epoch = T.alloc_var("uint64")
            own = T.alloc_var("uint64")
            alive = T.alloc_var("int32")
            own = ep.u64(region)
            dispatches = ep.number_of(own, spec.control.done, rank)
            epoch = dispatches + ep.number_of(own, spec.control.read_done, rank) + T.uint64(1)
            block_share = T.max(T.truncdiv(num_tokens + num_blocks - 1, num_blocks), 1)
            block_begin = 0
            block_end = num_tokens
            if spec.few == 0:
                block_begin = T.min(block * block_share, num_tokens)
                block_end = T.min(block_begin + block_share, num_tokens)
            share = T.max(T.ceildiv(block_end - block_begin, W), 1)

            c = SimpleNamespace(
                topk_idx=ep.u64(topk_idx), idx_copy=ep.u64(idx_copy), topk_weights=ep.u64(topk_weights), x=ep.u64(x),
                x_scales=ep.u64(x_scales), rows=ep.u64(rows), sources=ep.u64(sources),
                expanded_rows=ep.u64(expanded_rows), counts=ep.u64(counts), src_metadata=ep.u64(src_metadata),
                row_metadata=ep.u64(row_metadata), stats=ep.u64(stats), host=ep.u64(host), overflow=ep.u64(overflow),
                status=ep.u64(status), timeout_ns=ep.u64(timeout_ns), peers=peers, rank=rank, num_tokens=num_tokens,
                max_tokens=max_tokens, alignment=alignment, larger_rows=larger_rows, smaller_rows=smaller_rows,
                slot=slot, slots_at=slots_at, slot_bytes=slot_bytes, scales_at=scales_at, idx_at=idx_at,
                weights_at=weights_at, source_at=source_at, num_blocks=num_blocks, block=block, tid=tid, own=own,
                dispatches=dispatches, epoch=epoch, block_share=block_share, share=share, stage=stage, bars=bars,
                base=base, totals=totals, count=count, peer_slot=peer_slot, local_count=local_count, start=start,
                expert_base=expert_base,
                expert_count=expert_count, expert_start=expert_start, needed=needed, flags=flags, drawn=drawn,
                number=number, expanded_number=expanded_number, begin=block_begin, end=block_end, item=item,
                drawn_ahead=drawn_ahead, ticket=ticket, ahead=ahead, warp=tid // 32, lane=tid % 32,
                words=own + T.uint64(spec.control.words),
                taken=ep.counter(own, spec.control.taken, epoch),
            )  # fmt: skip
            if not spec.cached:
                counting.begin_count(spec, c)
            if spec.cached or spec.few > 0:
                counting.send_entry(spec, c)
            prepare(spec, c)
            alive = T.if_then_else(flags[2] == 0, 1, 0)
            if alive == 1:
                scattering.begin_scatter(spec, c)
                if not spec.cached:
                    counting.count(spec, c)
                    counting.send_counts(spec, c)
                counting.receive_words(spec, c)
                alive = T.if_then_else(flags[0] == 0, 1, 0)
            if T.And(flags[2] == 0, flags[0] != 0):
                scattering.abandon_scatter(spec, c)
            if alive == 1:
                if not spec.cached:
                    counting.place_rows(spec, c)
                    if spec.host_counts:
                        counting.receive_local_counts(spec, c)
                        counting.report_counts(spec, c)
                elif spec.has_stats:
                    counting.repeat_stats(spec, c)
                if spec.bulk:
                    scattering.scatter_bulk(spec, c)
                else:
                    scattering.scatter_warp(spec, c)
                if not spec.cached and not spec.host_counts:
                    counting.receive_local_counts(spec, c)
                scattering.announce_done(spec, c)
                # While the rows of peers are under way: what nobody else touches.
                if not spec.cached and not spec.host_counts:
                    counting.report_counts(spec, c)
                if spec.expanded:
                    scattering.fill_expanded(spec, c)
                elif spec.fill_tail:
                    scattering.fill_tail(spec, c)
                scattering.finish(spec, c)

    return dispatch


@T.macro
def prepare(s, c):
    """0. Tables are zero, barriers are initialised."""
    i = T.alloc_var("int32")
    ep.clear_flags(s, c)
    if s.few > 0:
        if T.And(c.tid == 0, c.block == 0):
            c.flags[1] = 1
    if s.bulk:
        if c.tid < s.num_warps * s.depth:
            ep.barrier_init(c.bars[c.tid // s.depth, c.tid % s.depth], 1)
            ep.barrier_init_fence()
    i = c.tid
    while i < s.num_warps * s.num_ranks:
        c.base[i // s.num_ranks, i % s.num_ranks] = 0
        i = i + s.threads
    i = c.tid
    while i < s.columns:
        c.totals[i] = 0
        i = i + s.threads
    if s.expanded:
        i = c.tid
        while i < s.num_warps * s.num_experts:
            c.expert_base[i // s.num_experts, i % s.num_experts] = 0
            i = i + s.threads
    T.sync_threads()
