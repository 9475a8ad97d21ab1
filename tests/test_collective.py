"""The collective backend between processes: results against a plain enumeration, disagreement, lost peers, threads."""

from __future__ import annotations

import resource
import threading
import time
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import Pools

from tile_ep import ArgumentError, Buffer, DestroyedError, DisagreementError, PeerTimeoutError
from tile_ep.backends.collective import CollectiveBackend
from tile_ep.config import make_config
from tile_ep.layout import ExpertPartition, align

# ---------------------------------------------------------------- the plain enumeration


class World:
    """All ranks' inputs, drawn from a seed, and what dispatch and combine must give, row by row."""

    def __init__(self, seed: int, num_ranks: int, num_experts: int, topk: int, hidden: int, most: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.num_ranks, self.num_experts, self.topk, self.hidden, self.most = num_ranks, num_experts, topk, hidden, most
        self.partition = ExpertPartition(num_experts, num_ranks)
        counts = torch.randint(0, most + 1, (num_ranks,), generator=draw).tolist()
        counts[-1] = 0 if num_ranks > 1 else most
        self.x = [torch.randn(count, hidden, generator=draw).bfloat16() for count in counts]
        self.idx = [torch.randint(-1, num_experts, (count, topk), generator=draw) for count in counts]
        self.weights = [torch.rand(count, topk, generator=draw) for count in counts]

    def owner(self, expert: int) -> int:
        return self.partition.rank_of(expert) if expert >= 0 else -1

    def arrivals(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) of each row at `rank`, in order."""
        return [
            (source, token)
            for source in range(self.num_ranks)
            for token, experts in enumerate(self.idx[source].tolist())
            if rank in {self.owner(expert) for expert in experts}
        ]

    def segments(self, rank: int) -> list[list[tuple[int, int, int]]]:
        """(source, token, k) of each row of each local expert of `rank`."""
        first = self.partition.first(rank)
        return [
            [
                (source, token, k)
                for source in range(self.num_ranks)
                for token, experts in enumerate(self.idx[source].tolist())
                for k, expert in enumerate(experts)
                if expert == first + local
            ]
            for local in range(self.partition.num_local(rank))
        ]

    def expert_rows(self, rank: int, source: int, token: int) -> torch.Tensor:
        """Stand-in for an expert's output: depends on the token and on the rank."""
        return (self.x[source][token].float() * (rank + 1) + 0.25).bfloat16()

    def combined(self, rank: int, expanded: bool) -> torch.Tensor:
        out = torch.zeros(len(self.x[rank]), self.hidden)
        for token, experts in enumerate(self.idx[rank].tolist()):
            owners = [self.owner(expert) for expert in experts]
            for owner in dict.fromkeys(o for o in owners if o >= 0):
                row = self.expert_rows(owner, rank, token).float()
                if expanded:
                    part = torch.zeros(self.hidden)
                    for _ in range(owners.count(owner)):
                        part += row
                    row = part.bfloat16().float()
                out[token] += row
        return out.bfloat16()


def rows_of(world: World, sources: list[tuple[int, ...]], of: list[torch.Tensor]) -> torch.Tensor:
    shape = (len(sources), *of[0].shape[1:])
    return torch.stack([of[row[0]][row[1]] for row in sources]) if sources else torch.empty(shape, dtype=of[0].dtype)


def sizes(world: World, **more: Any) -> dict[str, Any]:
    return {
        "num_max_tokens_per_rank": world.most,
        "hidden": world.hidden,
        "num_topk": world.topk,
        "num_experts": world.num_experts,
        "timeout_s": 30,
        **more,
    }


def rank_layout(rank: int, world: World, sync: bool) -> None:
    expected = world.arrivals(rank)
    first = world.partition.first(rank)
    with Buffer(**sizes(world)) as buffer:
        x, idx, w = world.x[rank], world.idx[rank], world.weights[rank]
        stats = torch.full((world.partition.num_local(rank),), 7, dtype=torch.int32)
        recv_x, recv_idx, recv_w, handle, event = buffer.dispatch(x, idx, w, stats, do_cpu_sync=sync)
        assert event.event is None
        n = len(expected)
        assert len(recv_x) == (n if sync else world.num_ranks * world.most)
        assert torch.equal(recv_x[:n], rows_of(world, expected, world.x))
        assert torch.equal(recv_w[:n], rows_of(world, expected, world.weights))
        assert not recv_w[n:].any()
        theirs = rows_of(world, expected, world.idx)
        here = (theirs >= first) & (theirs < world.partition.first(rank + 1))
        assert torch.equal(recv_idx[:n], torch.where(here, theirs - first, -1))
        assert (recv_idx[n:] == -1).all()

        counts = [len(segment) for segment in world.segments(rank)]
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert handle.num_recv_tokens_per_expert_list == (counts if sync else [])
        assert stats.tolist() == [7 + count for count in counts]
        from_rank = [sum(source <= r for source, _ in expected) for r in range(world.num_ranks)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == from_rank
        assert handle.recv_src_metadata[:n, 0].tolist() == [s * world.most + t for s, t in expected]
        first_k = [int(row.nonzero()[0]) for row in here]
        assert handle.recv_src_metadata[:n, 1].tolist() == [
            s * world.topk + k for (s, _), k in zip(expected, first_k, strict=True)
        ]
        assert (handle.recv_src_metadata[:n, 2:] == -1).all()
        for token, experts in enumerate(idx.tolist()):
            for k, expert in enumerate(experts):
                slot = int(handle.dst_buffer_slot_idx[token, k])
                assert slot == (world.arrivals(world.owner(expert)).index((rank, token)) if expert >= 0 else -1)

        y = buffer.combine_input(handle)
        assert y.shape == (len(recv_x), world.hidden)
        y.fill_(torch.nan)  # the tail must not be read
        for row, (source, token) in enumerate(expected):
            y[row] = world.expert_rows(rank, source, token)
        bias = torch.arange(len(x) * world.hidden).reshape(len(x), world.hidden).bfloat16()
        out, out_w, _ = buffer.combine(y, handle, recv_w)
        assert torch.equal(out, world.combined(rank, False))
        assert torch.equal(out_w, torch.where(idx >= 0, w, 0))
        out, none, _ = buffer.combine(y, handle, bias=bias)
        assert none is None
        unselected = (idx == -1).all(dim=1)
        assert torch.equal(out[unselected], bias[unselected])

        again = buffer.dispatch(-x, handle=handle)  # everything else at its default
        assert torch.equal(again[0][:n], -recv_x[:n])
        assert torch.equal(again[1], recv_idx)
        assert again[2] is None and again[3] is handle


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "topk", "hidden", "most"),
    [(1, 1, 1, 1, 3), (1, 5, 3, 7, 6), (2, 2, 2, 64, 5), (3, 64, 8, 5, 9), (4, 6, 3, 3, 8), (16, 35, 4, 9, 6)],
)
def test_rank_layout(
    num_ranks: int, num_experts: int, topk: int, hidden: int, most: int, sync: bool, pools: Pools
) -> None:
    world = World(num_ranks, num_ranks, num_experts, topk, hidden, most)
    pools(num_ranks).run(rank_layout, world, sync)


def expanded_layout(rank: int, world: World, sync: bool, alignment: int) -> None:
    segments = world.segments(rank)
    with Buffer(**sizes(world, expand_factor=1000)) as buffer:
        x, idx, w = world.x[rank], world.idx[rank], world.weights[rank]
        recv_x, recv_idx, recv_w, handle, _ = buffer.dispatch(
            x, idx, w, do_expand=True, do_zero_padding=True, expert_alignment=alignment, do_cpu_sync=sync
        )
        assert recv_idx is None
        start, position = 0, {}
        for local, segment in enumerate(segments):
            end = start + len(segment)
            padded = start + align(len(segment), alignment)
            assert torch.equal(recv_x[start:end], rows_of(world, segment, world.x))
            assert recv_w[start:end].tolist() == [float(world.weights[s][t, k]) for s, t, k in segment]
            assert not recv_x[end:padded].any() and not recv_w[end:padded].any()
            assert int(handle.psum_num_recv_tokens_per_expert[local]) == end
            position.update({where: start + row for row, where in enumerate(segment)})
            start = padded
        assert len(recv_x) == start if sync else len(recv_x) >= start
        assert handle.num_rows_needed[rank] == start
        assert handle.num_recv_tokens_per_expert_list == ([align(len(s), alignment) for s in segments] if sync else [])
        for row, (source, token) in enumerate(world.arrivals(rank)):
            wanted = [position.get((source, token, k), -1) for k in range(world.topk)]
            assert handle.recv_src_metadata[row, 2:].tolist() == wanted
        for token, experts in enumerate(idx.tolist()):
            for k, expert in enumerate(experts):
                there = [align(len(s), alignment) for s in world.segments(world.owner(expert))] if expert >= 0 else []
                local = expert - world.partition.first(world.owner(expert)) if expert >= 0 else 0
                row = int(handle.dst_expanded_idx[token, k])
                if expert < 0:
                    assert row == -1
                else:
                    segment = world.segments(world.owner(expert))[local]
                    assert row == sum(there[:local]) + segment.index((rank, token, k))

        y = torch.full((len(recv_x), world.hidden), torch.nan, dtype=torch.bfloat16)
        for (source, token, _), row in position.items():
            y[row] = world.expert_rows(rank, source, token)
        out, out_w, _ = buffer.combine(y, handle, recv_w)
        assert torch.equal(out, world.combined(rank, True))
        assert torch.equal(out_w, torch.where(idx >= 0, w, 0))

        again = buffer.dispatch(-x, handle=handle, do_expand=True, topk_weights=w, do_zero_padding=True)
        assert torch.equal(again[0][:start], -recv_x[:start]) and torch.equal(again[2], recv_w)
        flat, flat_idx = buffer.dispatch(x, handle=handle)[:2]
        n = len(world.arrivals(rank))
        assert torch.equal(flat[:n], rows_of(world, world.arrivals(rank), world.x))
        assert flat_idx.shape == (len(flat), world.topk)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "topk", "hidden", "most", "alignment"),
    [(1, 1, 2, 1, 3, 1), (1, 5, 3, 7, 6, 4), (3, 7, 3, 5, 9, 1), (4, 6, 3, 3, 8, 16), (16, 35, 4, 9, 6, 3)],
)
def test_expanded_layout(
    num_ranks: int, num_experts: int, topk: int, hidden: int, most: int, alignment: int, sync: bool, pools: Pools
) -> None:
    world = World(num_ranks + 50, num_ranks, num_experts, topk, hidden, most)
    pools(num_ranks).run(expanded_layout, world, sync, alignment)


# ---------------------------------------------------------------- sums


def exact_sums(rank: int, dtype: torch.dtype) -> None:
    """Values whose sum depends on its order, and on rounding only once."""
    with Buffer(num_max_tokens_per_rank=2, hidden=3, num_topk=3, num_experts=3, dtype=torch.float32) as buffer:
        x = torch.zeros(2, 3, dtype=dtype)
        idx = torch.tensor([[2, 0, 1], [-1, -1, -1]])
        _, _, _, handle, _ = buffer.dispatch(x, idx)
        big = {torch.bfloat16: 256.0, torch.float16: 2048.0, torch.float32: 2.0**24}[dtype]
        y = torch.full((handle.num_recv_tokens, 3), [1.0, 1.0, big][rank], dtype=dtype)
        bias = torch.tensor([[-big] * 3, [-0.0] * 3], dtype=dtype)
        out, _, _ = buffer.combine(y, handle, bias=(bias,))
        assert torch.equal(out[0], torch.full((3,), 2.0, dtype=dtype))
        assert torch.equal(torch.signbit(out[1]), torch.ones(3, dtype=torch.bool))  # the bias, to the bit
        twice, _, _ = buffer.combine(y, handle, bias=(bias, bias))
        assert torch.equal(twice[0], torch.full((3,), 2.0 - big, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_fp32_and_in_order(dtype: torch.dtype, pools: Pools) -> None:
    pools(3).run(exact_sums, dtype)


def weighted(rank: int) -> None:
    with Buffer(num_max_tokens_per_rank=1, hidden=2, num_topk=3, num_experts=4) as buffer:
        x = torch.ones(1, 2, dtype=torch.bfloat16)
        idx, w = torch.tensor([[3, 0, 3]]), torch.tensor([[0.5, 2.0, 0.25]])
        recv_x, _, recv_w, handle, _ = buffer.dispatch(x, idx, w, do_expand=True)
        out, back, _ = buffer.combine(recv_x, handle, recv_w, apply_weights=True)
        assert out.tolist() == [[2.75, 2.75]]
        assert torch.equal(back, w)


def test_weights_applied(pools: Pools) -> None:
    pools(2).run(weighted)


# ---------------------------------------------------------------- capacity


def overflow(rank: int, sync: bool) -> str:
    """Every token of every rank to expert 1, which rank 1 holds."""
    with Buffer(num_max_tokens_per_rank=4, hidden=2, num_topk=2, num_experts=3, expand_factor=1.0) as buffer:
        x, idx = torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.int64)
        idx[0, 0] = 0
        assert len(buffer.dispatch(x, idx)[0]) == (3, 12, 0)[rank]  # the rank layout never overflows
        recv_x, _, _, handle, _ = buffer.dispatch(x, idx, do_expand=True, do_cpu_sync=sync)
        assert handle.num_rows_needed.tolist() == [3, 21, 0]
        assert handle.dst_expanded_idx.tolist() == [[rank, -1], [-1, -1], [-1, -1], [-1, -1]]
        assert len(recv_x) == 8
        buffer.combine(recv_x, handle)
    return "combined"


@pytest.mark.parametrize("sync", [True, False])
def test_overflow_is_raised_on_all_ranks(sync: bool, pools: Pools) -> None:
    for outcome in pools(3).outcomes(overflow, sync):
        assert outcome.error == "CapacityError", outcome
        assert "rank 1 needs 21 rows and holds 8" in outcome.message
        assert "expand_factor>=2.63" in outcome.message


def fits_with(rank: int, factor: float) -> int:
    with Buffer(num_max_tokens_per_rank=4, hidden=2, num_topk=2, num_experts=3, expand_factor=factor) as buffer:
        x, idx = torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.int64)
        idx[0, 0] = 0
        recv_x, _, _, handle, _ = buffer.dispatch(x, idx, do_expand=True)
        out, _, _ = buffer.combine(recv_x, handle)
        assert out.tolist() == [[2.0, 2.0]] * 4
        return len(recv_x)


def test_the_factor_that_the_error_names_fits(pools: Pools) -> None:
    assert pools(3).run(fits_with, 2.63) == [3, 21, 0]


# ---------------------------------------------------------------- disagreement, seen at every call


def differ(rank: int, what: str) -> None:
    odd = rank == 1
    topk, hidden, experts = 2, 8, 6
    x = torch.ones(4, 7 if odd and what == "hidden" else hidden, dtype=torch.bfloat16)
    if odd and what == "dtype":
        x = x.half()
    payload = (x, torch.ones(4, 1)) if odd and what == "scales" else x
    idx = torch.zeros(4, 3 if odd and what == "num_topk" else topk, dtype=torch.int64)
    arguments: dict[str, Any] = {"num_experts": 5 if odd and what == "num_experts" else experts}
    if what == "weights":
        arguments["topk_weights"] = None if odd else torch.ones(4, 2)
    if what == "num_max_tokens_per_rank":
        arguments["num_max_tokens_per_rank"] = 4 if odd else 5
    if what == "expert_alignment":
        arguments["expert_alignment"] = 2 if odd else 1
    if what == "do_expand":
        arguments["do_expand"] = odd
    if what == "do_cpu_sync":
        arguments["do_cpu_sync"] = odd
    with Buffer(num_max_tokens_per_rank=5, hidden=8, num_experts=6, timeout_s=20) as buffer:
        if what in ("call", "combine hidden", "handle"):
            first = buffer.dispatch(x, idx, **arguments)[3]
            second = buffer.dispatch(x, idx, **arguments)[3]
            y = torch.ones(first.num_recv_tokens, 4 if odd and what == "combine hidden" else 8, dtype=x.dtype)
            if what == "call" and odd:
                buffer.dispatch(x, handle=first)
            else:
                buffer.combine(y, second if odd and what == "handle" else first)
            return
        try:
            buffer.dispatch(payload, idx, **arguments)
        except DisagreementError:
            buffer.barrier()  # nobody is stuck, and the buffer still works
            raise


@pytest.mark.parametrize(
    ("what", "named", "said"),
    [
        ("num_topk", "num_topk", "rank 0: 2, rank 1: 3, rank 2: 2"),
        ("num_experts", "num_experts", "rank 0: 6, rank 1: 5, rank 2: 6"),
        ("hidden", "bytes of data per row", "rank 0: 16, rank 1: 14, rank 2: 16"),
        ("dtype", "dtype of data", "rank 0: bfloat16, rank 1: float16"),
        ("scales", "bytes of scales per row", "rank 0: 0, rank 1: 4"),
        ("weights", "topk_weights given", "rank 0: True, rank 1: False"),
        ("num_max_tokens_per_rank", "num_max_tokens_per_rank", "rank 0: 5, rank 1: 4"),
        ("expert_alignment", "expert_alignment", "rank 0: 1, rank 1: 2"),
        ("do_expand", "do_expand", "rank 0: False, rank 1: True"),
        ("do_cpu_sync", "do_cpu_sync", "rank 0: False, rank 1: True"),
        ("call", "call", "rank 0: combine, rank 1: cached dispatch"),
        ("combine hidden", "bytes of data per row", "rank 0: 16, rank 1: 8"),
        ("handle", "number of the dispatch that made the handle", "rank 0: "),
    ],
)
def test_calls_that_disagree(what: str, named: str, said: str, pools: Pools) -> None:
    for outcome in pools(3).outcomes(differ, what):
        assert outcome.error == "DisagreementError", outcome.traceback
        assert outcome.attributes["what"] == named
        assert said in outcome.message


# ---------------------------------------------------------------- peers that are late or gone


def skip_a_call(rank: int) -> list[Any]:
    buffer = Buffer(num_max_tokens_per_rank=4, hidden=4, num_topk=1, num_experts=4, timeout_s=1.5)
    x, idx = torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([[0], [3]])
    said: list[Any] = []
    if rank not in (1, 3):
        try:
            buffer.dispatch(x, idx)
        except PeerTimeoutError as error:
            said = [error.rank, error.peers, error.phase, str(error)]
        with pytest.raises(DestroyedError, match=r"unusable since a peer failed it .*rank\(s\) 1, 3.*reset\(\)"):
            buffer.dispatch(x, idx)
    dist.barrier()
    buffer.reset()
    recv_x = buffer.dispatch(x, idx)[0]
    assert len(recv_x) == (4, 0, 0, 4)[rank]
    buffer.destroy()
    return said


def test_ranks_that_skip_a_call_are_named(pools: Pools) -> None:
    started = time.monotonic()
    said = pools(4).run(skip_a_call)
    assert time.monotonic() - started < 10
    for rank in (0, 2):
        assert said[rank][:3] == [rank, [1, 3], "enter dispatch"]
        assert f"rank {rank} waited" in said[rank][3] and "rank(s) 1, 3" in said[rank][3]


def leave(rank: int) -> list[int]:
    """Rank 2 is gone before the call: its connections close."""
    buffer = Buffer(num_max_tokens_per_rank=4, hidden=4, num_topk=1, num_experts=3, timeout_s=20)
    buffer.barrier()
    if rank == 2:
        buffer.destroy()
        return []
    with pytest.raises(PeerTimeoutError) as raised:
        buffer.barrier()
    buffer.destroy()
    return raised.value.peers


def test_a_peer_that_left_is_named_at_once(pools: Pools) -> None:
    started = time.monotonic()
    assert pools(3).run(leave) == [[2], [2], []]
    assert time.monotonic() - started < 10


def late(rank: int) -> int:
    with Buffer(num_max_tokens_per_rank=4, hidden=4, num_topk=1, num_experts=2, timeout_s=20) as buffer:
        if rank == 1:
            time.sleep(1.5)  # past the first look at the clock, within the timeout
        buffer.barrier()
        return len(buffer.dispatch(torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([[0], [1]]))[0])


def test_late_is_not_lost(pools: Pools) -> None:
    assert pools(2).run(late) == [2, 2]


def never_built(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1), backend="gloo")
    if rank == 0:
        Buffer(group, 4, 4)
    time.sleep(2)


def test_a_rank_that_never_builds_its_buffer(pools: Pools) -> None:
    outcomes = pools(2).outcomes(never_built)
    assert outcomes[0].error == "PeerTimeoutError"
    assert "build the Buffer" in outcomes[0].message
    assert outcomes[1].error is None


# ---------------------------------------------------------------- several at once


def two_threads(rank: int) -> None:
    """Two buffers alike, each driven by a thread of its own: their collectives interleave as they like."""
    buffers = [Buffer(num_max_tokens_per_rank=8, hidden=4, num_topk=2, num_experts=5) for _ in range(2)]
    failures: list[BaseException] = []

    def drive(which: int) -> None:
        draw = torch.Generator().manual_seed(10 * rank + which)
        try:
            for _ in range(20):
                tokens = int(torch.randint(0, 9, (1,), generator=draw))
                x = torch.randn(tokens, 4, generator=draw).bfloat16()
                idx = torch.randint(-1, 5, (tokens, 2), generator=draw)
                recv_x, _, _, handle, _ = buffers[which].dispatch(x, idx, do_expand=which == 1)
                out, _, _ = buffers[which].combine(recv_x, handle)
                owner = torch.where(idx < 0, -1, torch.where(idx < 3, 0, 1))
                named = (owner[:, 0] >= 0).int() + ((owner[:, 1] >= 0) & (owner[:, 1] != owner[:, 0])).int()
                times = named if which == 0 else (idx >= 0).sum(1)
                assert torch.equal(out, (x.float() * times[:, None]).bfloat16())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for buffer in buffers:
        buffer.destroy()
    if failures:
        raise failures[0]


def test_two_buffers_in_two_threads(pools: Pools) -> None:
    pools(2).run(two_threads)


def subgroups(rank: int) -> list[int]:
    """Two groups of two ranks, each with its own buffer, and one buffer over all."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    with Buffer(mine, 4, 4, 1, 2) as pair, Buffer(None, 4, 4, 1, 4) as everyone:
        assert (pair.rank, pair.num_ranks, pair.group) == (rank // 2, 2, mine)
        x = torch.full((2, 4), float(rank), dtype=torch.bfloat16)
        other = torch.full((2, 1), 1 - pair.rank)
        to_all = everyone.dispatch(x, torch.full((2, 1), 3 - rank))[0]
        to_pair = pair.dispatch(x, other)[0]
        return [int(to_pair[0, 0]), int(to_all[0, 0])]


def test_two_groups(pools: Pools) -> None:
    assert pools(4).run(subgroups) == [[2, 3], [3, 2], [0, 1], [1, 0]]


def in_flight(rank: int) -> None:
    """Several handles at once, combined in another order than they were made."""
    with Buffer(num_max_tokens_per_rank=6, hidden=2, num_topk=2, num_experts=4) as buffer:
        draw = torch.Generator().manual_seed(rank)
        made = []
        for step in range(5):
            x = torch.randn(step + rank, 2, generator=draw).bfloat16()
            idx = torch.randint(
                0, 4, (step + rank, 2), generator=draw, dtype=(torch.int32, torch.int64, torch.int16)[step % 3]
            )
            recv_x, recv_idx, _, handle, _ = buffer.dispatch(x, idx)
            assert recv_idx.dtype == idx.dtype
            made.append((x, idx, recv_x, handle))
        for x, idx, recv_x, handle in reversed(made):
            out, _, _ = buffer.combine(recv_x, handle)
            both = ((idx[:, 0] < 2) != (idx[:, 1] < 2)).int() + 1
            assert torch.equal(out, (x.float() * both[:, None]).bfloat16())


def test_handles_in_flight_and_changing_index_dtypes(pools: Pools) -> None:
    pools(2).run(in_flight)


def traffic(rank: int) -> Any:
    with Buffer(num_max_tokens_per_rank=4, hidden=8, num_topk=3, num_experts=4) as buffer:
        with pytest.raises(ArgumentError, match="traffic"):
            buffer.traffic()
        idx = torch.tensor([[0, 1, 2], [2, 3, -1], [-1, -1, -1]])
        buffer.dispatch((torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(3, 1)), idx)
        return buffer.traffic()


def test_traffic(pools: Pools) -> None:
    first, second = pools(2).run(traffic)
    assert first.rows_sent_per_rank == second.rows_sent_per_rank == [1, 2]
    assert first.selections_sent_per_rank == [2, 3]
    assert (first.rows_received_per_rank, second.rows_received_per_rank) == ([1, 1], [2, 2])
    assert first.row_bytes == 12
    assert (first.bytes_sent, first.bytes_received, first.bytes_sent_without_dedup) == (24, 12, 36)
    assert (second.bytes_sent, second.bytes_received, second.bytes_sent_without_dedup) == (12, 24, 24)


def uneven(rank: int) -> list[int]:
    with Buffer(num_max_tokens_per_rank=1, hidden=1, num_topk=1, num_experts=256) as buffer:
        received = [
            len(buffer.dispatch(torch.ones(1, 1).half(), torch.tensor([[expert]]))[0])
            for expert in (0, 85, 86, 170, 171, 255)
        ]
    return received


def test_experts_that_do_not_divide_by_ranks(pools: Pools) -> None:
    assert pools(3).run(uneven) == [[3, 3, 0, 0, 0, 0], [0, 0, 3, 3, 0, 0], [0, 0, 0, 0, 3, 3]]


def many_ranks(_: int, num_ranks: int, num_experts: int) -> None:
    """All ranks as threads of this process."""
    limits = make_config(
        num_ranks,
        num_max_tokens_per_rank=4,
        hidden=4,
        num_topk=3,
        num_experts=num_experts,
        dtype=torch.bfloat16,
        max_scale_bytes=None,
        expand_factor=100.0,
        num_slots=2,
        pipeline_depth=2,
        timeout_s=60.0,
    )
    store, failures = dist.HashStore(), []

    def drive(rank: int) -> None:
        try:
            backend = CollectiveBackend(store, rank, num_ranks, limits, torch.device("cpu"))
            with Buffer.from_backend(backend, limits) as buffer:
                x = torch.full((4, 4), float(rank)).bfloat16()
                idx = (torch.arange(12).reshape(4, 3) * 7 + rank) % num_experts
                recv_x, _, _, handle, _ = buffer.dispatch(x, idx, do_expand=True)
                assert torch.equal(buffer.combine(recv_x, handle)[0], 3 * x)
                buffer.barrier()
        except BaseException as error:
            failures.append(error)

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threads = [threading.Thread(target=drive, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_many_ranks(pools: Pools) -> None:
    """No limit on the number of ranks is built in; 72 of them need a full mesh of sockets."""
    needed, hard = 72 * 72 + 512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, the limit is {hard} (ulimit -Hn)")
    pools(1).run(many_ranks, 72, 75)


# ---------------------------------------------------------------- the same code on a GPU, over NCCL

HANDLE_TENSORS = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "dst_expanded_idx",
    "num_rows_needed",
    "topk_idx",
)


def on(device: torch.device, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on(device, part) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def exchange_alone(device: torch.device, case: dict[str, Any], streams: dict[str, Any]) -> list[torch.Tensor]:
    """Dispatch, combine and cached dispatch of one rank; everything that is defined, on the CPU."""
    limits = make_config(
        1,
        num_max_tokens_per_rank=64,
        hidden=256,
        num_topk=6,
        num_experts=12,
        dtype=torch.float32,
        max_scale_bytes=64,
        expand_factor=2.0,
        num_slots=2,
        pipeline_depth=2,
        timeout_s=20.0,
    )
    expand = case["do_expand"]
    with Buffer.from_backend(CollectiveBackend(dist.HashStore(), 0, 1, limits, device), limits) as buffer:
        stats = torch.ones(12, dtype=torch.int32, device=device)
        options = {name: case[name] for name in ("do_expand", "do_cpu_sync", "use_tma_aligned_col_major_sf")}
        x, idx, weights = on(device, (case["x"], case["idx"], case["weights"]))
        recv_x, recv_idx, recv_w, handle, event = buffer.dispatch(
            x, idx, weights, stats, expert_alignment=4, do_zero_padding=True, **options, **streams
        )
        event.current_stream_wait()
        rows = handle.num_expanded_tokens if expand else handle.num_recv_tokens
        y, bias = on(device, (case["y"][:rows], case["bias"]))
        out, out_w, event = buffer.combine(y, handle, recv_w, bias=bias, apply_weights=expand, **streams)
        event.current_stream_wait()
        again = buffer.dispatch(-bias, handle=handle, do_expand=expand, do_zero_padding=True)[0]
        received = list(recv_x) if isinstance(recv_x, tuple) else [recv_x]
        counts = handle.psum_num_recv_tokens_per_expert if expand else handle.psum_num_recv_tokens_per_scaleup_rank
        real = [part[: int(counts[-1])] for part in (*received, again, recv_w, *([] if expand else [recv_idx]))]
        plan = [getattr(handle, name) for name in HANDLE_TENSORS]
        return [part.cpu() for part in (*real, out, out_w, stats, *(part for part in plan if part is not None))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("streams", ["synchronous", "asynchronous", "after an event"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_cuda_equals_cpu(dtype: torch.dtype, streams: str) -> None:
    wide = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    options: dict[str, Any] = {"async_with_compute_stream": streams != "synchronous"}
    for tokens, expand, sync in product([0, 1, 37, 64], [False, True], [False, True]):
        draw = torch.Generator().manual_seed(tokens)
        x: Any = torch.randn(tokens, 200, generator=draw).to(dtype)
        case = {
            "x": (x, torch.rand(tokens, 2, generator=draw)) if dtype == torch.float8_e4m3fn else x,
            "idx": torch.randint(-1, 12, (tokens, 6), generator=draw),
            "weights": torch.rand(tokens, 6, generator=draw),
            "y": torch.randn(1000, 200, generator=draw).to(wide),
            "bias": torch.randn(tokens, 200, generator=draw).to(wide),
            "do_expand": expand,
            "do_cpu_sync": sync,
            "use_tma_aligned_col_major_sf": streams == "asynchronous",
        }
        if streams == "after an event":
            options.update(previous_event=torch.cuda.current_stream().record_event(), allocate_on_comm_stream=True)
        expected = exchange_alone(torch.device("cpu"), case, {})
        got = exchange_alone(torch.device("cuda", torch.cuda.current_device()), case, options)
        for want, have in zip(expected, got, strict=True):
            assert want.dtype == have.dtype and torch.equal(want.float(), have.float())
