"""Stages 1 and 2 of dispatch: who goes where, and the exchange of counts that says which row is whose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from tile_ep.kernels import primitives as ep
from tile_ep.layout import MAX_TOPK, ExpertPartition

PHASE_ENTRY, PHASE_COUNTS = 1, 2
AHEAD = 8  # loads of topk_idx that a lane has under way


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


def selection(s: Any, c: SimpleNamespace, token: ep.Expr, k: ep.Expr) -> ep.Expr:
    """Entry of topk_idx, as int64."""
    address = ep.at(c.topk_idx, T.int64(token) * s.num_topk + k, s.index_bytes)
    return T.cast(ep.get(address, s.index_dtype), "int64")


def expert_of(s: Any, c: SimpleNamespace, token: ep.Expr, k: ep.Expr) -> ep.Expr:
    """Entry of topk_idx, -1 where it names no expert: the caller may own the memory, and have changed it since the count."""
    return ep.index(selection(s, c, token, k), s.num_experts)


def tally(s: Any, c: SimpleNamespace, block: ep.Expr, column: ep.Expr) -> ep.Expr:
    """Address of a tally: before the exchange of a block's own, afterwards (of columns that were scanned) of all earlier."""
    return ep.at(c.own + T.uint64(s.control.tallies), block * s.control.columns + column, 4)


def slot_of(c: SimpleNamespace, region: ep.Expr, slot: ep.Expr) -> ep.Expr:
    """Address of a receive slot in a rank's region."""
    return region + ep.u64(c.slots_at) + ep.u64(slot) * ep.u64(c.slot_bytes)


def _word(s: Any, region_words: ep.Expr, source: ep.Expr, column: ep.Expr) -> ep.Expr:
    return ep.at(region_words, source * (1 + s.control.columns) + column, 8)


def _tokens_at_a_time(s: Any) -> int:
    """Of a warp, a lane for each selection."""
    return MAX_TOPK // s.num_topk


def _first_token(c: SimpleNamespace, warps_on: int) -> ep.Expr:
    """Of the share that this warp counts, or the warp which comes `warps_on` later."""
    return T.min(c.begin + (c.warp + warps_on) * c.share, c.end)


@T.macro
def begin_count(s, c):
    """The first entries of topk_idx are asked for, ahead of everything that has to be waited for."""
    K, group = s.num_topk, _tokens_at_a_time(s)
    token = T.alloc_var("int32")
    token = _first_token(c, 0) + c.lane // K
    for j in T.unroll(AHEAD):
        c.drawn_ahead[j] = T.int64(-1)
        if T.And(c.lane < group * K, token + j * group < _first_token(c, 1)):
            c.drawn_ahead[j] = selection(s, c, token + j * group, c.lane % K)


@T.macro
def count(s, c):
    """1. Count. Afterwards rows[t, k] is -2 - r, where r of this block's earlier tokens share the destination of k (expanded:
    also expanded_rows[t, k], where r earlier selections share its expert), and the block's tallies are out; flags[1] is
    set in the last block to get here, which may read the tallies of all.

    Few tokens: number[t, k] is the r of this warp's share of the tokens, in every block, and base that of earlier warps.
    """
    R, K, group = s.num_ranks, s.num_topk, _tokens_at_a_time(s)
    token = T.alloc_var("int32")
    end = T.alloc_var("int32")
    raw = T.alloc_var("int64")
    expert = T.alloc_var("int32")
    dest = T.alloc_var("int32")
    row = T.alloc_var("int32")
    expanded_row = T.alloc_var("int32")
    tells = c.block == 0 if s.few > 0 else True  # of several blocks that see the same, one
    token = _first_token(c, 0) + c.lane // K
    end = _first_token(c, 1)
    while token - c.lane // K < end:
        raw = c.drawn_ahead[0]
        for j in T.unroll(AHEAD - 1):
            c.drawn_ahead[j] = c.drawn_ahead[j + 1]
        c.drawn_ahead[AHEAD - 1] = T.int64(-1)
        if T.And(c.lane < group * K, token + AHEAD * group < end):
            c.drawn_ahead[AHEAD - 1] = selection(s, c, token + AHEAD * group, c.lane % K)
        expert = ep.index(raw, s.num_experts)
        dest = T.if_then_else(expert >= 0, rank_of(expert, s.partition), -1)
        if T.And(T.And(expert < 0, raw != T.int64(-1)), tells):
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
        if s.expanded:
            # Lanes are in (token, k) order, and so are the rows of an expert.
            fellow = T.match_any_sync(T.if_then_else(expert >= 0, expert, -1 - c.lane))
            expanded_row = -1
            if expert >= 0:
                expanded_row = c.expert_base[c.warp, expert] + ep.lanes_below(fellow, c.lane)
            T.sync_warp()
            if T.And(expert >= 0, ep.lanes_above(fellow, c.lane) == T.uint32(0)):
                c.expert_base[c.warp, expert] = expanded_row + 1
        if T.And(c.lane < group * K, token < end):
            if s.few > 0:
                c.drawn[token * K + c.lane % K] = expert
                c.number[token * K + c.lane % K] = row
                if s.expanded:
                    c.expanded_number[token * K + c.lane % K] = expanded_row
            else:
                ep.put(ep.at(c.rows, T.int64(token) * K + c.lane % K, 4), row, "int32")
                if s.expanded:
                    ep.put(ep.at(c.expanded_rows, T.int64(token) * K + c.lane % K, 4), expanded_row, "int32")
            if s.copies_idx:
                if tells:
                    ep.put(ep.at(c.idx_copy, T.int64(token) * K + c.lane % K, s.index_bytes), raw, s.index_dtype)
        if not s.expanded:
            if expert >= 0:
                T.atomic_add(c.totals[R + expert], 1)
        T.sync_warp()
        token = token + group
    T.sync_threads()
    _scan_warps(s, c)
    if s.few == 0:
        _rows_of_block(s, c)
        _publish(s, c)


@T.macro
def _scan_warps(s, c):
    """base[warp, d], expert_base[warp, e]: of earlier warps, not of the warp; totals: of the block."""
    i = T.alloc_var("int32")
    number = T.alloc_var("int32")
    running = T.alloc_var("int32")
    i = c.tid
    while i < s.num_ranks:
        running = 0
        for w in T.serial(s.num_warps):
            number = c.base[w, i]
            c.base[w, i] = running
            running = running + number
        c.totals[i] = running
        i = i + s.threads
    if s.expanded:
        i = c.tid
        while i < s.num_experts:
            running = 0
            for w in T.serial(s.num_warps):
                number = c.expert_base[w, i]
                c.expert_base[w, i] = running
                running = running + number
            c.totals[s.num_ranks + i] = running
            i = i + s.threads
    T.sync_threads()


@T.macro
def _rows_of_block(s, c):
    """Numbers within a warp's share of the tokens become numbers within the block's; several are under way at a time."""
    K, batch = s.num_topk, 8
    i = T.alloc_var("int32")
    number = T.alloc_var("int32")
    share = T.alloc_var("int32")
    entry = T.alloc_var("int64")
    row = T.alloc_local((batch,), "int32")
    expanded_row = T.alloc_local((batch,), "int32")
    expert = T.alloc_local((batch,), "int32")
    number = (c.end - c.begin) * K
    i = c.tid
    while i < number:
        for j in T.unroll(batch):
            entry = T.int64(c.begin) * K + i + j * s.threads
            row[j] = -1
            if i + j * s.threads < number:
                row[j] = ep.get(ep.at(c.rows, entry, 4), "int32")
                expert[j] = expert_of(s, c, c.begin, i + j * s.threads)
                if s.expanded:
                    expanded_row[j] = ep.get(ep.at(c.expanded_rows, entry, 4), "int32")
        for j in T.unroll(batch):
            entry = T.int64(c.begin) * K + i + j * s.threads
            share = T.truncdiv((i + j * s.threads) // K, c.share)
            if T.And(row[j] >= 0, expert[j] >= 0):
                ep.put(ep.at(c.rows, entry, 4), -2 - row[j] - c.base[share, rank_of(expert[j], s.partition)], "int32")
                if s.expanded:
                    ep.put(
                        ep.at(c.expanded_rows, entry, 4),
                        -2 - expanded_row[j] - c.expert_base[share, expert[j]], "int32",
                    )  # fmt: skip
        i = i + batch * s.threads


@T.macro
def _publish(s, c):
    i = T.alloc_var("int32")
    i = c.tid
    while i < s.columns:
        ep.put(tally(s, c, c.block, i), c.totals[i], "int32")
        i = i + s.threads
    ep.arrive_block(c, c.own + T.uint64(s.control.count_arrivals))


@T.macro
def _scan_tallies(s, c, column, total):
    """`total[0]`: the tallies of all blocks. Those by which rows are placed become sums over earlier blocks. As many loads as a
    collective usually has blocks are in flight at a time.
    """
    batch = 16
    scanned = s.columns if s.expanded else s.num_ranks
    b = T.alloc_var("int32")
    part = T.alloc_local((batch,), "int32")
    total[0] = 0
    b = 0
    while b < c.num_blocks:
        for j in T.unroll(batch):
            part[j] = 0
            if b + j < c.num_blocks:
                part[j] = ep.get(tally(s, c, b + j, column), "int32")
        for j in T.unroll(batch):
            if T.And(column < scanned, b + j < c.num_blocks):
                ep.put(tally(s, c, b + j, column), total[0], "int32")
            total[0] = total[0] + part[j]
        b = b + batch


@T.macro
def send_counts(s, c):
    """2a. Exchange, sending: one block sends this rank's totals, and leaves to the others where each block's rows start.
    A word with the current epoch also says that its sender has entered, and word 0 names the slot that may be written.

    Few tokens: no block needs anything from another, and word 0 is on its way.
    """
    R, E = s.num_ranks, s.num_experts
    first = 1 if s.few > 0 else 0
    copies = R if s.expanded else 1  # whoever scatters to experts must know where each of their segments starts
    i = T.alloc_var("int32")
    value = T.alloc_var("int32")
    column = T.alloc_var("int32")
    peer = T.alloc_var("int32")
    last = T.alloc_var("int32")
    total = T.alloc_local((1,), "int32")
    last = c.flags[1]
    if last == 1:
        if s.few == 0:
            i = c.tid
            while i < s.columns:
                _scan_tallies(s, c, i, total)
                c.totals[i] = total[0]
                i = i + s.threads
            T.sync_threads()
        i = c.tid
        while i < R * (1 + R - first):
            column = first + i % (1 + R - first)
            value = c.slot
            if column > 0:
                value = c.totals[column - 1]
            send = ep.store_relaxed if s.few > 0 else ep.store_release
            send(
                _word(s, c.peers[i // (1 + R - first)] + T.uint64(s.control.words), c.rank, column),
                ep.tagged(c.epoch, value),
            )
            i = i + s.threads
        i = c.tid
        while i < copies * E:
            peer = i // E if s.expanded else rank_of(i, s.partition)
            ep.store_relaxed(
                _word(s, c.peers[peer] + T.uint64(s.control.words), c.rank, 1 + R + i % E),
                ep.tagged(c.epoch, c.totals[R + i % E]),
            )
            i = i + s.threads


@T.macro
def send_entry(s, c):
    """2a of a cached dispatch, where only the entry and the slot are news, and ahead of the counts of few tokens: the first
    thing that a kernel does, so that it is under way meanwhile.
    """
    i = T.alloc_var("int32")
    if T.And(c.block == 0, ep.has_failed(s, c) == 0):
        i = c.tid
        while i < s.num_ranks:
            ep.store_release(_word(s, c.peers[i] + T.uint64(s.control.words), c.rank, 0), ep.tagged(c.epoch, c.slot))
            i = i + s.threads


@T.macro
def repeat_stats(s, c):
    """Of a cached dispatch: the same selections arrive again."""
    i = T.alloc_var("int32")
    num_local = first_expert(c.rank + 1, s.partition) - first_expert(c.rank, s.partition)
    if c.block == 0:
        i = c.tid
        while i < num_local:
            ep.put(
                ep.at(c.stats, i, 4),
                ep.get(ep.at(c.stats, i, 4), "int32")
                + ep.get(ep.at(c.counts, s.num_ranks + num_local + i, 4), "int32"),
                "int32",
            )
            i = i + s.threads


@T.macro
def receive_words(s, c):
    """2b. Exchange, receiving, in every block: afterwards every peer has entered, so its slot may be written."""
    width = 1 if s.cached else 1 + s.num_ranks
    i = T.alloc_var("int32")
    source = T.alloc_var("int32")
    column = T.alloc_var("int32")
    region = T.alloc_var("uint64")
    got = T.alloc_local((1,), "int64")
    i = c.tid
    while i < s.num_ranks * width:
        source = i // width
        column = i % width
        region = c.peers[source]
        ep.wait_word(s, c, _word(s, c.words, source, column), c.epoch, PHASE_ENTRY, source, got)
        if column == 0:
            c.peer_slot[source] = slot_of(c, region, got[0])
        else:
            c.count[source, column - 1] = T.cast(got[0], "int32")
        i = i + s.threads
    if s.expanded and not s.cached:
        i = c.tid
        while i < s.num_experts:
            _receive_expert(s, c, i)
            i = i + s.threads
    T.sync_threads()


@T.macro
def _receive_expert(s, c, expert):
    """expert_count and expert_start of one expert, by one thread. The words of several ranks are under way at a time."""
    batch = min(8, s.num_ranks)
    first = T.alloc_var("int32")
    count = T.alloc_var("int32")
    start = T.alloc_var("int32")
    come = T.alloc_var("int32")
    got = T.alloc_local((1,), "int64")
    word = T.alloc_local((batch,), "uint64")
    count = 0
    start = 0
    first = 0
    while first < s.num_ranks:
        for j in T.unroll(batch):
            word[j] = T.uint64(0)
            if first + j < s.num_ranks:
                word[j] = ep.peek(_word(s, c.words, first + j, 1 + s.num_ranks + expert))
        for j in T.unroll(batch):
            if first + j < s.num_ranks:
                come = ep.has_come(word[j], c.epoch)
                got[0] = T.cast(word[j] & T.uint64(0xFFFFFFFF), "int64")
                if come == 0:
                    ep.wait_word(
                        s,
                        c,
                        _word(s, c.words, first + j, 1 + s.num_ranks + expert),
                        c.epoch,
                        PHASE_COUNTS,
                        first + j,
                        got,
                    )
                count = count + T.cast(got[0], "int32")
                start = start + T.if_then_else(first + j < c.rank, T.cast(got[0], "int32"), 0)
        first = first + batch
    c.expert_count[expert] = count
    c.expert_start[expert] = start


@T.macro
def place_rows(s, c):
    """2c. start[d], expert_start[e]: the first row of this rank at d, or in the segment of e, after those of earlier ranks;
    needed[d]: the expanded rows of d, -1 if they do not fit.
    """
    i = T.alloc_var("int32")
    running = T.alloc_var("int32")
    i = c.tid
    while i < s.num_ranks:
        running = 0
        for source in T.serial(c.rank):
            running = running + c.count[source, i]
        c.start[i] = running
        i = i + s.threads
    if s.expanded:
        i = c.warp
        while i < s.num_ranks:
            _place_experts(s, c, i)
            i = i + s.num_warps
    T.sync_threads()


@T.macro
def _place_experts(s, c, rank):
    """The segments of a rank's experts, one after the other, by one warp: a lane for each expert."""
    first = T.alloc_var("int32")
    end = T.alloc_var("int32")
    running = T.alloc_var("int32")  # rows of the experts before `first`
    padded = T.alloc_var("int32")
    sum_to = T.alloc_local((1,), "int32")
    first = first_expert(rank, s.partition)
    end = first_expert(rank + 1, s.partition)
    running = 0
    while first < end:
        padded = 0
        if first + c.lane < end:
            padded = T.ceildiv(c.expert_count[first + c.lane], c.alignment) * c.alignment
        _sum_lanes(c, padded, sum_to)
        if first + c.lane < end:
            c.expert_start[first + c.lane] = c.expert_start[first + c.lane] + running + sum_to[0] - padded
        running = running + T.shfl_sync(sum_to[0], 31)
        first = first + 32
    if c.lane == 0:
        c.needed[rank] = running
        if running > T.if_then_else(rank < s.num_experts % s.num_ranks, c.larger_rows, c.smaller_rows):
            c.needed[rank] = -1 - running


@T.macro
def receive_local_counts(s, c):
    """One block learns how many selections each expert of this rank receives. To be done before this rank tells its peers that
    its rows are written: from then on they may send the counts of the next dispatch.
    """
    R = s.num_ranks
    i = T.alloc_var("int32")
    first = T.alloc_var("int32")
    num_local = T.alloc_var("int32")
    got = T.alloc_local((1,), "int64")
    last = T.alloc_var("int32")
    last = c.flags[1]
    first = first_expert(c.rank, s.partition)
    num_local = first_expert(c.rank + 1, s.partition) - first
    if last == 1:
        i = c.tid
        while i < num_local:
            if s.expanded:
                c.local_count[i] = c.expert_count[first + i]
            else:
                c.local_count[i] = 0
            i = i + s.threads
        T.sync_threads()
        if not s.expanded:
            i = c.tid
            while i < R * num_local:
                ep.wait_word(
                    s, c, _word(s, c.words, i // num_local, 1 + R + first + i % num_local),
                    c.epoch, PHASE_COUNTS, i // num_local, got,
                )  # fmt: skip
                T.atomic_add(c.local_count[i % num_local], T.cast(got[0], "int32"))
                i = i + s.threads
            T.sync_threads()


@T.macro
def report_counts(s, c):
    """The same block tells the handle, the statistics and the host."""
    R = s.num_ranks
    i = T.alloc_var("int32")
    value = T.alloc_var("int32")
    num_local = T.alloc_var("int32")
    last = T.alloc_var("int32")
    last = c.flags[1]
    num_local = first_expert(c.rank + 1, s.partition) - first_expert(c.rank, s.partition)
    if last == 1:
        i = c.tid
        while i < num_local:
            value = c.local_count[i]
            ep.put(ep.at(c.counts, R + num_local + i, 4), value, "int32")
            if s.host_counts:
                ep.store_release(ep.at(c.host, 1 + i, 8), ep.said(value))
            if s.has_stats:
                if s.expanded and s.host_counts:
                    _add_where_all_fit(s, c, i, value)
                else:
                    ep.put(ep.at(c.stats, i, 4), ep.get(ep.at(c.stats, i, 4), "int32") + value, "int32")
            i = i + s.threads
        if s.expanded:
            i = c.tid
            while i < R:
                value = T.if_then_else(c.needed[i] < 0, -1 - c.needed[i], c.needed[i])
                ep.put(ep.at(c.counts, R + 2 * num_local + i, 4), value, "int32")
                if s.host_counts:
                    ep.store_release(ep.at(c.host, 2 + num_local + i, 8), ep.said(value))
                else:
                    if c.needed[i] < 0:
                        ep.store_release(ep.at(c.overflow, i, 8), ep.said(value))
                i = i + s.threads
        if c.warp == 0:
            _report_sums(s, c, num_local)


@T.macro
def _add_where_all_fit(s, c, expert, value):
    """To the statistics, unless the host is about to raise: then nothing has been received."""
    fit = T.alloc_var("int32")
    fit = 1
    for r in T.serial(s.num_ranks):
        if c.needed[r] < 0:
            fit = 0
    if fit == 1:
        ep.put(ep.at(c.stats, expert, 4), ep.get(ep.at(c.stats, expert, 4), "int32") + value, "int32")


@T.macro
def _report_sums(s, c, num_local):
    """Sums over ranks and over experts, by one warp: a lane for each."""
    first = T.alloc_var("int32")
    running = T.alloc_var("int32")  # of those before `first`
    number = T.alloc_var("int32")
    padded = T.alloc_var("int32")
    bad = T.alloc_var("int32")
    sum_to = T.alloc_local((1,), "int32")
    running = 0
    first = 0
    while first < s.num_ranks:
        number = 0
        if first + c.lane < s.num_ranks:
            number = c.count[first + c.lane, c.rank]
        _sum_lanes(c, number, sum_to)
        if first + c.lane < s.num_ranks:
            ep.put(ep.at(c.counts, first + c.lane, 4), running + sum_to[0], "int32")
        running = running + T.shfl_sync(sum_to[0], 31)
        first = first + 32
    if s.host_counts:
        if c.lane == 0:
            ep.store_release(c.host, ep.said(running))
    running = 0
    first = 0
    while first < num_local:
        number = 0
        if first + c.lane < num_local:
            number = c.local_count[first + c.lane]
        padded = T.ceildiv(number, c.alignment) * c.alignment
        _sum_lanes(c, padded, sum_to)
        if first + c.lane < num_local:
            ep.put(
                ep.at(c.counts, s.num_ranks + first + c.lane, 4),
                running + sum_to[0] - (padded - number if s.expanded else 0),
                "int32",
            )
        running = running + T.shfl_sync(sum_to[0], 31)
        first = first + 32
    if s.host_counts:
        if c.lane == 0:
            bad = ep.get(c.own + T.uint64(s.control.num_bad), "int32")
            ep.put(c.own + T.uint64(s.control.num_bad), 0, "int32")
            ep.store_release(ep.at(c.host, 1 + num_local, 8), ep.said(bad))


@T.macro
def _sum_lanes(c, value, sum_to):
    """`sum_to[0]`: the sum of this lane's value and those of the lanes below."""
    below = T.alloc_var("int32")
    sum_to[0] = value
    for step in T.unroll(5):
        below = T.shfl_up(sum_to[0], 1 << step)
        sum_to[0] = sum_to[0] + T.if_then_else(c.lane >= 1 << step, below, 0)
