"""Stages 3 and 4 of dispatch: rows to where they belong, and the end.

A kernel's own parameters are not passed to macros as they are: TileLang would rename them.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tile_ep.kernels import primitives as ep
from tile_ep.kernels.counting import expert_of, first_expert, rank_of, slot_of, tally

PHASE_DONE = 3


@T.macro
def first_piece(s, c, item, ticket):
    """`item[0]`: what this warp begins with, the piece of its number among all warps of the rank; few pieces go to many blocks.
    `ticket[0]`, in the first lane: the piece after it, of the next round of all warps.
    """
    item[0] = c.warp * c.num_blocks + c.block
    ticket[0] = item[0] + c.num_blocks * s.num_warps


@T.macro
def take(s, c, counter, ticket, item):
    """`item[0]`: the next piece of this rank's work. After two rounds pieces go to whichever warp gets to them, since SMs
    differ in the bandwidth they get. The one after it is asked for, and looked at next time only.
    """
    item[0] = T.shfl_sync(ticket[0], 0)
    if c.lane == 0:
        ticket[0] = ep.add_relaxed(counter, 1) + 2 * c.num_blocks * s.num_warps


@T.macro
def _look_up(s, c, token):
    """Asks, lane by lane, for what says where the selections of a token go. Nothing past the last token."""
    K = s.num_topk
    entry = T.alloc_var("int64")
    entry = T.int64(token) * K + c.lane
    c.ahead.row[0] = -1
    c.ahead.expanded_row[0] = -1
    c.ahead.expert[0] = -1
    c.ahead.weight[0] = T.float32(0)
    if T.And(c.lane < K, token < c.num_tokens):
        if s.few > 0:
            c.ahead.row[0] = c.number[token * K + c.lane]
            c.ahead.expert[0] = c.drawn[token * K + c.lane]
            if s.expanded:
                c.ahead.expanded_row[0] = c.expanded_number[token * K + c.lane]
        else:
            c.ahead.row[0] = ep.get(ep.at(c.rows, entry, 4), "int32")
            c.ahead.expert[0] = expert_of(s, c, token, c.lane)
            if s.expanded:
                c.ahead.expanded_row[0] = ep.get(ep.at(c.expanded_rows, entry, 4), "int32")
        if s.has_weights:
            c.ahead.weight[0] = ep.get(ep.at(c.topk_weights, entry, 4), "float32")


@T.macro
def _address_token(s, c, token, part, to):
    """Sets `to[0]` to where chunk `part` of the row goes, in the lanes that send it, and to 0 in the others. With the first
    chunk goes all of the row that is not data, and the plan.
    """
    K = s.num_topk
    entry = T.alloc_var("int64")
    expert = T.alloc_var("int32")
    dest = T.alloc_var("int32")
    row = T.alloc_var("int32")  # where the data goes: in the rank layout, or in the segment of the expert
    rank_row = T.alloc_var("int32")
    weight = T.alloc_var("float32")
    region = T.alloc_var("uint64")
    counted_by = T.alloc_var("int32")
    share = T.alloc_var("int32")
    entry = T.int64(token) * K + c.lane
    rank_row = c.ahead.row[0]
    expert = T.if_then_else(rank_row != -1, c.ahead.expert[0], -1)  # which the caller may have changed since
    row = c.ahead.expanded_row[0] if s.expanded else rank_row
    weight = c.ahead.weight[0]
    if s.few > 0:
        share = T.truncdiv(token, c.share)
    else:
        counted_by = T.truncdiv(token, c.block_share)
    dest = T.if_then_else(expert >= 0, rank_of(expert, s.partition), -1)
    same = T.match_any_sync(T.if_then_else(dest >= 0, dest, -1 - c.lane))
    leads = T.And(dest >= 0, ep.lanes_below(same, c.lane) == 0)
    region = T.uint64(0)
    if dest >= 0:
        region = c.peer_slot[dest]
    if not s.cached:
        if s.few > 0:
            if expert >= 0:
                rank_row = rank_row + c.start[dest] + c.base[share, dest]
        elif rank_row < -1:
            rank_row = -2 - rank_row + c.start[dest] + ep.get(tally(s, c, counted_by, dest), "int32")
        if s.expanded:
            if s.few > 0:
                if expert >= 0:
                    row = row + c.expert_start[expert] + c.expert_base[share, expert]
            elif row < -1:
                row = (
                    -2 - row + c.expert_start[expert]
                    + ep.get(tally(s, c, counted_by, s.num_ranks + expert), "int32")
                )  # fmt: skip
            if dest >= 0:
                row = T.if_then_else(c.needed[dest] < 0, -1, row)
        else:
            row = rank_row
        _write_plan(s, c, entry, part, dest, rank_row, row, leads)
    sends = T.And(row >= 0, dest >= 0) if s.expanded else leads
    to[0] = T.if_then_else(sends, ep.at(region, row, s.data_bytes) + ep.u64(part * s.chunk_bytes), T.uint64(0))
    if part == 0:
        if not (s.expanded and s.cached):  # the handle of a cached dispatch has it
            _write_metadata(s, c, token, region, dest, expert, rank_row, row, weight, leads)
        if s.expanded and s.has_weights:
            if sends:
                ep.put(ep.at(region + ep.u64(c.weights_at), row, 4), weight, "float32")
        if s.scale_bytes > 0 or not s.bulk:
            _copy_parts(s, c, token, region, row, sends)


@T.macro
def _write_plan(s, c, entry, part, dest, rank_row, row, leads):
    mask = T.ballot_sync(leads)
    unsaid = c.lane < s.num_topk if s.few > 0 else dest >= 0  # where there are many tokens, the count has said the rest
    if T.And(unsaid, part == 0):
        ep.put(ep.at(c.rows, entry, 4), rank_row, "int32")
        if s.expanded:
            ep.put(ep.at(c.expanded_rows, entry, 4), row, "int32")
    if T.And(leads, part == 0):
        ep.put(
            ep.at(c.sources, entry - c.lane + ep.lanes_below(mask, c.lane), 4),
            dest * (c.max_tokens * s.num_ranks) + rank_row, "int32",
        )  # fmt: skip
    if T.And(T.And(c.lane < s.num_topk, part == 0), c.lane >= T.cast(T.popcount(mask), "int32")):
        ep.put(ep.at(c.sources, entry, 4), -1, "int32")


@T.macro
def _write_metadata(s, c, token, region, dest, expert, rank_row, row, weight, leads):
    """To each destination whence the token comes, and, entry by entry: its experts of this token and all weights, or,
    expanded, the rows of this token there.
    """
    K = s.num_topk
    width, dtype = (4, "int32") if s.expanded else (s.index_bytes, s.index_dtype)
    mask = T.alloc_var("uint32")
    mask = T.cast(T.ballot_sync(leads), "uint32")
    while mask != T.uint32(0):
        leader = ep.first_lane(mask)
        there = T.shfl_sync(region, leader)
        there_row = T.shfl_sync(rank_row, leader)
        there_rank = T.shfl_sync(dest, leader)
        if c.lane < K:
            local = row if s.expanded else expert - first_expert(there_rank, s.partition)
            ep.put(
                ep.at(there + ep.u64(c.idx_at), T.int64(there_row) * K + c.lane, width),
                T.if_then_else(dest == there_rank, local, -1), dtype,
            )  # fmt: skip
            if s.has_weights and not s.expanded:
                ep.put(ep.at(there + ep.u64(c.weights_at), T.int64(there_row) * K + c.lane, 4), weight, "float32")
        if c.lane == 0:
            ep.put(
                ep.at(there + ep.u64(c.source_at), there_row, 8),
                ep.u64(c.rank * c.max_tokens + token) | (ep.u64(c.rank * K + leader) << T.uint64(32)),
                "uint64",
            )
        mask = mask & (mask - T.uint32(1))


@T.macro
def _copy_parts(s, c, token, region, row, sends):
    """What goes by the warp: scales, and data whose size or place the copy engine does not take."""
    mask = T.alloc_var("uint32")
    mask = T.cast(T.ballot_sync(sends), "uint32")
    while mask != T.uint32(0):
        sender = ep.first_lane(mask)
        there = T.shfl_sync(region, sender)
        there_row = T.shfl_sync(row, sender)
        if s.scale_bytes > 0:
            ep.copy_warp(
                ep.at(there + ep.u64(c.scales_at), there_row, s.scale_bytes),
                ep.at(c.x_scales, token, s.scale_bytes), s.scale_bytes,
            )  # fmt: skip
        if not s.bulk:
            ep.copy_warp(ep.at(there, there_row, s.data_bytes), ep.at(c.x, token, s.data_bytes), s.data_bytes)
        mask = mask & (mask - T.uint32(1))


@T.macro
def begin_scatter(s, c):
    """A warp's first piece is known, and fetched, before it is known where it goes."""
    first_piece(s, c, c.item, c.ticket)
    if s.bulk:
        if c.item[0] < c.num_tokens * s.num_chunks:
            _fetch_chunk(s, c, c.item[0], 0)


@T.macro
def abandon_scatter(s, c):
    """Instead of the scatter, where peers have not come: a block must not end while its shared memory is written."""
    if s.bulk:
        if c.item[0] < c.num_tokens * s.num_chunks:
            ep.barrier_wait(c.bars[c.warp, 0], 0)


@T.macro
def scatter_warp(s, c):
    """3. Scatter, by the warp: any row size and alignment."""
    to = T.alloc_local((1,), "uint64")
    _look_up(s, c, c.item[0])
    while c.item[0] < c.num_tokens:
        _address_token(s, c, c.item[0], 0, to)
        take(s, c, c.taken, c.ticket, c.item)
        _look_up(s, c, c.item[0])


@T.macro
def scatter_bulk(s, c):
    """3. Scatter, by the copy engine: each chunk enters a warp's shared memory once and leaves it once per destination. Warps
    take chunks as they get to them. While the stores of one chunk drain, the warp addresses and fetches the next; the
    memory of a chunk is fetched into again only after every lane's stores have read it.
    """
    turn = T.alloc_var("int32")  # chunks this warp has had
    to = T.alloc_local((1,), "uint64")
    turn = 0
    _look_up(s, c, c.item[0] // s.num_chunks)
    while c.item[0] < c.num_tokens * s.num_chunks:
        _address_token(s, c, c.item[0] // s.num_chunks, c.item[0] % s.num_chunks, to)
        ep.barrier_wait(c.bars[c.warp, turn % s.depth], turn // s.depth % 2)
        if to[0] != T.uint64(0):
            ep.push_streamed(to[0], c.stage[c.warp, turn % s.depth, 0], _chunk_size(s, c.item[0] % s.num_chunks))
        ep.push_commit()
        turn = turn + 1
        take(s, c, c.taken, c.ticket, c.item)
        _look_up(s, c, c.item[0] // s.num_chunks)
        if c.item[0] < c.num_tokens * s.num_chunks:
            ep.push_wait_read(s.depth - 1)
            T.sync_warp()
            _fetch_chunk(s, c, c.item[0], turn % s.depth)


@T.macro
def _fetch_chunk(s, c, item, turn):
    if c.lane == 0:
        ep.fetch(
            c.stage[c.warp, turn, 0],
            ep.at(c.x, item // s.num_chunks, s.data_bytes) + ep.u64(item % s.num_chunks * s.chunk_bytes),
            _chunk_size(s, item % s.num_chunks),
            c.bars[c.warp, turn],
        )


def _chunk_size(s: Any, part: ep.Expr) -> ep.Expr:
    last = s.data_bytes - (s.num_chunks - 1) * s.chunk_bytes
    return s.chunk_bytes if last == s.chunk_bytes else T.if_then_else(part == s.num_chunks - 1, last, s.chunk_bytes)


@T.macro
def fill_tail(s, c):
    """Rank layout, rows past the count: they select nothing, weigh nothing, have finite scales. No peer writes there."""
    most = T.alloc_var("int32")
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
    to = slot_of(c, c.own, c.slot)
    bound = T.int64(c.max_tokens) * s.num_ranks * s.num_topk
    entry = T.int64(received) * s.num_topk + c.block * s.threads + c.tid
    while entry < bound:
        ep.put(ep.at(to + ep.u64(c.idx_at), entry, s.index_bytes), -1, s.index_dtype)
        if s.has_weights:
            ep.put(ep.at(to + ep.u64(c.weights_at), entry, 4), T.float32(0), "float32")
        entry = entry + T.int64(c.num_blocks) * s.threads
    if s.scale_bytes > 0:
        most = c.max_tokens * s.num_ranks
        _zero_scales(s, c, received, most)


@T.macro
def _zero_scales(s, c, begin, end):
    """Scales of rows from `begin` to `end`, by all blocks."""
    row = T.alloc_var("int32")
    row = begin + c.block * s.num_warps + c.warp
    while row < end:
        ep.zero_warp(ep.at(slot_of(c, c.own, c.slot) + ep.u64(c.scales_at), row, s.scale_bytes), T.int32(s.scale_bytes))
        row = row + c.num_blocks * s.num_warps


@T.macro
def fill_expanded(s, c):
    """Expanded: zero the rows that alignment adds, where that was asked for; without host synchronisation also weights and
    scales past the last segment. No peer writes there.
    """
    R = s.num_ranks
    num_local = T.alloc_var("int32")
    start = T.alloc_var("int32")
    number = T.alloc_var("int32")
    row = T.alloc_var("int32")
    most = T.alloc_var("int32")
    fits = T.alloc_var("bool")
    to = T.alloc_var("uint64")
    to = slot_of(c, c.own, c.slot)
    num_local = first_expert(c.rank + 1, s.partition) - first_expert(c.rank, s.partition)
    most = T.if_then_else(c.rank < s.num_experts % R, c.larger_rows, c.smaller_rows)
    start = 0
    if s.cached:
        fits = ep.get(ep.at(c.counts, R + 2 * num_local + c.rank, 4), "int32") <= most
    else:
        fits = c.needed[c.rank] >= 0
    if fits:
        for e in T.serial(num_local):
            if s.cached:
                number = ep.get(ep.at(c.counts, R + num_local + e, 4), "int32")
            else:
                number = c.expert_count[first_expert(c.rank, s.partition) + e]
            if s.zero_gaps:
                row = start + number + c.block * s.num_warps + c.warp
                while row < start + T.ceildiv(number, c.alignment) * c.alignment:
                    ep.zero_warp(ep.at(to, row, s.data_bytes), T.int32(s.data_bytes))
                    if s.scale_bytes > 0:
                        ep.zero_warp(ep.at(to + ep.u64(c.scales_at), row, s.scale_bytes), T.int32(s.scale_bytes))
                    if s.has_weights:
                        if c.lane == 0:
                            ep.put(ep.at(to + ep.u64(c.weights_at), row, 4), T.float32(0), "float32")
                    row = row + c.num_blocks * s.num_warps
            start = start + T.ceildiv(number, c.alignment) * c.alignment
    if s.fill_tail:
        if s.has_weights:
            row = start + c.block * s.threads + c.tid
            while row < most:
                ep.put(ep.at(to + ep.u64(c.weights_at), row, 4), T.float32(0), "float32")
                row = row + c.num_blocks * s.threads
        if s.scale_bytes > 0:
            _zero_scales(s, c, start, most)


@T.macro
def announce_done(s, c):
    """4a. Announce: the block's rows are written, and it says so to every peer. It waits for no other block."""
    if s.bulk:
        ep.push_wait_all()
    ep.leave_block(s, c, s.control.done)


@T.macro
def finish(s, c):
    """4b. Finish: once every peer has told this rank that its rows are there, all blocks keep what outlives the slot; of a
    cached dispatch, which keeps nothing, one block alone waits.
    """
    arrived = T.alloc_var("int32")
    waits = c.block == 0 if s.cached else True
    if waits:
        ep.wait_for_all(s, c, s.control.done, c.dispatches + T.uint64(1), PHASE_DONE)
    if not s.cached:
        arrived = T.if_then_else(c.flags[0] == 0, 1, 0)
        if arrived == 1:
            _keep_metadata(s, c, c.src_metadata, slot_of(c, c.own, c.slot) + ep.u64(c.source_at), 8)
            if s.expanded:
                _keep_metadata(s, c, c.row_metadata, slot_of(c, c.own, c.slot) + ep.u64(c.idx_at), 4 * s.num_topk)


@T.macro
def _keep_metadata(s, c, kept, there, width):
    """Copy `width` bytes of each received token out of the slot, which the handle outlives, by all warps of all blocks."""
    i = T.alloc_var("int32")
    received = T.alloc_var("int32")
    share = T.alloc_var("int32")
    received = 0
    for source in T.serial(s.num_ranks):
        received = received + c.count[source, c.rank]
    share = T.ceildiv(received, 4 * s.num_warps * c.num_blocks) * 4  # rows of a warp, in whole 16 bytes
    i = T.min((c.block * s.num_warps + c.warp) * share, received)
    ep.copy_warp_words(
        ep.at(kept, i, width),
        ep.at(there, i, width),
        T.int64(width) * (T.min(i + share, received) - i),
    )
