"""Pulling rows and summing them: a ring of chunks per warp, for the sum over ranks and for that over a token's experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from tile_ep.kernels import primitives as ep
from tile_ep.kernels.scattering import first_piece, take

# A job `j` of a warp, besides the spec `s` and the context `c` of the kernel:
#   num_rows     rows to make; each is made in chunks, an item is one chunk of one row
#   counter      where warps take items
#   sources      [num_rows, K] int32: what to sum, lane by lane; negative entries are none
#   load         macro of (s, c, j, row, source) that reads them: `load_sources` or one of the kernel's own
#   wait         macro of (s, c) that has to come before the first row is pulled, or None
#   address      function of (s, c, row, source): where the row to pull is
#   weights      fp32 by source, which each row is multiplied by, or None
#   addend       function of (s, c, source): fp32 that is added to each element of that row first, or None
#   biases       addresses of what the sum starts with, none to two
#   out          function of (s, c, row): where the row goes
#   bars, slot_item, slot_rows, slot_weight   shared memory of the ring


def sum_rows(s: Any, c: SimpleNamespace, j: SimpleNamespace) -> None:
    """Make every row of the job, with all warps of all blocks."""
    if s.bulk:
        _sum_bulk(s, c, j)
    else:
        _sum_warp(s, c, j)


@T.macro
def load_sources(s, c, j, row, source):
    """Sets, per lane, what the row pulls. Nothing past the last row."""
    source[0] = -1
    if T.And(c.lane < s.num_topk, row < j.num_rows):
        source[0] = ep.get(ep.at(j.sources, T.int64(row) * s.num_topk + c.lane, 4), "int32")


@T.macro
def _take_with_rows(s, c, j, ticket, ahead, ahead_source, item, source, mask, acc, value):
    """Take the next item that has rows to pull; `mask[0]` says which lanes name one. An item that has none is finished here.
    What the item after it pulls is asked for, and looked at next time only.
    """
    mask[0] = T.uint32(0)
    item[0] = -1
    while T.And(item[0] < j.num_rows * s.num_chunks, mask[0] == T.uint32(0)):
        if item[0] >= 0:
            _start_sum(s, c, j, item[0], acc, value)
            _write_sum(s, c, j, item[0], acc, value)
        item[0] = ahead[0]
        source[0] = ahead_source[0]
        mask[0] = T.cast(T.ballot_sync(source[0] >= 0), "uint32")
        take(s, c, j.counter, ticket, ahead)
        j.load(s, c, j, ahead[0] // s.num_chunks, ahead_source)


@T.macro
def _sum_bulk(s, c, j):
    """Chunks pass through a ring in the warp's shared memory. As long as the ring has room the warp fetches; else it adds the
    oldest chunk, and the memory of that one is fetched into again after every lane has read it.
    """
    V = s.vector
    fetched = T.alloc_var("int32")  # chunks of rows
    added = T.alloc_var("int32")
    left = T.alloc_var("int32")  # of `summed`, still to add
    summed = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    more = T.alloc_var("bool")  # rows to fetch
    room = T.alloc_var("bool")
    done = T.alloc_var("bool")  # with the rows of `item`
    first = T.alloc_var("bool")
    row = T.alloc_var("int32")
    weight = T.alloc_var("float32")
    item = T.alloc_local((1,), "int32")
    source = T.alloc_local((1,), "int32")
    mask = T.alloc_local((1,), "uint32")
    ticket = T.alloc_local((1,), "int32")
    ahead = T.alloc_local((1,), "int32")  # the item after `item`, and what it pulls
    ahead_source = T.alloc_local((1,), "int32")
    num_rows = T.alloc_var("int32")  # of `item`
    acc = T.alloc_local((s.lane_vectors * V,), "float32")
    none = T.alloc_local((s.lane_vectors * V,), "float32")
    value = T.alloc_local((V,), s.dtype)
    fetched = 0
    added = 0
    left = 0
    first_piece(s, c, ahead, ticket)
    j.load(s, c, j, ahead[0] // s.num_chunks, ahead_source)
    _take_with_rows(s, c, j, ticket, ahead, ahead_source, item, source, mask, none, value)
    more = item[0] < j.num_rows * s.num_chunks
    if j.wait is not None:
        j.wait(s, c)
        more = T.And(more, c.flags[0] == 0)
    num_rows = T.cast(T.popcount(mask[0]), "int32")
    while T.Or(more, added < fetched):
        room = T.And(more, fetched - added < s.depth)
        if room:
            row = T.shfl_sync(source[0], ep.first_lane(mask[0]))
            mask[0] = mask[0] & (mask[0] - T.uint32(1))
            _fetch_chunk(s, c, j, item[0], num_rows, row, fetched % s.depth)
            fetched = fetched + 1
            done = mask[0] == T.uint32(0)
            if done:
                _take_with_rows(s, c, j, ticket, ahead, ahead_source, item, source, mask, none, value)
                num_rows = T.cast(T.popcount(mask[0]), "int32")
                more = item[0] < j.num_rows * s.num_chunks
        else:
            slot = added % s.depth
            T.sync_warp()
            first = left == 0
            if first:
                summed = j.slot_item[c.warp, slot]
                left = j.slot_rows[c.warp, slot]
                _start_sum(s, c, j, summed, acc, value)
            if j.weights is not None or j.addend is not None:
                weight = j.slot_weight[c.warp, slot]
            ep.barrier_wait(j.bars[c.warp, slot], added // s.depth % 2)
            for v in T.unroll(s.lane_vectors):
                if holds(s, c, summed, v):
                    for i in T.vectorized(V):
                        value[i] = c.stage[c.warp, slot, (v * 32 + c.lane) * V + i]
                    for i in T.unroll(V):
                        if j.weights is not None:
                            acc[v * V + i] = acc[v * V + i] + ep.multiply(T.cast(value[i], "float32"), weight)
                        elif j.addend is not None:
                            acc[v * V + i] = acc[v * V + i] + (T.cast(value[i], "float32") + weight)
                        else:
                            acc[v * V + i] = acc[v * V + i] + T.cast(value[i], "float32")
            T.sync_warp()
            added = added + 1
            left = left - 1
            if left == 0:
                _write_sum(s, c, j, summed, acc, value)


@T.macro
def _fetch_chunk(s, c, j, item, num_rows, row, slot):
    if c.lane == 0:
        j.slot_item[c.warp, slot] = item
        j.slot_rows[c.warp, slot] = num_rows
        ep.fetch(
            c.stage[c.warp, slot, 0],
            j.address(s, c, item // s.num_chunks, row) + ep.u64(item % s.num_chunks * s.chunk_bytes),
            chunk_size(s, item),
            j.bars[c.warp, slot],
        )
        if j.weights is not None:
            j.slot_weight[c.warp, slot] = ep.get(ep.at(j.weights, row, 4), "float32")
        elif j.addend is not None:
            j.slot_weight[c.warp, slot] = j.addend(s, c, row)


def chunk_size(s: Any, item: ep.Expr) -> ep.Expr:
    """Bytes of an item's chunk."""
    if s.last_chunk == s.chunk_bytes:
        return s.chunk_bytes
    return T.if_then_else(item % s.num_chunks == s.num_chunks - 1, s.last_chunk, s.chunk_bytes)


def holds(s: Any, c: SimpleNamespace, item: ep.Expr, v: ep.Expr) -> ep.Expr:
    """Whether this lane's vector `v` of the chunk exists. Known when tracing wherever chunks are full."""
    if s.last_chunk == s.chunk_bytes and s.chunk_bytes % 512 == 0:
        return True
    return (v * 32 + c.lane) * 16 < chunk_size(s, item)


def _vector_address(s: Any, c: SimpleNamespace, row: ep.Expr, item: ep.Expr, v: ep.Expr) -> ep.Expr:
    start = item % s.num_chunks * s.chunk_bytes
    return row + ep.u64(start + (v * 32 + c.lane) * 16)


def _bias_address(s: Any, c: SimpleNamespace, bias: ep.Expr, item: ep.Expr, v: ep.Expr) -> ep.Expr:
    return _vector_address(s, c, ep.at(bias, item // s.num_chunks, s.row_bytes), item, v)


@T.macro
def _start_sum(s, c, j, item, acc, value):
    """The accumulator of this lane's part of a chunk: the first bias or zero, plus the second bias."""
    V = s.vector
    for v in T.unroll(s.lane_vectors):
        for i in T.vectorized(V):
            acc[v * V + i] = 0.0
    if len(j.biases) > 0:
        for v in T.unroll(s.lane_vectors):
            if holds(s, c, item, v):
                ep.get_into(value[0], _bias_address(s, c, j.biases[0], item, v), 16)
                for i in T.unroll(V):
                    acc[v * V + i] = T.cast(value[i], "float32")
    if len(j.biases) > 1:
        for v in T.unroll(s.lane_vectors):
            if holds(s, c, item, v):
                ep.get_into(value[0], _bias_address(s, c, j.biases[1], item, v), 16)
                for i in T.unroll(V):
                    acc[v * V + i] = acc[v * V + i] + T.cast(value[i], "float32")


@T.macro
def _write_sum(s, c, j, item, acc, value):
    """Round this lane's part of a chunk, once, and write it."""
    V = s.vector
    row = T.alloc_var("uint64")
    row = j.out(s, c, item // s.num_chunks)
    for v in T.unroll(s.lane_vectors):
        if holds(s, c, item, v):
            for i in T.vectorized(V):
                value[i] = T.cast(acc[v * V + i], s.dtype)
            ep.put_from(_vector_address(s, c, row, item, v), value[0], 16)


@T.macro
def _sum_warp(s, c, j):
    """Element by element: any row size and alignment."""
    B = s.element_bytes
    more = T.alloc_var("bool")
    element = T.alloc_var("int32")
    row = T.alloc_var("int32")
    total = T.alloc_var("float32")
    rest = T.alloc_var("uint32")
    to = T.alloc_var("uint64")
    mask = T.alloc_var("uint32")
    item = T.alloc_local((1,), "int32")
    source = T.alloc_local((1,), "int32")
    ticket = T.alloc_local((1,), "int32")
    value = T.alloc_local((1,), s.dtype)
    first_piece(s, c, item, ticket)
    more = True
    if j.wait is not None:
        j.wait(s, c)
        more = c.flags[0] == 0
    while more:
        more = item[0] < j.num_rows
        if more:
            j.load(s, c, j, item[0], source)
            mask = T.cast(T.ballot_sync(source[0] >= 0), "uint32")
            to = j.out(s, c, item[0])
            element = c.lane
            while element - c.lane < s.hidden:
                total = T.float32(0)
                if element < s.hidden:
                    if len(j.biases) > 0:
                        ep.get_into(value[0], ep.at(j.biases[0], T.int64(item[0]) * s.hidden + element, B), B)
                        total = T.cast(value[0], "float32")
                    if len(j.biases) > 1:
                        ep.get_into(value[0], ep.at(j.biases[1], T.int64(item[0]) * s.hidden + element, B), B)
                        total = total + T.cast(value[0], "float32")
                rest = mask
                while rest != T.uint32(0):
                    row = T.shfl_sync(source[0], ep.first_lane(rest))
                    if element < s.hidden:
                        ep.get_into(value[0], ep.at(j.address(s, c, item[0], row), element, B), B)
                        if j.weights is not None:
                            total = total + ep.multiply(
                                T.cast(value[0], "float32"), ep.get(ep.at(j.weights, row, 4), "float32")
                            )
                        elif j.addend is not None:
                            total = total + (T.cast(value[0], "float32") + j.addend(s, c, row))
                        else:
                            total = total + T.cast(value[0], "float32")
                    rest = rest & (rest - T.uint32(1))
                if element < s.hidden:
                    value[0] = T.cast(total, s.dtype)
                    ep.put_from(ep.at(to, element, B), value[0], B)
                element = element + 32
            take(s, c, j.counter, ticket, item)
