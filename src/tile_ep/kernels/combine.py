"""Combine: one launch in which every rank pulls its tokens' rows from the peers and sums them.

Data flow of one block on rank `rank`::

    y -> this rank's combine rows (symmetric)                     1. stage; nothing to do for zero-copy input
    ready word at every peer; ready words of every peer           2. announce
    rows of the token's destinations -> shared memory -> fp32 sum -> out   3. pull and reduce
    read-done word at every peer                                  4. leave

Conditions below never read memory that their own body changes: TileLang distributes an `if` over the statements in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from tile_ep.kernels import primitives as ep
from tile_ep.kernels.dispatch import rank_of
from tile_ep.layout import ROW_ALIGNMENT, ControlLayout, ExpertPartition, align, ceil_div

PHASE_REUSE, PHASE_READY = 4, 5
PHASES = {PHASE_REUSE: "combine input reuse", PHASE_READY: "combine input"}


@dataclass(frozen=True)
class CombineSpec:
    """What a combine kernel is specialised for. Everything else is a run-time argument."""

    num_ranks: int
    num_experts: int
    num_topk: int
    max_experts: int  # of the buffer, which fixes the control block
    index_dtype: str  # of topk_idx
    dtype: str  # of y, the biases and the output: bfloat16, float16 or float32
    hidden: int  # elements of a row
    num_bias: int  # 0, 1 or 2
    has_weights: bool  # bring the received weights back
    staged: bool  # y lies outside the symmetric region and is copied into it first
    bulk: bool  # rows come through shared memory by the copy engine; needs rows and addresses in multiples of 16 bytes
    num_warps: int
    chunk_bytes: int = 16  # of a row in shared memory at a time, a multiple of 16
    depth: int = 2  # chunks a warp holds

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
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def partition(self) -> ExpertPartition:
        return ExpertPartition(self.num_experts, self.num_ranks)

    @property
    def control(self) -> ControlLayout:
        return ControlLayout(self.num_ranks, self.max_experts)

    @property
    def index_bytes(self) -> int:
        return int(self.index_dtype[3:]) // 8

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
    R, W = spec.num_ranks, spec.num_warps
    stage_shape = (
        (W, spec.depth, align(spec.chunk_bytes, ROW_ALIGNMENT) // spec.element_bytes) if spec.bulk else (1, 1, 16)
    )

    @T.prim_func
    def combine(
        peers: T.Tensor((R,), "uint64"),  # address of every rank's region. All addresses below are int64, since
        # TileLang launches take no uint64
        y: T.int64,  # [N, hidden], read when staged
        y_weights: T.int64,  # [N, K] fp32
        bias_0: T.int64,  # [T, hidden]
        bias_1: T.int64,
        topk_idx: T.int64,  # [T, K] index_dtype
        rows: T.int64,  # [T, K] int32, of the handle
        sources: T.int64,  # [T, K] int32, of the handle
        counts: T.int64,  # int32, of the handle: entry R - 1 is N
        out: T.int64,  # [T, hidden]
        out_weights: T.int64,  # [T, K] fp32
        status: T.int64,  # a word per peer: what a wait that gave up waited for
        rank: T.int32,
        num_tokens: T.int32,
        capacity: T.int32,  # rows of a rank, for reading `sources`
        rows_at: T.int64,  # offsets of the combine input and its weights in a region
        weights_at: T.int64,
        timeout_ns: T.int64,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=spec.threads) as block:
            T.import_source(ep.leaves())
            stage = T.alloc_shared(stage_shape, spec.dtype, scope="shared.dyn")
            bars = T.alloc_shared((W, spec.depth), "uint64", scope="shared")
            stage_bars = T.alloc_shared((W, spec.depth), "uint64", scope="shared")
            slot_item = T.alloc_shared((W, spec.depth), "int32", scope="shared")  # what the chunk in a slot belongs to
            flags = T.alloc_shared((3,), "int32", scope="shared")  # a wait gave up; last to stage; last to leave

            tid = T.get_thread_binding()
            epoch = T.alloc_var("uint64")
            own = T.alloc_var("uint64")
            alive = T.alloc_var("int32")
            own = peers[rank]
            epoch = ep.get(own + T.uint64(spec.control.epoch), "uint64") + T.uint64(1)
            c = SimpleNamespace(
                peers=peers, y=ep.u64(y), y_weights=ep.u64(y_weights), bias_0=ep.u64(bias_0), bias_1=ep.u64(bias_1),
                topk_idx=ep.u64(topk_idx), rows=ep.u64(rows), sources=ep.u64(sources), counts=ep.u64(counts),
                out=ep.u64(out), out_weights=ep.u64(out_weights), status=ep.u64(status), rank=rank, capacity=capacity,
                rows_at=rows_at, weights_at=weights_at, timeout_ns=ep.u64(timeout_ns), num_blocks=num_blocks,
                block=block, tid=tid, warp=tid // 32, lane=tid % 32, own=own, epoch=epoch, num_tokens=num_tokens,
                taken=own + T.uint64(spec.control.taken), stage=stage, bars=bars, stage_bars=stage_bars,
                slot_item=slot_item, flags=flags,
            )  # fmt: skip
            _prepare(spec, c)
            if spec.staged or spec.has_weights:
                _wait_reusable(spec, c)
                alive = T.if_then_else(flags[0] == 0, 1, 0)
                if alive == 1:
                    if spec.staged:
                        if spec.bulk:
                            _stage_bulk(spec, c)
                        else:
                            _stage_warp(spec, c)
                    if spec.has_weights:
                        _stage_weights(spec, c)
                    _announce_staged(spec, c)
            else:
                if T.And(block == 0, tid < R):
                    ep.store_release(_ready(spec, c.peers[tid], rank), ep.tagged(epoch, 0))
            _wait_ready(spec, c)
            alive = T.if_then_else(flags[0] == 0, 1, 0)
            if alive == 1:
                if spec.bulk:
                    _reduce_bulk(spec, c)
                else:
                    _reduce_warp(spec, c)
                if spec.has_weights:
                    _return_weights(spec, c)
                _leave(spec, c)

    return combine


def _ready(s: CombineSpec, region: ep.Expr, rank: ep.Expr) -> ep.Expr:
    return ep.at(region + T.uint64(s.control.ready), rank, 8)


@T.macro
def _prepare(s, c):
    if c.tid < 3:
        c.flags[c.tid] = 0
    if s.bulk:
        if c.tid == 0:
            for w in T.serial(s.num_warps):
                for b in T.serial(s.depth):
                    ep.barrier_init(c.bars[w, b], 1)
                    ep.barrier_init(c.stage_bars[w, b], 1)
            ep.barrier_init_fence()
    T.sync_threads()


@T.macro
def _wait_reusable(s, c):
    """Every peer has read what the previous combine left in this rank's rows, so they may be overwritten."""
    previous = T.alloc_var("uint64")
    i = T.alloc_var("int32")
    got = T.alloc_var("int64")
    previous = ep.get(c.own + T.uint64(s.control.combine_epoch), "uint64")
    i = c.tid
    if previous == T.uint64(0):
        i = s.num_ranks
    while i < s.num_ranks:
        got = ep.wait_tag(
            ep.at(c.own + T.uint64(s.control.read_done), i, 8), previous, c.status, PHASE_REUSE, i, c.timeout_ns
        )
        if got < T.int64(0):
            c.flags[0] = 1
        i = i + s.threads
    T.sync_threads()


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
def _stage_warp(s, c):
    """1. Stage, row by row, any size and alignment."""
    row = T.alloc_var("int32")
    received = T.alloc_var("int32")
    received = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32")
    row = c.block * s.num_warps + c.warp
    while row < received:
        ep.copy_warp(ep.at(c.own + ep.u64(c.rows_at), row, s.row_bytes), ep.at(c.y, row, s.row_bytes), s.row_bytes)
        row = row + c.num_blocks * s.num_warps


@T.macro
def _stage_weights(s, c):
    entry = T.alloc_var("int32")
    entries = T.alloc_var("int32")
    entries = ep.get(ep.at(c.counts, s.num_ranks - 1, 4), "int32") * s.num_topk
    entry = c.block * s.threads + c.tid
    while entry < entries:
        ep.put(ep.at(c.own + ep.u64(c.weights_at), entry, 4), ep.get(ep.at(c.y_weights, entry, 4), "uint32"), "uint32")
        entry = entry + c.num_blocks * s.threads


@T.macro
def _announce_staged(s, c):
    """2a. Announce, once every block has staged: the rows are written, then fenced, then counted in."""
    i = T.alloc_var("int32")
    last = T.alloc_var("int32")
    ep.fence_async_global()
    ep.fence()
    T.sync_threads()
    if c.tid == 0:
        c.flags[1] = ep.arrive_last(c.own + T.uint64(s.control.count_arrivals), c.num_blocks)
    T.sync_threads()
    last = c.flags[1]
    if last == 1:
        i = c.tid
        while i < s.num_ranks:
            ep.store_release(_ready(s, c.peers[i], c.rank), ep.tagged(c.epoch, 0))
            i = i + s.threads


@T.macro
def _wait_ready(s, c):
    """2b. In every block: afterwards the rows of every peer may be read."""
    i = T.alloc_var("int32")
    got = T.alloc_var("int64")
    i = c.tid
    while i < s.num_ranks:
        got = ep.wait_tag(_ready(s, c.own, i), c.epoch, c.status, PHASE_READY, i, c.timeout_ns)
        if got < T.int64(0):
            c.flags[0] = 1
        i = i + s.threads
    T.sync_threads()
    ep.fence_async_global()


def _row_address(s: CombineSpec, c: SimpleNamespace, source: ep.Expr) -> ep.Expr:
    return ep.at(c.peers[source // c.capacity] + ep.u64(c.rows_at), source % c.capacity, s.row_bytes)


@T.macro
def _take(c, item):
    """`item[0]`: the next piece of this rank's work, for whichever warp gets to it. SMs differ in the bandwidth they get."""
    item[0] = 0
    if c.lane == 0:
        item[0] = ep.add_relaxed(c.taken, 1)
    item[0] = T.shfl_sync(item[0], 0)


@T.macro
def _load_sources(s, c, token, source, number):
    """Sets, per lane, the row that the token pulls as its `lane`th, and how many there are. -1 and 0 past the last token."""
    source[0] = -1
    if T.And(c.lane < s.num_topk, token < c.num_tokens):
        source[0] = ep.get(ep.at(c.sources, T.int64(token) * s.num_topk + c.lane, 4), "int32")
    number[0] = T.cast(T.popcount(T.cast(T.ballot_sync(source[0] >= 0), "uint32")), "int32")


@T.macro
def _take_with_rows(s, c, item, source, number, acc, value):
    """Take the next item, a chunk of a token's row, that has rows to pull. One that has none is finished here."""
    number[0] = 0
    item[0] = -1
    while T.And(item[0] < c.num_tokens * s.num_chunks, number[0] == 0):
        if item[0] >= 0:
            _start_sum(s, c, item[0], acc, value)
            _write_sum(s, c, item[0], acc, value)
        _take(c, item)
        _load_sources(s, c, item[0] // s.num_chunks, source, number)


@T.macro
def _reduce_bulk(s, c):
    """3. Pull and reduce. Chunks pass through a ring in the warp's shared memory. As long as the ring has room the warp
    fetches; else it adds the oldest chunk, and the memory of that one is fetched into again after every lane has read it.
    """
    V = s.vector
    fetched = T.alloc_var("int32")  # chunks of rows
    added = T.alloc_var("int32")
    dest = T.alloc_var("int32")  # of `item`, the next to fetch
    left = T.alloc_var("int32")  # of `summed`, still to add
    summed = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    more = T.alloc_var("bool")  # rows to fetch
    room = T.alloc_var("bool")
    done = T.alloc_var("bool")  # with the rows of `item`
    first = T.alloc_var("bool")
    row = T.alloc_var("int32")
    item = T.alloc_local((1,), "int32")
    source = T.alloc_local((1,), "int32")
    number = T.alloc_local((1,), "int32")
    old_source = T.alloc_local((1,), "int32")
    old_number = T.alloc_local((1,), "int32")
    acc = T.alloc_local((s.lane_vectors * V,), "float32")
    none = T.alloc_local((s.lane_vectors * V,), "float32")
    value = T.alloc_local((V,), s.dtype)
    fetched = 0
    added = 0
    left = 0
    dest = 0
    number[0] = 0
    more = True
    while T.Or(more, added < fetched):
        room = T.And(more, fetched - added < s.depth)
        if room:
            done = dest == number[0]
            if done:
                _take_with_rows(s, c, item, source, number, none, value)
                more = item[0] < c.num_tokens * s.num_chunks
                dest = 0
            if more:
                row = T.shfl_sync(source[0], dest)
                _fetch_chunk(s, c, item[0], row, fetched % s.depth)
                fetched = fetched + 1
                dest = dest + 1
        else:
            slot = added % s.depth
            first = left == 0
            if first:
                T.sync_warp()
                summed = c.slot_item[c.warp, slot]
                _load_sources(s, c, summed // s.num_chunks, old_source, old_number)
                _start_sum(s, c, summed, acc, value)
                left = old_number[0]
            ep.barrier_wait(c.bars[c.warp, slot], added // s.depth % 2)
            for v in T.unroll(s.lane_vectors):
                if _holds(s, c, summed, v):
                    for i in T.vectorized(V):
                        value[i] = c.stage[c.warp, slot, (v * 32 + c.lane) * V + i]
                    for i in T.unroll(V):
                        acc[v * V + i] = acc[v * V + i] + T.cast(value[i], "float32")
            T.sync_warp()
            added = added + 1
            left = left - 1
            if left == 0:
                _write_sum(s, c, summed, acc, value)


@T.macro
def _fetch_chunk(s, c, item, row, slot):
    if c.lane == 0:
        c.slot_item[c.warp, slot] = item
        ep.fetch(
            c.stage[c.warp, slot, 0],
            _row_address(s, c, row) + ep.u64(item % s.num_chunks * s.chunk_bytes),
            _chunk_size(s, item),
            c.bars[c.warp, slot],
        )


def _chunk_size(s: CombineSpec, item: ep.Expr) -> ep.Expr:
    if s.last_chunk == s.chunk_bytes:
        return s.chunk_bytes
    return T.if_then_else(item % s.num_chunks == s.num_chunks - 1, s.last_chunk, s.chunk_bytes)


def _holds(s: CombineSpec, c: SimpleNamespace, item: ep.Expr, v: ep.Expr) -> ep.Expr:
    """Whether this lane's vector `v` of the chunk exists. Known when tracing wherever chunks are full."""
    if s.last_chunk == s.chunk_bytes and s.chunk_bytes % 512 == 0:
        return True
    return (v * 32 + c.lane) * 16 < _chunk_size(s, item)


def _vector_address(s: CombineSpec, c: SimpleNamespace, base: ep.Expr, item: ep.Expr, v: ep.Expr) -> ep.Expr:
    start = item % s.num_chunks * s.chunk_bytes
    return ep.at(base, item // s.num_chunks, s.row_bytes) + ep.u64(start + (v * 32 + c.lane) * 16)


@T.macro
def _start_sum(s, c, item, acc, value):
    """The accumulator of this lane's part of a chunk: the first bias or zero, plus the second bias."""
    V = s.vector
    for v in T.unroll(s.lane_vectors):
        for i in T.vectorized(V):
            acc[v * V + i] = 0.0
    if s.num_bias > 0:
        for v in T.unroll(s.lane_vectors):
            if _holds(s, c, item, v):
                ep.get_into(value[0], _vector_address(s, c, c.bias_0, item, v), 16)
                for i in T.unroll(V):
                    acc[v * V + i] = T.cast(value[i], "float32")
    if s.num_bias > 1:
        for v in T.unroll(s.lane_vectors):
            if _holds(s, c, item, v):
                ep.get_into(value[0], _vector_address(s, c, c.bias_1, item, v), 16)
                for i in T.unroll(V):
                    acc[v * V + i] = acc[v * V + i] + T.cast(value[i], "float32")


@T.macro
def _write_sum(s, c, item, acc, value):
    """Round this lane's part of a chunk, once, and write it."""
    V = s.vector
    for v in T.unroll(s.lane_vectors):
        if _holds(s, c, item, v):
            for i in T.vectorized(V):
                value[i] = T.cast(acc[v * V + i], s.dtype)
            ep.put_from(_vector_address(s, c, c.out, item, v), value[0], 16)


@T.macro
def _reduce_warp(s, c):
    """3. Pull and reduce, element by element: any row size and alignment."""
    B = s.element_bytes
    token = T.alloc_var("int32")
    element = T.alloc_var("int32")
    dest = T.alloc_var("int32")
    from_row = T.alloc_var("int32")
    total = T.alloc_var("float32")
    source = T.alloc_local((1,), "int32")
    number = T.alloc_local((1,), "int32")
    value = T.alloc_local((1,), s.dtype)
    taken = T.alloc_local((1,), "int32")
    _take(c, taken)
    token = taken[0]
    while token < c.num_tokens:
        _load_sources(s, c, token, source, number)
        element = c.lane
        while element - c.lane < s.hidden:
            total = T.float32(0)
            if element < s.hidden:
                if s.num_bias > 0:
                    ep.get_into(value[0], ep.at(c.bias_0, T.int64(token) * s.hidden + element, B), B)
                    total = T.cast(value[0], "float32")
                if s.num_bias > 1:
                    ep.get_into(value[0], ep.at(c.bias_1, T.int64(token) * s.hidden + element, B), B)
                    total = total + T.cast(value[0], "float32")
            dest = 0
            while dest < number[0]:
                from_row = T.shfl_sync(source[0], dest)
                if element < s.hidden:
                    ep.get_into(value[0], ep.at(_row_address(s, c, from_row), element, B), B)
                    total = total + T.cast(value[0], "float32")
                dest = dest + 1
            if element < s.hidden:
                value[0] = T.cast(total, s.dtype)
                ep.put_from(ep.at(c.out, T.int64(token) * s.hidden + element, B), value[0], B)
            element = element + 32
        _take(c, taken)
        token = taken[0]


@T.macro
def _return_weights(s, c):
    """Selection k's weight comes back from the rank of selection k; 0 where there is none."""
    K = s.num_topk
    entry = T.alloc_var("int64")
    row = T.alloc_var("int32")
    expert = T.alloc_var("int32")
    weight = T.alloc_var("float32")
    entry = T.int64(c.block * s.threads + c.tid)
    while entry < T.int64(c.num_tokens) * K:
        row = ep.get(ep.at(c.rows, entry, 4), "int32")
        weight = T.float32(0)
        if row >= 0:
            expert = T.cast(ep.get(ep.at(c.topk_idx, entry, s.index_bytes), s.index_dtype), "int32")
            weight = ep.get(
                ep.at(
                    c.peers[rank_of(expert, s.partition)] + ep.u64(c.weights_at),
                    T.int64(row) * K + entry % T.int64(K), 4,
                ),
                "float32",
            )  # fmt: skip
        ep.put(ep.at(c.out_weights, entry, 4), weight, "float32")
        entry = entry + T.int64(c.num_blocks * s.threads)


@T.macro
def _leave(s, c):
    """4. Leave. All blocks have read; the last one tells every peer that its rows may be overwritten, and waits for nobody."""
    i = T.alloc_var("int32")
    last = T.alloc_var("int32")
    T.sync_threads()
    if c.tid == 0:
        c.flags[2] = ep.arrive_last(c.own + T.uint64(s.control.finish_arrivals), c.num_blocks)
    T.sync_threads()
    last = c.flags[2]
    if last == 1:
        i = c.tid
        while i < s.num_ranks:
            ep.store_release(ep.at(c.peers[i] + T.uint64(s.control.read_done), c.rank, 8), ep.tagged(c.epoch, 0))
            i = i + s.threads
        if c.tid == 0:
            ep.put(c.taken, 0, "uint32")
            ep.put(c.own + T.uint64(s.control.combine_epoch), c.epoch, "uint64")
            ep.put(c.own + T.uint64(s.control.epoch), c.epoch, "uint64")
