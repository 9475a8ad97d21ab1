"""Dispatch, rank layout: one launch that counts, exchanges counts, scatters rows to their final index, finishes.

Data flow of one block on rank `rank` (`d` a destination, `s` a source)::

    topk_idx -> tallies[block, d], row numbers within the warp             1. count
    tallies  -> words at every peer; words of every peer -> base[warp, d]  2. exchange
    x        -> shared memory -> slot of d, row base[warp, d] + number     3. scatter
    done word at every peer; done words of every peer                      4. finish

A cached dispatch takes its rows from the handle and exchanges entry words alone.

Conditions below never read memory that their own body changes: TileLang distributes an `if` over the statements in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from tile_ep.kernels import primitives as ep
from tile_ep.layout import MAX_TOPK, ROW_ALIGNMENT, ControlLayout, ExpertPartition, align, ceil_div

PHASE_ENTRY, PHASE_COUNTS, PHASE_DONE = 1, 2, 3
PHASES = {PHASE_ENTRY: "dispatch entry", PHASE_COUNTS: "dispatch counts", PHASE_DONE: "dispatch rows"}


@dataclass(frozen=True)
class DispatchSpec:
    """What a dispatch kernel is specialised for. Everything else is a run-time argument."""

    num_ranks: int
    num_experts: int
    num_topk: int
    max_experts: int  # of the buffer, which fixes the control block
    index_dtype: str  # of topk_idx: int16, int32 or int64
    data_bytes: int  # of a row
    scale_bytes: int  # of a row, 0 without scales
    has_weights: bool
    has_stats: bool
    copies_idx: bool  # the handle keeps a copy of topk_idx
    cached: bool
    fill_tail: bool  # no host synchronisation: mark the rows past the count
    host_counts: bool  # host synchronisation: tell the host the counts as soon as they are known
    bulk: bool  # rows go through shared memory by the copy engine; else a warp copies them, any size and alignment
    num_warps: int
    chunk_bytes: int = 16  # of a row in shared memory at a time, a multiple of 16
    depth: int = 2  # chunks a warp holds

    @property
    def num_chunks(self) -> int:
        return ceil_div(self.data_bytes, self.chunk_bytes)

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def partition(self) -> ExpertPartition:
        return ExpertPartition(self.num_experts, self.num_ranks)

    @property
    def control(self) -> ControlLayout:
        return ControlLayout(self.num_ranks, self.max_experts)

    @property
    def columns(self) -> int:
        """Tallies of a block in use: tokens for each rank, selections for each expert."""
        return self.num_ranks + self.num_experts

    @property
    def index_bytes(self) -> int:
        return int(self.index_dtype[3:]) // 8


def build(spec: DispatchSpec) -> Any:
    """The kernel of `spec`, a TileLang `PrimFunc`."""
    R, W = spec.num_ranks, spec.num_warps
    stage_shape = (W, spec.depth, align(spec.chunk_bytes, ROW_ALIGNMENT)) if spec.bulk else (1, 1, 16)

    @T.prim_func
    def dispatch(
        peers: T.Tensor((R,), "uint64"),  # address of every rank's region. All addresses below are int64, since
        # TileLang launches take no uint64
        topk_idx: T.int64,  # [T, K] index_dtype
        idx_copy: T.int64,  # the same, written
        topk_weights: T.int64,  # [T, K] fp32
        x: T.int64,  # [T, data_bytes]
        x_scales: T.int64,  # [T, scale_bytes]
        rows: T.int64,  # [T, K] int32: row at the rank of selection k, or -1. Cached: read; else written, and on the
        # way -2 - r where only r, the row among those from the same block, is known
        sources: T.int64,  # [T, K] int32: rank * capacity + row of each destination in first-named order, -1 after
        counts: T.int64,  # int32: psum over ranks [R], psum over experts [E_local], real counts [E_local]
        src_metadata: T.int64,  # [capacity, 2] int32, a copy that outlives the slot
        stats: T.int64,  # [E_local] int32, added to
        host: T.int64,  # words for the host: rows, selections of each local expert, entries out of range since the last time
        status: T.int64,  # a word per peer: what a wait that gave up waited for
        rank: T.int32,
        num_tokens: T.int32,
        max_tokens: T.int32,  # T_max; the capacity is R times as much
        alignment: T.int32,  # of expert counts
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
        with T.Kernel(num_blocks, threads=spec.threads) as block:
            T.import_source(ep.leaves())
            stage = T.alloc_shared(stage_shape, "uint8", scope="shared.dyn")
            bars = T.alloc_shared((W, spec.depth), "uint64", scope="shared")
            base = T.alloc_shared((W, R), "int32", scope="shared")  # [warp, destination]: see stage 1
            totals = T.alloc_shared((R + spec.num_experts,), "int32", scope="shared")
            count = T.alloc_shared((R, R), "int32", scope="shared")  # [source, destination]
            peer_slot = T.alloc_shared((R,), "int32", scope="shared")
            local_count = T.alloc_shared((spec.partition.num_local(0),), "int32", scope="shared")
            start = T.alloc_shared((R,), "int32", scope="shared")  # [destination]: see stage 2
            flags = T.alloc_shared(
                (4,), "int32", scope="shared"
            )  # a wait gave up; last to count; last to finish; taken

            tid = T.get_thread_binding()
            block_begin = T.alloc_var("int32")
            block_end = T.alloc_var("int32")
            share = T.alloc_var("int32")  # tokens that a warp counts
            epoch = T.alloc_var("uint64")
            own = T.alloc_var("uint64")
            alive = T.alloc_var("int32")
            own = peers[rank]
            epoch = ep.get(own + T.uint64(spec.control.epoch), "uint64") + T.uint64(1)
            block_begin = T.cast(T.int64(num_tokens) * block // num_blocks, "int32")
            block_end = T.cast(T.int64(num_tokens) * (block + 1) // num_blocks, "int32")
            share = T.max(T.ceildiv(block_end - block_begin, W), 1)

            c = SimpleNamespace(
                peers=peers, topk_idx=ep.u64(topk_idx), idx_copy=ep.u64(idx_copy), topk_weights=ep.u64(topk_weights),
                x=ep.u64(x), x_scales=ep.u64(x_scales), rows=ep.u64(rows), sources=ep.u64(sources),
                counts=ep.u64(counts), src_metadata=ep.u64(src_metadata), stats=ep.u64(stats), host=ep.u64(host),
                status=ep.u64(status), rank=rank, num_tokens=num_tokens, max_tokens=max_tokens, alignment=alignment,
                slot=slot, slots_at=slots_at, slot_bytes=slot_bytes, scales_at=scales_at, idx_at=idx_at,
                weights_at=weights_at, source_at=source_at, timeout_ns=ep.u64(timeout_ns), num_blocks=num_blocks,
                block=block, tid=tid, warp=tid // 32, lane=tid % 32, own=own, epoch=epoch, begin=block_begin,
                end=block_end, share=share, stage=stage, bars=bars, base=base, totals=totals, count=count,
                peer_slot=peer_slot, local_count=local_count, start=start, flags=flags,
                words=own + T.uint64(spec.control.words), taken=own + T.uint64(spec.control.taken),
            )  # fmt: skip
            _prepare(spec, c)
            if spec.cached:
                _send_entry(spec, c)
            else:
                _count(spec, c)
                _send_counts(spec, c)
            _receive_words(spec, c)
            alive = T.if_then_else(flags[0] == 0, 1, 0)
            if alive == 1:
                if not spec.cached:
                    _place_rows(spec, c)
                    if spec.host_counts:
                        _report_counts(spec, c)
                if spec.bulk:
                    _scatter_bulk(spec, c)
                else:
                    _scatter_warp(spec, c)
                if not spec.cached and not spec.host_counts:
                    _report_counts(spec, c)
                if spec.fill_tail:
                    _fill_tail(spec, c)
                _finish(spec, c)

    return dispatch


@T.macro
def _prepare(s, c):
    i = T.alloc_var("int32")
    if c.tid < 3:
        c.flags[c.tid] = 0
    if s.bulk:
        if c.tid == 0:
            for w in T.serial(s.num_warps):
                for b in T.serial(s.depth):
                    ep.barrier_init(c.bars[w, b], 1)
            ep.barrier_init_fence()
    i = c.tid
    while i < s.num_warps * s.num_ranks:
        c.base[i // s.num_ranks, i % s.num_ranks] = 0
        i = i + s.threads
    i = c.tid
    while i < s.columns:
        c.totals[i] = 0
        i = i + s.threads
    T.sync_threads()


def rank_of(expert: ep.Expr, partition: ExpertPartition) -> ep.Expr:
    """`ExpertPartition.rank_of` as an expression."""
    base, extra = divmod(partition.num_experts, partition.num_ranks)
    if extra == 0:
        return expert // base
    larger = extra * (base + 1)
    return T.if_then_else(expert < larger, expert // (base + 1), extra + (expert - larger) // base)


def first_expert(rank: ep.Expr, partition: ExpertPartition) -> ep.Expr:
    """`ExpertPartition.first` as an expression."""
    base, extra = divmod(partition.num_experts, partition.num_ranks)
    return rank * base + T.min(rank, extra)


@T.macro
def _count(s, c):
    """1. Count. Afterwards rows[t, k] is -2 - r, where r of this block's earlier tokens share the destination of k, and the
    block's tallies are out; flags[1] is set in the last block to get here, which may read the tallies of all.
    """
    R, K = s.num_ranks, s.num_topk
    group = MAX_TOPK // K  # tokens at a time, a lane for each selection
    token = T.alloc_var("int32")
    end = T.alloc_var("int32")
    raw = T.alloc_var("int64")
    ahead = T.alloc_var("int64")
    expert = T.alloc_var("int32")
    dest = T.alloc_var("int32")
    row = T.alloc_var("int32")
    i = T.alloc_var("int32")
    running = T.alloc_var("int32")
    token = T.min(c.begin + c.warp * c.share, c.end) + c.lane // K
    end = T.min(c.begin + (c.warp + 1) * c.share, c.end)
    ahead = T.int64(-1)
    if T.And(c.lane < group * K, token < end):
        ahead = _selection(s, c, token, c.lane % K)
    while token - c.lane // K < end:
        raw = ahead
        ahead = T.int64(-1)
        if T.And(c.lane < group * K, token + group < end):
            ahead = _selection(s, c, token + group, c.lane % K)
        expert = T.if_then_else(T.And(raw >= T.int64(0), raw < T.int64(s.num_experts)), T.cast(raw, "int32"), -1)
        dest = T.if_then_else(expert >= 0, rank_of(expert, s.partition), -1)
        if T.And(expert < 0, raw != T.int64(-1)):
            ep.add_relaxed(c.own + T.uint64(s.control.num_bad), 1)
        # Selections of one token for one destination share a row: the lowest lane among them leads.
        same = T.match_any_sync(T.if_then_else(dest >= 0, c.lane // K * R + dest, -1 - c.lane))
        leads = T.And(dest >= 0, ep.lanes_below(same, c.lane) == 0)
        alike = T.match_any_sync(T.if_then_else(leads, dest, -1 - c.lane))
        row = -1
        if leads:
            row = c.base[c.warp, dest] + ep.lanes_below(alike, c.lane)
        T.sync_warp()
        if T.And(leads, ep.lanes_above(alike, c.lane) == T.uint32(0)):
            c.base[c.warp, dest] = row + 1
        row = T.shfl_sync(row, ep.first_lane(same))
        if T.And(c.lane < group * K, token < end):
            ep.put(ep.at(c.rows, T.int64(token) * K + c.lane % K, 4), row, "int32")
            if s.copies_idx:
                ep.put(ep.at(c.idx_copy, T.int64(token) * K + c.lane % K, s.index_bytes), raw, s.index_dtype)
        if expert >= 0:
            T.atomic_add(c.totals[R + expert], 1)
        T.sync_warp()
        token = token + group
    T.sync_threads()
    if c.tid < R:
        running = 0
        for w in T.serial(s.num_warps):
            row = c.base[w, c.tid]
            c.base[w, c.tid] = running
            running = running + row
        c.totals[c.tid] = running
    T.sync_threads()
    i = c.tid
    while i < (c.end - c.begin) * K:
        row = ep.get(ep.at(c.rows, T.int64(c.begin) * K + i, 4), "int32")
        if row >= 0:
            raw = _selection(s, c, c.begin, i)
            row = row + c.base[i // K // c.share, rank_of(T.cast(raw, "int32"), s.partition)]
            ep.put(ep.at(c.rows, T.int64(c.begin) * K + i, 4), -2 - row, "int32")
        i = i + s.threads
    i = c.tid
    while i < s.columns:
        ep.put(_tally(s, c, c.block, i), c.totals[i], "int32")
        i = i + s.threads
    T.sync_threads()
    if c.tid == 0:
        c.flags[1] = ep.arrive_last(c.own + T.uint64(s.control.count_arrivals), c.num_blocks)
    T.sync_threads()


def _selection(s: DispatchSpec, c: SimpleNamespace, token: ep.Expr, k: ep.Expr) -> ep.Expr:
    address = ep.at(c.topk_idx, T.int64(token) * s.num_topk + k, s.index_bytes)
    return T.cast(ep.get(address, s.index_dtype), "int64")


@T.macro
def _scan_tallies(s, c, column, total):
    """`total[0]`: the tallies of all blocks. Those of destinations become sums over earlier blocks. Eight loads are in flight
    at a time.
    """
    b = T.alloc_var("int32")
    part = T.alloc_local((8,), "int32")
    total[0] = 0
    b = 0
    while b < c.num_blocks:
        for j in T.unroll(8):
            part[j] = 0
            if b + j < c.num_blocks:
                part[j] = ep.get(_tally(s, c, b + j, column), "int32")
        for j in T.unroll(8):
            if T.And(column < s.num_ranks, b + j < c.num_blocks):
                ep.put(_tally(s, c, b + j, column), total[0], "int32")
            total[0] = total[0] + part[j]
        b = b + 8


def _tally(s: DispatchSpec, c: SimpleNamespace, block: ep.Expr, column: ep.Expr) -> ep.Expr:
    return ep.at(c.own + T.uint64(s.control.tallies), block * s.control.columns + column, 4)


@T.macro
def _send_counts(s, c):
    """2a. Exchange, sending: one block sends this rank's totals, and leaves to the others where each block's rows start.
    A word with the current epoch also says that its sender has entered, and word 0 names the slot that may be written.
    """
    R = s.num_ranks
    i = T.alloc_var("int32")
    running = T.alloc_var("int32")
    column = T.alloc_var("int32")
    to = T.alloc_var("uint64")
    last = T.alloc_var("int32")
    total = T.alloc_local((1,), "int32")
    last = c.flags[1]
    if last == 1:
        i = c.tid
        while i < s.columns:
            _scan_tallies(s, c, i, total)
            c.totals[i] = total[0]
            i = i + s.threads
        T.sync_threads()
        i = c.tid
        while i < R * (1 + R):
            column = i % (1 + R)
            to = ep.at(c.peers[i // (1 + R)] + T.uint64(s.control.words), c.rank * (1 + s.control.columns) + column, 8)
            running = c.slot
            if column > 0:
                running = c.totals[column - 1]
            ep.store_release(to, ep.tagged(c.epoch, running))
            i = i + s.threads
        i = c.tid
        while i < s.num_experts:
            to = ep.at(
                c.peers[rank_of(i, s.partition)] + T.uint64(s.control.words),
                c.rank * (1 + s.control.columns) + 1 + R + i, 8,
            )  # fmt: skip
            ep.store_release(to, ep.tagged(c.epoch, c.totals[R + i]))
            i = i + s.threads


@T.macro
def _send_entry(s, c):
    """2a of a cached dispatch: the rows are known, only the entry and the slot are news."""
    if T.And(c.block == 0, c.tid < s.num_ranks):
        ep.store_release(
            ep.at(c.peers[c.tid] + T.uint64(s.control.words), c.rank * (1 + s.control.columns), 8),
            ep.tagged(c.epoch, c.slot),
        )


@T.macro
def _receive_words(s, c):
    """2b. Exchange, receiving, in every block: afterwards every peer has entered, so its slot may be written."""
    width = 1 if s.cached else 1 + s.num_ranks
    i = T.alloc_var("int32")
    source = T.alloc_var("int32")
    column = T.alloc_var("int32")
    got = T.alloc_var("int64")
    i = c.tid
    while i < s.num_ranks * width:
        source = i // width
        column = i % width
        got = ep.wait_tag(
            ep.at(c.words, source * (1 + s.control.columns) + column, 8),
            c.epoch, c.status, PHASE_ENTRY, source, c.timeout_ns,
        )  # fmt: skip
        if got < T.int64(0):
            c.flags[0] = 1
        if column == 0:
            c.peer_slot[source] = T.cast(got, "int32")
        else:
            c.count[source, column - 1] = T.cast(got, "int32")
        i = i + s.threads
    T.sync_threads()


@T.macro
def _report_counts(s, c):
    """One block waits for the expert counts and tells the handle, the statistics and the host."""
    R = s.num_ranks
    i = T.alloc_var("int32")
    running = T.alloc_var("int32")
    num_local = T.alloc_var("int32")
    got = T.alloc_var("int64")
    last = T.alloc_var("int32")
    last = c.flags[1]
    num_local = first_expert(c.rank + 1, s.partition) - first_expert(c.rank, s.partition)
    if last == 1:
        i = c.tid
        while i < num_local:
            c.local_count[i] = 0
            i = i + s.threads
        T.sync_threads()
        i = c.tid
        while i < R * num_local:
            got = ep.wait_tag(
                ep.at(
                    c.words,
                    i // num_local * (1 + s.control.columns) + 1 + R + first_expert(c.rank, s.partition) + i % num_local,
                    8,
                ),
                c.epoch, c.status, PHASE_COUNTS, i // num_local, c.timeout_ns,
            )  # fmt: skip
            T.atomic_add(c.local_count[i % num_local], T.cast(got, "int32"))
            i = i + s.threads
        T.sync_threads()
        i = c.tid
        while i < num_local:
            running = c.local_count[i]
            ep.put(ep.at(c.counts, R + num_local + i, 4), running, "int32")
            if s.host_counts:
                ep.store_release(ep.at(c.host, 1 + i, 8), ep.tagged(c.epoch, running))
            if s.has_stats:
                ep.put(ep.at(c.stats, i, 4), ep.get(ep.at(c.stats, i, 4), "int32") + running, "int32")
            i = i + s.threads
        if c.tid == 0:
            running = 0
            for source in T.serial(R):
                running = running + c.count[source, c.rank]
                ep.put(ep.at(c.counts, source, 4), running, "int32")
            if s.host_counts:
                ep.store_release(c.host, ep.tagged(c.epoch, running))
            running = 0
            for e in T.serial(num_local):
                running = running + T.ceildiv(c.local_count[e], c.alignment) * c.alignment
                ep.put(ep.at(c.counts, R + e, 4), running, "int32")
            if s.host_counts:
                running = ep.get(c.own + T.uint64(s.control.num_bad), "int32")
                ep.put(c.own + T.uint64(s.control.num_bad), 0, "int32")
                ep.store_release(ep.at(c.host, 1 + num_local, 8), ep.tagged(c.epoch, running))


@T.macro
def _place_rows(s, c):
    """2c. start[d]: the first row of this rank at d, after the rows of earlier ranks."""
    i = T.alloc_var("int32")
    running = T.alloc_var("int32")
    i = c.tid
    while i < s.num_ranks:
        running = 0
        for source in T.serial(c.rank):
            running = running + c.count[source, i]
        c.start[i] = running
        i = i + s.threads
    T.sync_threads()


@T.macro
def _fill_tail(s, c):
    """Rows past the count: selects nothing, weighs nothing, finite scales. No peer writes there."""
    received = T.alloc_var("int32")
    entry = T.alloc_var("int64")
    bound = T.alloc_var("int64")
    to = T.alloc_var("uint64")
    received = 0
    if s.cached:
        received = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32")
    else:
        for source in T.serial(s.num_ranks):
            received = received + c.count[source, c.rank]
    to = _slot(c, c.own, c.slot)
    bound = T.int64(c.max_tokens) * s.num_ranks * s.num_topk
    entry = T.int64(received) * s.num_topk + c.block * s.threads + c.tid
    while entry < bound:
        ep.put(ep.at(to + ep.u64(c.idx_at), entry, s.index_bytes), -1, s.index_dtype)
        if s.has_weights:
            ep.put(ep.at(to + ep.u64(c.weights_at), entry, 4), T.float32(0), "float32")
        entry = entry + T.int64(c.num_blocks) * s.threads
    if s.scale_bytes > 0:
        bound = T.int64(c.max_tokens) * s.num_ranks * s.scale_bytes
        entry = T.int64(received) * s.scale_bytes + c.block * s.threads + c.tid
        while entry < bound:
            ep.put(to + ep.u64(c.scales_at + entry), 0, "uint8")
            entry = entry + T.int64(c.num_blocks) * s.threads


def _slot(c: SimpleNamespace, region: ep.Expr, slot: ep.Expr) -> ep.Expr:
    return region + ep.u64(c.slots_at) + ep.u64(slot) * ep.u64(c.slot_bytes)


@T.macro
def _address_token(s, c, token, part, to):
    """Sets `to[0]` to where chunk `part` of the row goes, in the lanes that lead a destination, and to 0 in the others. With
    the first chunk goes all of the row that is not data, and the plan.
    """
    K = s.num_topk
    raw = T.alloc_var("int64")
    expert = T.alloc_var("int32")
    dest = T.alloc_var("int32")
    row = T.alloc_var("int32")
    weight = T.alloc_var("float32")
    mask = T.alloc_var("uint32")
    region = T.alloc_var("uint64")
    counted_by = T.alloc_var("int32")
    raw = T.int64(-1)
    row = -1
    weight = T.float32(0)
    counted_by = T.cast((T.int64(token + 1) * c.num_blocks - 1) // T.int64(c.num_tokens), "int32")
    if c.lane < K:
        raw = _selection(s, c, token, c.lane)
        row = ep.get(ep.at(c.rows, T.int64(token) * K + c.lane, 4), "int32")
    if s.has_weights:
        if T.And(c.lane < K, part == 0):
            weight = ep.get(ep.at(c.topk_weights, T.int64(token) * K + c.lane, 4), "float32")
    expert = T.if_then_else(row != -1, T.cast(raw, "int32"), -1)
    dest = T.if_then_else(row != -1, rank_of(expert, s.partition), -1)
    same = T.match_any_sync(T.if_then_else(dest >= 0, dest, -1 - c.lane))
    leads = T.And(dest >= 0, ep.lanes_below(same, c.lane) == 0)
    mask = T.ballot_sync(leads)
    region = T.uint64(0)
    if dest >= 0:
        region = _slot(c, c.peers[dest], c.peer_slot[dest])
    if not s.cached:
        if row < -1:
            row = -2 - row + c.start[dest] + ep.get(_tally(s, c, counted_by, dest), "int32")
    if not s.cached:
        if T.And(dest >= 0, part == 0):
            ep.put(ep.at(c.rows, T.int64(token) * K + c.lane, 4), row, "int32")
        if T.And(leads, part == 0):
            ep.put(
                ep.at(c.sources, T.int64(token) * K + ep.lanes_below(mask, c.lane), 4),
                dest * (c.max_tokens * s.num_ranks) + row, "int32",
            )  # fmt: skip
        if T.And(T.And(c.lane < K, part == 0), c.lane >= T.cast(T.popcount(mask), "int32")):
            ep.put(ep.at(c.sources, T.int64(token) * K + c.lane, 4), -1, "int32")
    to[0] = T.if_then_else(leads, ep.at(region, row, s.data_bytes) + ep.u64(part * s.chunk_bytes), T.uint64(0))
    if part > 0:
        mask = T.uint32(0)
    while mask != T.uint32(0):
        leader = ep.first_lane(mask)
        there = T.shfl_sync(region, leader)
        there_row = T.shfl_sync(row, leader)
        there_rank = T.shfl_sync(dest, leader)
        if c.lane < K:
            ep.put(
                ep.at(there + ep.u64(c.idx_at), T.int64(there_row) * K + c.lane, s.index_bytes),
                T.if_then_else(dest == there_rank, expert - first_expert(there_rank, s.partition), -1),
                s.index_dtype,
            )
            if s.has_weights:
                ep.put(ep.at(there + ep.u64(c.weights_at), T.int64(there_row) * K + c.lane, 4), weight, "float32")
        if c.lane == 0:
            ep.put(
                ep.at(there + ep.u64(c.source_at), there_row, 8),
                ep.u64(c.rank * c.max_tokens + token) | (ep.u64(c.rank * K + leader) << T.uint64(32)),
                "uint64",
            )
        if s.scale_bytes > 0:
            ep.copy_warp(
                ep.at(there + ep.u64(c.scales_at), there_row, s.scale_bytes),
                ep.at(c.x_scales, token, s.scale_bytes), s.scale_bytes,
            )  # fmt: skip
        if not s.bulk:
            ep.copy_warp(ep.at(there, there_row, s.data_bytes), ep.at(c.x, token, s.data_bytes), s.data_bytes)
        mask = mask & (mask - T.uint32(1))


@T.macro
def _take(c, item):
    """`item[0]`: the next piece of this rank's work, for whichever warp gets to it. SMs differ in the bandwidth they get."""
    item[0] = 0
    if c.lane == 0:
        item[0] = ep.add_relaxed(c.taken, 1)
    item[0] = T.shfl_sync(item[0], 0)


@T.macro
def _scatter_warp(s, c):
    """3. Scatter, by the warp: any row size and alignment."""
    token = T.alloc_var("int32")
    taken = T.alloc_local((1,), "int32")
    to = T.alloc_local((1,), "uint64")
    _take(c, taken)
    token = taken[0]
    while token < c.num_tokens:
        _address_token(s, c, token, 0, to)
        _take(c, taken)
        token = taken[0]


@T.macro
def _scatter_bulk(s, c):
    """3. Scatter, by the copy engine: each chunk enters a warp's shared memory once and leaves it once per destination. Warps
    take chunks as they get to them. While the stores of one chunk drain, the warp addresses and fetches the next; the
    memory of a chunk is fetched into again only after every lane's stores have read it.
    """
    turn = T.alloc_var("int32")  # chunks this warp has had
    here = T.alloc_var("bool")  # the warp holds a chunk
    more = T.alloc_var("bool")  # it has not seen the last one
    item = T.alloc_local((1,), "int32")
    to = T.alloc_local((1,), "uint64")
    turn = 0
    here = False
    more = True
    while more:
        if here:
            ep.barrier_wait(c.bars[c.warp, turn % s.depth], turn // s.depth % 2)
            if to[0] != T.uint64(0):
                ep.push(to[0], c.stage[c.warp, turn % s.depth, 0], _chunk_size(s, item[0] % s.num_chunks))
            ep.push_commit()
            turn = turn + 1
        _take(c, item)
        more = item[0] < c.num_tokens * s.num_chunks
        if more:
            ep.push_wait_read(s.depth - 1)
            T.sync_warp()
            _fetch_chunk(s, c, item[0], turn % s.depth)
            _address_token(s, c, item[0] // s.num_chunks, item[0] % s.num_chunks, to)
        here = more


@T.macro
def _fetch_chunk(s, c, item, turn):
    if c.lane == 0:
        ep.fetch(
            c.stage[c.warp, turn, 0],
            ep.at(c.x, item // s.num_chunks, s.data_bytes) + ep.u64(item % s.num_chunks * s.chunk_bytes),
            _chunk_size(s, item % s.num_chunks),
            c.bars[c.warp, turn],
        )


def _chunk_size(s: DispatchSpec, part: ep.Expr) -> ep.Expr:
    last = s.data_bytes - (s.num_chunks - 1) * s.chunk_bytes
    return s.chunk_bytes if last == s.chunk_bytes else T.if_then_else(part == s.num_chunks - 1, last, s.chunk_bytes)


@T.macro
def _finish(s, c):
    """4. Finish. Rows are written, then fenced, then counted in; the last block tells every peer and waits for them."""
    i = T.alloc_var("int32")
    received = T.alloc_var("int32")
    share = T.alloc_var("int32")
    last = T.alloc_var("int32")
    arrived = T.alloc_var("int32")
    got = T.alloc_var("int64")
    if s.bulk:
        ep.push_wait_all()
    ep.fence()
    T.sync_threads()
    if c.tid == 0:
        c.flags[2] = ep.arrive_last(c.own + T.uint64(s.control.finish_arrivals), c.num_blocks)
    T.sync_threads()
    last = c.flags[2]
    if last == 1:
        i = c.tid
        while i < s.num_ranks:
            ep.store_release(ep.at(c.peers[i] + T.uint64(s.control.done), c.rank, 8), ep.tagged(c.epoch, 0))
            got = ep.wait_tag(
                ep.at(c.own + T.uint64(s.control.done), i, 8), c.epoch, c.status, PHASE_DONE, i, c.timeout_ns
            )
            if got < T.int64(0):
                c.flags[0] = 1
            i = i + s.threads
        T.sync_threads()
        arrived = T.if_then_else(c.flags[0] == 0, 1, 0)
        if arrived == 1:
            if not s.cached:
                received = 0
                for source in T.serial(s.num_ranks):
                    received = received + c.count[source, c.rank]
                share = T.ceildiv(received, 2 * s.num_warps) * 2  # rows of a warp, in 16 bytes
                i = T.min(c.warp * share, received)
                ep.copy_warp(
                    ep.at(c.src_metadata, i, 8),
                    ep.at(_slot(c, c.own, c.slot) + ep.u64(c.source_at), i, 8),
                    T.int64(8) * (T.min(i + share, received) - i),
                )
            if c.tid == 0:
                ep.put(c.taken, 0, "uint32")
                ep.put(c.own + T.uint64(s.control.epoch), c.epoch, "uint64")
