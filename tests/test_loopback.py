"""Buffers whose ranks share a process: what only the kernels' backend does. In the simulator."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

import tile_ep
from tile_ep import ArgumentError, Buffer, PeerTimeoutError, StaleHandleError, reference
from tile_ep.kernels.launcher import KernelSpec
from tile_ep.kernels.tuning import SIMULATOR
from tile_ep.worlds.loopback import Loopback
from tile_ep.worlds.simulated import SimulatedWorld

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 6, 64, 2, 6
Exchange = tuple[list[torch.Tensor], list[torch.Tensor], list[reference.DispatchOutput]]


def open_ranks(**options: Any) -> Loopback:
    sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": EXPERTS}
    return tile_ep.loopback(RANKS, **{**sizes, "timeout_s": 60.0, **options})


def draw(seed: int) -> Exchange:
    random = torch.Generator().manual_seed(seed)
    x = [torch.randn(TOKENS - rank, HIDDEN, generator=random).bfloat16() for rank in range(RANKS)]
    idx = [torch.rand(TOKENS - rank, EXPERTS, generator=random).topk(TOPK, 1).indices for rank in range(RANKS)]
    return x, idx, reference.dispatch(x, idx, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS)


def exchange(drawn: Exchange, rank: int, buffer: Buffer) -> torch.Tensor:
    x, idx, expected = drawn
    recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank])
    assert isinstance(recv_x, torch.Tensor) and torch.equal(recv_x, expected[rank].recv_x)  # type: ignore[arg-type]
    return buffer.combine(recv_x, handle)[0]


def test_results_outlive_any_number_of_dispatches() -> None:
    """With two slots only one result can be a view; the others are copies, and none changes."""
    drawn = [draw(seed) for seed in range(5)]

    def many(rank: int, buffer: Buffer) -> None:
        kept = [buffer.dispatch(x[rank], idx[rank])[0] for x, idx, _ in drawn]
        for recv_x, (_, _, expected) in zip(kept, drawn, strict=True):
            assert torch.equal(recv_x, expected[rank].recv_x)  # type: ignore[arg-type]

    with open_ranks() as ranks:
        ranks.run(many)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_views_are_handed_out_while_a_slot_stays_free(num_slots: int) -> None:
    drawn = draw(1)

    def views(rank: int, buffer: Buffer) -> list[bool]:
        base = buffer._backend.world.base  # type: ignore[union-attr]
        kept = [buffer.dispatch(drawn[0][rank], drawn[1][rank])[0] for _ in range(4)]
        return [base <= recv_x.data_ptr() < base + buffer.num_bytes for recv_x in kept]  # type: ignore[union-attr]

    with open_ranks(num_slots=num_slots) as ranks:
        assert ranks.run(views) == [[n < num_slots - 1 for n in range(4)]] * RANKS


def test_a_slot_is_free_again_when_the_last_view_of_it_is_gone() -> None:
    drawn = draw(2)

    def reuse(rank: int, buffer: Buffer) -> None:
        base = buffer._backend.world.base  # type: ignore[union-attr]
        for _ in range(5):
            recv_x = buffer.dispatch(drawn[0][rank], drawn[1][rank])[0]
            part = recv_x[:1, 3:]  # type: ignore[index]
            del recv_x
            assert base <= part.data_ptr() < base + buffer.num_bytes
            del part
            gc.collect()

    with open_ranks() as ranks:
        ranks.run(reuse)


def test_an_absent_rank_is_named_and_reset_mends_the_buffer() -> None:
    drawn = draw(3)

    def without_one(rank: int, buffer: Buffer) -> PeerTimeoutError | None:
        if rank == 1:
            return None
        with pytest.raises(PeerTimeoutError) as caught:
            exchange(drawn, rank, buffer)
        return caught.value

    with open_ranks() as ranks:  # compiles, which may take long
        ranks.run(lambda rank, buffer: exchange(drawn, rank, buffer))
    with open_ranks(timeout_s=5.0) as ranks:
        ranks.run(lambda rank, buffer: exchange(drawn, rank, buffer))
        errors = ranks.run(without_one)
        for rank in (0, 2):
            error = errors[rank]
            assert error is not None and (error.rank, error.peers, error.phase) == (rank, [1], "dispatch entry")
            with pytest.raises(tile_ep.DestroyedError, match="reset"):
                ranks[rank].dispatch(drawn[0][rank], drawn[1][rank])
        ranks.run(lambda rank, buffer: buffer.reset())
        outputs = ranks.run(lambda rank, buffer: exchange(drawn, rank, buffer))
        assert all(output.shape == x.shape for output, x in zip(outputs, drawn[0], strict=True))


def test_a_rank_absent_from_combine_is_named() -> None:
    drawn = draw(4)

    def leave(rank: int, buffer: Buffer) -> PeerTimeoutError | None:
        recv_x, _, _, handle, _ = buffer.dispatch(drawn[0][rank], drawn[1][rank])
        if rank == 2:
            return None
        with pytest.raises(PeerTimeoutError) as caught:
            buffer.combine(recv_x, handle)  # type: ignore[arg-type]
            buffer.barrier()
        return caught.value

    with open_ranks() as ranks:  # compiles, which may take long
        ranks.run(lambda rank, buffer: exchange(drawn, rank, buffer))
    with open_ranks(timeout_s=5.0) as ranks:
        errors = ranks.run(leave)
        assert [error and (error.peers, error.phase) for error in errors] == [([2], "combine input")] * 2 + [None]


def test_a_combine_input_is_stale_once_another_was_asked_for_or_it_was_combined() -> None:
    drawn = draw(5)

    def stale(rank: int, buffer: Buffer) -> None:
        recv_x, _, _, first, _ = buffer.dispatch(drawn[0][rank], drawn[1][rank])
        second = buffer.dispatch(drawn[0][rank], drawn[1][rank])[3]
        old = buffer.combine_input(first)
        new = buffer.combine_input(second)
        with pytest.raises(StaleHandleError, match="combine_input"):
            buffer.combine(old, first)
        new.copy_(recv_x)  # type: ignore[arg-type]
        good = buffer.combine(new, second)[0]
        with pytest.raises(StaleHandleError, match="combine_input"):
            buffer.combine(new, second)
        assert torch.equal(good, buffer.combine(recv_x, first)[0])  # type: ignore[arg-type]

    with open_ranks() as ranks:
        ranks.run(stale)


@pytest.mark.parametrize("apply_weights", [False, True], ids=["plain", "weighted"])
def test_expanded_rows_are_pulled_where_they_are_if_no_token_has_two(apply_weights: bool) -> None:
    """Four experts on three ranks: rank 0 holds two, and sums; ranks 1 and 2 hold one each, and only they read in place."""
    random = torch.Generator().manual_seed(5)
    x = [torch.randn(TOKENS - rank, HIDDEN, generator=random).bfloat16() for rank in range(RANKS)]
    idx = [torch.rand(len(t), 4, generator=random).topk(TOPK, 1).indices for t in x]
    weights = [torch.rand(len(t), TOPK, generator=random) for t in x]
    sent = reference.dispatch(x, idx, weights, num_experts=4, num_max_tokens_per_rank=TOKENS, do_expand=True)
    received: list[Any] = [output.recv_x for output in sent]
    received_weights: list[Any] = [output.recv_topk_weights for output in sent]
    given = received_weights if apply_weights else None
    expected = reference.combine(received, [output.handle for output in sent], given, apply_weights=apply_weights)

    def of_rank(rank: int, buffer: Buffer) -> tuple[bool, bool]:
        recv_x, _, recv_weights, handle, _ = buffer.dispatch(x[rank], idx[rank], weights[rank], do_expand=True)
        assert isinstance(recv_x, torch.Tensor)
        rows = buffer.combine_input(handle)
        again = buffer.combine_input(handle)
        in_place = rows.data_ptr() == again.data_ptr()
        again.copy_(recv_x)
        back = buffer.combine(again, handle, recv_weights if apply_weights else None, apply_weights=apply_weights)
        return in_place, torch.equal(back[0], expected[rank].combined_x)

    with open_ranks(num_experts=4) as ranks:
        assert ranks.run(of_rank) == [(False, True), (True, True), (True, True)]


def test_a_handle_of_another_loopback_is_refused() -> None:
    drawn = draw(6)
    with open_ranks() as one, open_ranks() as other:
        results = one.run(lambda rank, buffer: buffer.dispatch(drawn[0][rank], drawn[1][rank]))
        for rank in range(RANKS):
            with pytest.raises(StaleHandleError):
                other[rank].combine(results[rank][0], results[rank][3])


@pytest.mark.parametrize("num_sms", [9, 1000])
def test_too_many_sms_are_refused_with_the_limit(num_sms: int) -> None:
    drawn = draw(7)

    def ask(rank: int, buffer: Buffer) -> None:
        with pytest.raises(ArgumentError, match=f"num_sms: got {num_sms}, expected at most 8"):
            buffer.dispatch(drawn[0][rank], drawn[1][rank], num_sms=num_sms)

    with open_ranks() as ranks:
        ranks.run(ask)


def test_blocks_may_differ_from_call_to_call() -> None:
    drawn = draw(8)

    def vary(rank: int, buffer: Buffer) -> None:
        outputs = []
        for num_sms in (1, 3, 8, 2):
            recv_x, _, _, handle, _ = buffer.dispatch(drawn[0][rank], drawn[1][rank], num_sms=num_sms)
            outputs.append(buffer.combine(recv_x, handle, num_sms=9 - num_sms)[0])  # type: ignore[arg-type]
        assert all(torch.equal(output, outputs[0]) for output in outputs)

    with open_ranks() as ranks:
        ranks.run(vary)


def test_ranks_can_be_collectives_apart() -> None:
    """Launches line up as on streams: nothing but the protocol keeps the ranks together."""
    drawn = draw(9)
    back = reference.combine([out.recv_x for out in drawn[2]], [out.handle for out in drawn[2]])  # type: ignore[misc]

    def enqueue(rank: int, buffer: Buffer) -> list[torch.Tensor]:
        recv_x, _, _, handle, _ = buffer.dispatch(drawn[0][rank], drawn[1][rank], do_cpu_sync=False)
        return [buffer.combine(recv_x, handle)[0] for _ in range(6)]  # type: ignore[arg-type]

    for seed in range(10):
        with open_ranks(num_slots=4, seed=seed) as ranks:
            assert ranks.simulation is not None
            with ranks.simulation.queued():
                outputs = ranks.run(enqueue)
            assert ranks.simulation.reports[-1].seed == seed
        for rank in range(RANKS):
            assert all(torch.equal(output, back[rank].combined_x) for output in outputs[rank])


def test_wrong_arguments_of_loopback() -> None:
    with pytest.raises(ArgumentError, match="num_ranks: got 0"):
        tile_ep.loopback(0, num_max_tokens_per_rank=1, hidden=1)
    for device in ("cpu", "collective"):
        with pytest.raises(ArgumentError, match=f"device: got '?{device}'?, expected 'sim' or a CUDA device"):
            tile_ep.loopback(1, device, num_max_tokens_per_rank=1, hidden=1)


def test_what_is_queued_behind_a_collective_that_gave_up_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a combine may be queued before the host can know that its dispatch gave up, and left no counts behind."""
    drawn = draw(5)

    def queued(rank: int, buffer: Buffer) -> torch.Tensor | None:
        if rank == 1:
            return None
        backend: Any = buffer._backend
        monkeypatch.setattr(backend, "_check_status", lambda: None)
        recv_x, _, _, handle, _ = buffer.dispatch(drawn[0][rank], drawn[1][rank], do_cpu_sync=False)
        out: torch.Tensor = buffer.combine(recv_x, handle)[0]
        return out

    with open_ranks(timeout_s=5.0) as ranks:
        outputs = ranks.run(queued)
        for rank in (0, 2):
            out = outputs[rank]
            assert out is not None and bool((out.view(torch.uint8) == 0xA5).all())
            status = ranks[rank]._backend._status_view  # type: ignore[union-attr]
            assert status[1] & 0xFFFFFFFF == 1 and not status[[0, 2]].any()  # the dispatch's entry, not the combine


@pytest.mark.parametrize(
    ("num_sms", "beside", "ranks_on_device", "cluster"),
    # 132 SMs: 3 ranks with 26 blocks each leave 14 pairs at worst, with 28 only 10.
    [(2, True, 1, 2), (3, True, 1, 1), (2, False, 1, 1), (26, True, 3, 2), (28, True, 3, 1)],
)
def test_blocks_come_in_clusters_beside_other_work(
    num_sms: int, beside: bool, ranks_on_device: int, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedWorld, "ranks_on_device", ranks_on_device)
    monkeypatch.setattr(SimulatedWorld, "max_blocks", 132 // ranks_on_device)
    launched: set[tuple[str, int]] = set()
    launch = SimulatedWorld.launch

    def note(world: SimulatedWorld, spec: KernelSpec, num_blocks: int, arguments: Any) -> None:
        launched.add((type(spec).__name__, spec.cluster))
        launch(world, spec, num_blocks, arguments)

    monkeypatch.setattr(SimulatedWorld, "launch", note)
    options: dict[str, Any] = {"num_sms": num_sms, "async_with_compute_stream": beside}
    x, idx, expected = draw(3)

    def both(rank: int, buffer: Buffer) -> None:
        recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank], **options)
        assert torch.equal(recv_x, expected[rank].recv_x)  # type: ignore[arg-type]
        buffer.combine(recv_x, handle, **options)

    with open_ranks(tuning=replace(SIMULATOR, cluster=2)) as ranks:
        ranks.run(both)
    assert launched == {("DispatchSpec", cluster), ("CombineSpec", cluster)}
