"""Combine: one launch in which every rank pulls its tokens' rows from the peers and sums them.

Data flow of one block on rank `rank`::

    y -> this rank's combine rows (symmetric)                     1. stage: copy, or sum a token's expanded rows;
                                                                     nothing to do for zero-copy input
    ready word at every peer; ready words of every peer           2. announce
    rows of the token's destinations -> shared memory -> fp32 sum -> out   3. pull and reduce
    read-done word at every peer                                  4. leave

The variant that pushes stages into the combine rows of the rank whose token it is, at [token, this rank], so that 3 reads this
rank's own. All ranks of a buffer push, in every combine, or none does.

Conditions below never read memory that their own body changes: TileLang distributes an `if` over the statements in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from tile_ep.kernels import primitives as ep
from tile_ep.kernels.counting import expert_of, first_expert, rank_of
from tile_ep.kernels.reducing import chunk_size, load_sources, sum_rows
from tile_ep.kernels.spec import Spec
from tile_ep.layout import ROW_ALIGNMENT, align, ceil_div

PHASE_REUSE, PHASE_READY = 4, 5
PHASES = {PHASE_REUSE: "combine input reuse", PHASE_READY: "combine input"}


@dataclass(frozen=True, kw_only=True)
class CombineSpec(Spec):
    """What a combine kernel is specialised for. Everything else is a run-time argument."""

    dtype: str  # of y, the biases and the output: bfloat16, float16 or float32
    hidden: int  # elements of a row
    num_bias: int  # 0, 1 or 2
    has_weights: bool  # bring the received weights back
    staged: bool  # y lies outside the symmetric region and is copied into it first
    pushed: bool  # into that of the rank which reads it; implies `staged`
    expanded: (
        bool  # y has a row per selection; a token's rows are summed on the way into the symmetric region, or, where no
    )
    # token has two on this rank, pulled from where they are
    apply_weights: bool  # expanded: multiply each row by its weight

    @property
    def mixed(self) -> bool:
        """Each peer says whether its rows lie in the rank layout or in the expanded one."""
        return self.expanded and not self.pushed

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element_bytes

    @property
    def num_chunks(self) -> int:
        return ceil_div(self.row_bytes, self.chunk_bytes)

    @property
    def last_chunk(self) -> int:
        return self.row_bytes - (self.num_chunks - 1) * self.chunk_bytes

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.element_bytes

    @property
    def lane_vectors(self) -> int:
        """16-byte vectors of a chunk that one lane holds."""
        return ceil_div(self.chunk_bytes, 16 * 32)


def build(spec: CombineSpec) -> Any:
    """The kernel of `spec`, a TileLang `PrimFunc`."""
    W = spec.num_warps
    stage_shape = (
        (W, spec.depth, align(spec.chunk_bytes, ROW_ALIGNMENT) // spec.element_bytes) if spec.bulk else (1, 1, 16)
    )

    @T.prim_func
    def combine(
        peers: T.Tensor((spec.num_ranks,), "uint64"),  # address of every rank's region
        region: T.int64,  # that of this rank. All addresses are int64, since TileLang launches take no uint64
        y: T.int64,  # [N, hidden], or [expanded rows, hidden]; read when staged
        y_weights: T.int64,  # [N, K] fp32, or [expanded rows]
        bias_0: T.int64,  # [T, hidden]
        bias_1: T.int64,
        topk_idx: T.int64,  # [T, K] index_dtype
        rows: T.int64,  # [T, K] int32, of the handle: where the weight of selection k is, in either layout
        sources: T.int64,  # [T, K] int32, of the handle: rank * capacity + row of each destination, first named first;
        # mixed: the row in the rank layout of selection k
        counts: T.int64,  # int32, of the handle: entry R - 1 is N
        src_metadata: T.int64,  # [N, 2] int32, of the handle: source rank * T_max + token, and more
        row_metadata: T.int64,  # [N, K] int32, of an expanded handle: rows of y that belong to a received token
        out: T.int64,  # [T, hidden]
        out_weights: T.int64,  # [T, K] fp32
        status: T.int64,  # a word per peer: what a wait that gave up waited for
        rank: T.int32,
        num_tokens: T.int32,
        y_rows: T.int32,  # rows of y that are there
        capacity: T.int32,  # rows of a rank, as `sources` counts them; mixed: at least as many as a rank has in either layout
        rows_at: T.int64,  # offsets of the combine input and its weights in a region
        weights_at: T.int64,
        timeout_ns: T.int64,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=spec.threads, cluster_dims=spec.cluster_dims) as block:
            T.import_source(ep.leaves())
            stage = T.alloc_shared(stage_shape, spec.dtype, scope="shared.dyn")
            bars = T.alloc_shared((W, spec.depth), "uint64", scope="shared")
            stage_bars = T.alloc_shared((W, spec.depth), "uint64", scope="shared")
            slot_item = T.alloc_shared((W, spec.depth), "int32", scope="shared")  # what the chunk in a slot belongs to
            slot_rows = T.alloc_shared((W, spec.depth), "int32", scope="shared")  # and how many rows that has
            slot_weight = T.alloc_shared((W, spec.depth), "float32", scope="shared")  # its factor, or addend
            in_place = T.alloc_shared((spec.num_ranks if spec.mixed else 1,), "int32", scope="shared")
            peer_rows = T.alloc_shared((spec.num_ranks,), "uint64", scope="shared")  # address of the combine input
            flags = T.alloc_shared(
                (3,), "int32", scope="shared"
            )  # a wait gave up; last to stage; an earlier collective gave up

            tid = T.get_thread_binding()
            combines = T.alloc_var("uint64")  # that this rank has been through
            epoch = T.alloc_var("uint64")
            own = T.alloc_var("uint64")
            alive = T.alloc_var("int32")
            own = ep.u64(region)
            combines = ep.number_of(own, spec.control.read_done, rank)
            epoch = ep.number_of(own, spec.control.done, rank) + combines + T.uint64(1)
            c = SimpleNamespace(
                peers=peers, y=ep.u64(y), y_weights=ep.u64(y_weights), bias_0=ep.u64(bias_0), bias_1=ep.u64(bias_1),
                topk_idx=ep.u64(topk_idx), rows=ep.u64(rows), sources=ep.u64(sources), counts=ep.u64(counts),
                src_metadata=ep.u64(src_metadata), row_metadata=ep.u64(row_metadata), out=ep.u64(out),
                out_weights=ep.u64(out_weights), status=ep.u64(status), rank=rank, capacity=capacity,
                rows_at=rows_at, weights_at=weights_at, timeout_ns=ep.u64(timeout_ns), num_blocks=num_blocks,
                block=block, tid=tid, warp=tid // 32, lane=tid % 32, own=own, combines=combines, epoch=epoch,
                num_tokens=num_tokens, y_rows=y_rows,
                taken=ep.counter(own, spec.control.taken, epoch), stage=stage, bars=bars, stage_bars=stage_bars,
                slot_item=slot_item, slot_rows=slot_rows, slot_weight=slot_weight, in_place=in_place,
                peer_rows=peer_rows, flags=flags,
            )  # fmt: skip
            if not (spec.staged or spec.has_weights):  # everything is there already: first of all, say so
                if T.And(block == 0, ep.has_failed(spec, c) == 0):
                    _announce(spec, c)
            _prepare(spec, c)
            alive = T.if_then_else(flags[2] == 0, 1, 0)
            if spec.staged or spec.has_weights:
                if alive == 1:
                    # Peers have read what the previous combine left in this rank's rows, so they may be overwritten.
                    ep.wait_for_all(spec, c, spec.control.read_done, combines, PHASE_REUSE)
                    alive = T.if_then_else(flags[0] == 0, 1, 0)
                if alive == 1:
                    if spec.staged:
                        if spec.expanded:
                            _stage_sums(spec, c)
                        elif spec.bulk and spec.pushed:
                            _push_bulk(spec, c)
                        elif spec.bulk:
                            _stage_bulk(spec, c)
                        else:
                            _stage_warp(spec, c)
                    if spec.has_weights:
                        _stage_weights(spec, c)
                    _announce_staged(spec, c)
            if spec.mixed:  # where rows are is known only afterwards
                if alive == 1:
                    _wait_ready(spec, c)
                    alive = T.if_then_else(flags[0] == 0, 1, 0)
            if alive == 1:
                _sum_over_ranks(spec, c)
                alive = T.if_then_else(flags[0] == 0, 1, 0)
            if alive == 1:
                if spec.has_weights:
                    _return_weights(spec, c)
                ep.leave_block(spec, c, spec.control.read_done)  # its rows may be overwritten

    return combine


def _ready(s: CombineSpec, region: ep.Expr, rank: ep.Expr) -> ep.Expr:
    return ep.at(region + T.uint64(s.control.ready), rank, 8)


@T.macro
def _prepare(s, c):
    i = T.alloc_var("int32")
    ep.clear_flags(s, c)
    i = c.tid
    while i < s.num_ranks:
        c.peer_rows[i] = c.peers[i] + ep.u64(c.rows_at)
        i = i + s.threads
    if s.bulk:
        if c.tid < s.num_warps * s.depth:
            ep.barrier_init(c.bars[c.tid // s.depth, c.tid % s.depth], 1)
            ep.barrier_init(c.stage_bars[c.tid // s.depth, c.tid % s.depth], 1)
            ep.barrier_init_fence()
    T.sync_threads()


def _source(s: CombineSpec, c: SimpleNamespace, row: ep.Expr) -> ep.Expr:
    return ep.get(ep.at(c.src_metadata, row, 8), "int32")


def _home(s: CombineSpec, c: SimpleNamespace, row: ep.Expr, source: ep.Expr) -> ep.Expr:
    """Where a received row is staged; `source` is where it came from."""
    if not s.pushed:
        return ep.at(c.own + ep.u64(c.rows_at), row, s.row_bytes)
    most = c.capacity // s.num_ranks
    place = source % most * s.num_ranks + c.rank
    return ep.at(c.peers[source // most] + ep.u64(c.rows_at), place, s.row_bytes)


@T.macro
def _stage_bulk(s, c):
    """1. Stage: y, as a flat run of bytes in chunks, through the warps' shared memory. Chunk memory is fetched into again
    only after the store has read it; afterwards none is in use.
    """
    step = T.alloc_var("int32")
    steps = T.alloc_var("int32")
    total = T.alloc_var("int64")
    offset = T.alloc_var("int64")
    total = T.cast(ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32"), "int64") * s.row_bytes
    offset = T.int64(c.block * s.num_warps + c.warp) * s.chunk_bytes  # of the warp's first chunk
    steps = 0
    if offset < total:
        steps = T.cast((total - offset - 1) // (T.int64(c.num_blocks) * (s.num_warps * s.chunk_bytes)) + 1, "int32")
    # The whole of it is one lane's work, the copy engine does the rest.
    if c.lane == 0:
        step = 0
        while step < T.min(steps, s.depth - 1):
            _fetch_flat(s, c, step, offset, total)
            step = step + 1
        step = 0
        while step < steps:
            ep.push_wait_read(0)
            if step + s.depth - 1 < steps:
                _fetch_flat(s, c, step + s.depth - 1, offset, total)
            ep.barrier_wait(c.stage_bars[c.warp, step % s.depth], step // s.depth % 2)
            _push_flat(s, c, step, offset, total)
            step = step + 1
        ep.push_wait_all()
    T.sync_warp()


def _flat_size(s: CombineSpec, c: SimpleNamespace, start: ep.Expr, total: ep.Expr) -> ep.Expr:
    return T.cast(T.min(total - start, T.int64(s.chunk_bytes)), "int32")


@T.macro
def _fetch_flat(s, c, step, offset, total):
    start = T.alloc_var("int64")
    start = offset + T.int64(step) * c.num_blocks * (s.num_warps * s.chunk_bytes)
    ep.fetch(
        c.stage[c.warp, step % s.depth, 0], c.y + ep.u64(start), _flat_size(s, c, start, total),
        c.stage_bars[c.warp, step % s.depth],
    )  # fmt: skip


@T.macro
def _push_flat(s, c, step, offset, total):
    start = T.alloc_var("int64")
    start = offset + T.int64(step) * c.num_blocks * (s.num_warps * s.chunk_bytes)
    ep.push(c.own + ep.u64(c.rows_at + start), c.stage[c.warp, step % s.depth, 0], _flat_size(s, c, start, total))
    ep.push_commit()


@T.macro
def _push_bulk(s, c):
    """1. Stage by pushing, as `_stage_bulk`, but chunk by chunk of a row. Where the next row goes is asked for ahead."""
    step = T.alloc_var("int32")
    steps = T.alloc_var("int32")
    items = T.alloc_var("int32")
    first = T.alloc_var("int32")  # the warp's first item
    stride = T.alloc_var("int32")
    source = T.alloc_var("int32")
    ahead = T.alloc_var("int32")
    items = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32") * s.num_chunks
    first = c.block * s.num_warps + c.warp
    stride = c.num_blocks * s.num_warps
    steps = 0
    if first < items:
        steps = (items - first - 1) // stride + 1
    if c.lane == 0:
        ahead = 0
        if steps > 0:
            ahead = _source(s, c, first // s.num_chunks)
        step = 0
        while step < T.min(steps, s.depth - 1):
            _fetch_item(s, c, step, first + step * stride)
            step = step + 1
        step = 0
        while step < steps:
            source = ahead
            if step + 1 < steps:
                ahead = _source(s, c, (first + (step + 1) * stride) // s.num_chunks)
            ep.push_wait_read(0)
            if step + s.depth - 1 < steps:
                _fetch_item(s, c, step + s.depth - 1, first + (step + s.depth - 1) * stride)
            ep.barrier_wait(c.stage_bars[c.warp, step % s.depth], step // s.depth % 2)
            _push_item(s, c, step, first + step * stride, source)
            step = step + 1
        ep.push_wait_all()
    T.sync_warp()


@T.macro
def _fetch_item(s, c, step, item):
    ep.fetch(
        c.stage[c.warp, step % s.depth, 0],
        ep.at(c.y, item // s.num_chunks, s.row_bytes) + ep.u64(item % s.num_chunks * s.chunk_bytes),
        chunk_size(s, item),
        c.stage_bars[c.warp, step % s.depth],
    )


@T.macro
def _push_item(s, c, step, item, source):
    ep.push(
        _home(s, c, item // s.num_chunks, source) + ep.u64(item % s.num_chunks * s.chunk_bytes),
        c.stage[c.warp, step % s.depth, 0],
        chunk_size(s, item),
    )
    ep.push_commit()


@T.macro
def _stage_warp(s, c):
    """1. Stage, row by row, any size and alignment."""
    row = T.alloc_var("int32")
    received = T.alloc_var("int32")
    received = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32")
    row = c.block * s.num_warps + c.warp
    while row < received:
        ep.copy_warp(_home(s, c, row, _source(s, c, row)), ep.at(c.y, row, s.row_bytes), s.row_bytes)
        row = row + c.num_blocks * s.num_warps


@T.macro
def _stage_weights(s, c):
    entry = T.alloc_var("int32")
    entries = T.alloc_var("int32")
    if s.expanded:
        num_local = first_expert(c.rank + 1, s.partition) - first_expert(c.rank, s.partition)
        entries = ep.get(ep.at(c.counts, s.num_ranks + 2 * num_local + c.rank, 4), "int32")
        # More than there are: the dispatch has overflowed here, and brought nothing.
        entries = T.if_then_else(entries <= c.y_rows, entries, 0)
    else:
        entries = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32") * s.num_topk
    entry = c.block * s.threads + c.tid
    while entry < entries:
        ep.put(ep.at(c.own + ep.u64(c.weights_at), entry, 4), ep.get(ep.at(c.y_weights, entry, 4), "uint32"), "uint32")
        entry = entry + c.num_blocks * s.threads


@T.macro
def _stage_sums(s, c):
    """1. Stage, expanded: a token's rows are summed before they cross, so that one row per token and rank does."""
    received = T.alloc_var("int32")
    received = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32")
    sum_rows(s, c, _local_job(s, c, received))
    # The ring's memory is fetched into again, for the sum over ranks.
    T.sync_warp()


def _local_job(s: CombineSpec, c: SimpleNamespace, received: ep.Expr) -> SimpleNamespace:
    return SimpleNamespace(
        num_rows=received,
        counter=ep.counter(c.own, s.control.staged, c.epoch),
        sources=c.row_metadata,
        load=load_sources,
        wait=None,
        address=lambda s, c, row, source: ep.at(c.y, source, s.row_bytes),
        weights=c.y_weights if s.apply_weights else None,
        addend=None,
        biases=(),
        out=lambda s, c, row: _home(s, c, row, _source(s, c, row)),
        bars=c.stage_bars,
        slot_item=c.slot_item,
        slot_rows=c.slot_rows,
        slot_weight=c.slot_weight,
    )


@T.macro
def _sum_over_ranks(s, c):
    """3. Pull and reduce. What is pulled first is looked up while peers are awaited."""
    sum_rows(
        s,
        c,
        SimpleNamespace(
            num_rows=c.num_tokens,
            counter=c.taken,
            sources=c.sources,
            load=_load_mixed if s.mixed else load_sources,
            wait=None if s.mixed else _wait_ready,
            address=_row_address,
            weights=None,
            addend=_zero_of if s.mixed else None,
            biases=(c.bias_0, c.bias_1)[: s.num_bias],
            out=lambda s, c, row: ep.at(c.out, row, s.row_bytes),
            bars=c.bars,
            slot_item=c.slot_item,
            slot_rows=c.slot_rows,
            slot_weight=c.slot_weight,
        ),
    )


@T.macro
def _announce_staged(s, c):
    """2a. Announce, once every block has staged: the rows are written, then fenced, then counted in."""
    last = T.alloc_var("int32")
    ep.fence_async_global()
    ep.fence()
    ep.arrive_block(c, c.own + T.uint64(s.control.count_arrivals))
    last = c.flags[1]
    if last == 1:
        _announce(s, c)


@T.macro
def _announce(s, c):
    i = T.alloc_var("int32")
    i = c.tid
    while i < s.num_ranks:
        ep.store_release(_ready(s, c.peers[i], c.rank), ep.tagged(c.epoch, 1 if s.mixed and not s.staged else 0))
        i = i + s.threads


@T.macro
def _wait_ready(s, c):
    """2b. In every block: afterwards the rows of every peer may be read."""
    i = T.alloc_var("int32")
    got = T.alloc_local((1,), "int64")
    i = c.tid
    while i < s.num_ranks:
        ep.wait_word(s, c, _ready(s, c.own, i), c.epoch, PHASE_READY, i, got)
        if s.mixed:
            c.in_place[i] = T.cast(got[0], "int32")
        i = i + s.threads
    T.sync_threads()
    ep.fence_async_global()


def _zero_of(s: CombineSpec, c: SimpleNamespace, source: ep.Expr) -> ep.Expr:
    """The sum of a token's rows on a rank starts at +0, so it is not the -0 that a row read in place may be: +0 makes it +0,
    and -0 leaves what it is added to.
    """
    return T.if_then_else(c.in_place[source // c.capacity] == 1, T.float32(0.0), T.float32(-0.0))


@T.macro
def _load_mixed(s, c, j, row, source):
    """`load_sources` for rows that are where the ready word of their rank says."""
    entry = T.alloc_var("int64")
    rank_row = T.alloc_var("int32")
    place = T.alloc_var("int32")
    dest = T.alloc_var("int32")
    expert = T.alloc_var("int32")
    entry = T.int64(row) * s.num_topk + c.lane
    source[0] = -1
    rank_row = -1
    place = -1
    expert = -1
    if T.And(c.lane < s.num_topk, row < j.num_rows):
        rank_row = ep.get(ep.at(j.sources, entry, 4), "int32")
        place = ep.get(ep.at(c.rows, entry, 4), "int32")
        expert = expert_of(s, c, row, c.lane)
    dest = T.if_then_else(T.And(rank_row >= 0, expert >= 0), rank_of(expert, s.partition), -1)
    same = T.match_any_sync(T.if_then_else(dest >= 0, dest, -1 - c.lane))
    if T.And(dest >= 0, ep.lanes_below(same, c.lane) == 0):
        place = T.if_then_else(c.in_place[dest] == 1, place, rank_row)
        source[0] = T.if_then_else(place >= 0, dest * c.capacity + place, -1)


def _row_address(s: CombineSpec, c: SimpleNamespace, row: ep.Expr, source: ep.Expr) -> ep.Expr:
    if s.pushed:
        return ep.at(c.own + ep.u64(c.rows_at), row * s.num_ranks + source // c.capacity, s.row_bytes)
    return ep.at(c.peer_rows[source // c.capacity], source % c.capacity, s.row_bytes)


@T.macro
def _return_weights(s, c):
    """Selection k's weight comes back from the rank of selection k; 0 where there is none."""
    K = s.num_topk
    entry = T.alloc_var("int64")
    place = T.alloc_var("int64")
    row = T.alloc_var("int32")
    expert = T.alloc_var("int32")
    weight = T.alloc_var("float32")
    entry = T.int64(c.block * s.threads + c.tid)
    while entry < T.int64(c.num_tokens) * K:
        row = ep.get(ep.at(c.rows, entry, 4), "int32")
        weight = T.float32(0)
        expert = -1
        if row >= 0:
            expert = expert_of(s, c, entry // T.int64(K), entry % T.int64(K))
        if expert >= 0:
            place = entry % T.int64(K) + T.int64(row) * K
            if s.expanded:
                place = T.int64(row)
            weight = ep.get(ep.at(c.peers[rank_of(expert, s.partition)] + ep.u64(c.weights_at), place, 4), "float32")
        ep.put(ep.at(c.out_weights, entry, 4), weight, "float32")
        entry = entry + T.int64(c.num_blocks * s.threads)
