"""What callers can do to the kernels' buffers without breaking a rule they can see: nothing wild is read or written, nothing
wrong comes back. In the simulator, which knows the bounds of every access.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

import tile_ep
from tile_ep import ArgumentError, Buffer, CapacityError, PeerTimeoutError, reference
from tile_ep.backends.nvlink import _Slots
from tile_ep.worlds.loopback import Loopback
from tile_ep.worlds.simulated import SimulatedWorld

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = 2, 16, 32, 4, 8


def open_ranks(ranks: int = RANKS, **options: Any) -> Loopback:
    sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": EXPERTS}
    return tile_ep.loopback(ranks, **{**sizes, "timeout_s": 30.0, "num_slots": 4, **options})


def draw(seed: int, topk: int = TOPK, experts: int = EXPERTS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    x = [torch.randn(TOKENS, HIDDEN, generator=random).bfloat16() for _ in range(RANKS)]
    return x, [torch.rand(TOKENS, experts, generator=random).topk(topk, 1).indices for _ in range(RANKS)]


# ---------------------------------------------------------------- what a buffer has room for


@pytest.mark.parametrize(
    ("built", "asked"),
    [
        ({"num_topk": 0}, {"do_expand": True}),
        ({}, {"do_expand": True, "expert_alignment": 512}),
        ({"num_experts": 0}, {"num_experts": 1025}),
    ],
    ids=["no num_topk", "alignment", "more experts than words"],
)
def test_what_a_buffer_has_no_room_for_is_refused(built: dict[str, Any], asked: dict[str, Any]) -> None:
    x, idx = draw(1, topk=3, experts=3)

    def dispatch(rank: int, buffer: Buffer) -> None:
        with pytest.raises(ArgumentError, match="at most"):
            buffer.dispatch(x[rank], idx[rank], **asked)

    with open_ranks(**built) as ranks:
        ranks.run(dispatch)


def test_more_experts_than_the_tables_of_a_block_hold_are_refused() -> None:
    x, idx = draw(1)

    def dispatch(rank: int, buffer: Buffer) -> None:
        assert buffer.dispatch(x[rank], idx[rank], num_experts=4000)[3].num_recv_tokens == (
            0 if rank else RANKS * TOKENS
        )
        with pytest.raises(ArgumentError, match="num_experts: got 4000"):
            buffer.dispatch(x[rank], idx[rank], num_experts=4000, do_expand=True)

    with open_ranks(num_experts=4000) as ranks:
        ranks.run(dispatch)


# ---------------------------------------------------------------- overflow that the host hears of late


HOT = torch.tensor([[0, 1, 2, 3]] * TOKENS)  # all on rank 0


def test_an_overflow_is_that_of_its_own_handle() -> None:
    x, idx = draw(2)
    expected = reference.dispatch(x, idx, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, do_expand=True)
    rows: list[Any] = [output.recv_x for output in expected]
    sums = reference.combine(rows, [output.handle for output in expected])

    def both(rank: int, buffer: Buffer) -> None:
        _, _, _, over, _ = buffer.dispatch(x[rank], HOT, do_expand=True, do_cpu_sync=False)
        recv_x, _, _, fits, _ = buffer.dispatch(
            x[rank], idx[rank], do_expand=True, do_cpu_sync=False, expert_alignment=1
        )
        assert isinstance(recv_x, torch.Tensor)
        assert torch.equal(buffer.combine(recv_x, fits)[0], sums[rank].combined_x)
        for _ in range(2):
            with pytest.raises(CapacityError) as caught:
                buffer.combine(torch.zeros(over.num_expanded_tokens, HIDDEN).bfloat16(), over)
            assert caught.value.rows_needed == {0: RANKS * TOKENS * TOPK}
        buffer.reset()
        assert torch.equal(buffer.combine(recv_x, fits)[0], sums[rank].combined_x)

    with open_ranks(expand_factor=1.6) as ranks:
        ranks.run(both)


def test_an_overflow_is_remembered_after_many_other_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tile_ep.backends.nvlink._OVERFLOWS_KEPT", 2)
    x, idx = draw(3)

    def many(rank: int, buffer: Buffer) -> None:
        over = buffer.dispatch(x[rank], HOT, do_expand=True, do_cpu_sync=False)[3]
        for _ in range(3):
            buffer.dispatch(x[rank], idx[rank], do_expand=True, do_cpu_sync=False)
        with pytest.raises(CapacityError):
            buffer.combine(torch.zeros(over.num_expanded_tokens, HIDDEN).bfloat16(), over)

    with open_ranks(expand_factor=1.6) as ranks:
        ranks.run(many)


def test_what_follows_an_overflow_on_a_stream_stays_in_bounds() -> None:
    """Enqueued before the host can hear of it: a combine with weights, and a cached dispatch that zeroes gaps."""
    x, _ = draw(4)
    weights = torch.rand(TOKENS, TOPK)

    def at_once(rank: int, buffer: Buffer) -> torch.Tensor:
        handle = buffer.dispatch(
            x[rank], HOT, weights, do_expand=True, do_cpu_sync=False, do_zero_padding=True, expert_alignment=16
        )[3]
        rows = handle.num_expanded_tokens
        sums, _, _ = buffer.combine(torch.ones(rows, HIDDEN).bfloat16(), handle, torch.ones(rows))
        buffer.dispatch(x[rank], handle=handle, topk_weights=weights, do_expand=True, do_zero_padding=True)
        return sums

    with open_ranks(expand_factor=0.6) as ranks:
        assert ranks.simulation is not None
        with ranks.simulation.queued():
            sums = ranks.run(at_once)
    assert not any(bool(part.any()) for part in sums), "the overflowing rank has brought nothing"


# ---------------------------------------------------------------- memory of the caller


@pytest.mark.parametrize("wrong", [-7, EXPERTS, 1_000_000, 1 << 40])
@pytest.mark.parametrize("do_expand", [False, True], ids=["rank", "expand"])
def test_indices_that_change_after_the_dispatch_are_never_addresses(wrong: int, do_expand: bool) -> None:
    x, idx = draw(5)
    weights = torch.rand(TOKENS, TOPK)

    def changed(rank: int, buffer: Buffer) -> None:
        mine = idx[rank].clone()
        recv_x, _, recv_weights, handle, _ = buffer.dispatch(
            x[rank], mine, weights, do_handle_copy=False, do_expand=do_expand
        )
        assert isinstance(recv_x, torch.Tensor)
        mine[::2] = wrong
        buffer.dispatch(x[rank], handle=handle, topk_weights=weights, do_expand=do_expand)
        buffer.combine(recv_x.clone(), handle, recv_weights)

    with open_ranks() as ranks:
        ranks.run(changed)


def test_the_event_carries_all_that_a_kernel_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the caller could free it while the kernel runs, and get the memory again."""
    launch, end = SimulatedWorld.launch, SimulatedWorld.end
    touched: dict[int, dict[str, int]] = {}
    missing: list[str] = []

    def launching(self: SimulatedWorld, spec: Any, num_blocks: int, arguments: Any) -> None:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        touched[self.rank] = {name: value.data_ptr() for name, value in tensors.items()}
        launch(self, spec, num_blocks, arguments)

    def ending(self: SimulatedWorld, asynchronous: bool, temporaries: tuple[torch.Tensor, ...]) -> Any:
        held = {tensor.data_ptr() for tensor in temporaries}
        for_host = {"host", "status", "overflow"}
        missing.extend(n for n, at in touched[self.rank].items() if at not in held and n not in for_host)
        return end(self, asynchronous, temporaries)

    monkeypatch.setattr(SimulatedWorld, "launch", launching)
    monkeypatch.setattr(SimulatedWorld, "end", ending)
    x, idx = draw(6)
    weights = torch.rand(TOKENS, TOPK)

    def all_calls(rank: int, buffer: Buffer) -> None:
        stats = torch.zeros(EXPERTS // RANKS, dtype=torch.int32)
        for do_expand in (False, True):
            recv_x, _, recv_weights, handle, _ = buffer.dispatch(
                x[rank], idx[rank], weights, stats, do_expand=do_expand
            )
            assert isinstance(recv_x, torch.Tensor)
            buffer.combine(recv_x.clone(), handle, recv_weights, bias=torch.zeros(TOKENS, HIDDEN).bfloat16())
            buffer.dispatch(x[rank], handle=handle, do_expand=do_expand)

    with open_ranks() as ranks:
        ranks.run(all_calls)
    assert not missing


def test_what_was_converted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`previous_event` may lie before the conversion, on the same stream."""
    seen: list[bool] = []
    monkeypatch.setattr(SimulatedWorld, "begin", lambda self, streams: seen.append(streams.inputs_are_new))
    x, idx = draw(7)

    def calls(rank: int, buffer: Buffer) -> None:
        recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank])
        assert isinstance(recv_x, torch.Tensor)
        buffer.combine(recv_x, handle)
        if rank == 0:
            buffer.dispatch(x[rank], idx[rank].t().contiguous().t())
            buffer.combine(recv_x, handle, bias=torch.zeros(HIDDEN, TOKENS).bfloat16().t())

    with open_ranks(1) as ranks:
        ranks.run(lambda rank, buffer: calls(rank, buffer))
    assert seen == [False, False, True, True]


# ---------------------------------------------------------------- the combine input


def test_a_rank_may_write_in_place_alone() -> None:
    """After a combine with no dispatch in between the rank waits for its readers, not for a call of theirs."""
    x, idx = draw(8)

    def one_in_place(rank: int, buffer: Buffer) -> torch.Tensor:
        recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank])
        assert isinstance(recv_x, torch.Tensor)
        kept = recv_x.clone()
        first = buffer.combine(kept, handle)[0]
        rows = buffer.combine_input(handle).copy_(kept) if rank == 0 else kept
        assert torch.equal(buffer.combine(rows, handle)[0], first)
        return first

    with open_ranks(timeout_s=10.0) as ranks:
        ranks.run(one_in_place)


def test_a_reader_that_does_not_come_is_named() -> None:
    x, idx = draw(9)

    def written(rank: int, buffer: Buffer) -> None:
        buffer.dispatch(x[rank], idx[rank])
        recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank])
        assert isinstance(recv_x, torch.Tensor)
        buffer.combine(recv_x, handle)
        if rank == 1:
            backend: Any = buffer._backend
            at = backend._layout.control.read_done
            backend.world.zero(at, 8)  # as if rank 0 were still reading
            with pytest.raises(PeerTimeoutError, match=r"reuse.*collective 3 for rank\(s\) 0"):
                buffer.combine_input(handle)

    with open_ranks(timeout_s=2.0) as ranks:
        ranks.run(written)


def test_minus_zero_read_in_place_is_a_sum_like_any_other() -> None:
    """A rank's sum of one row starts at +0, whether it is made by the rank or by whoever pulls the row."""
    x = torch.zeros(4, HIDDEN).bfloat16()
    idx = torch.tensor([[0], [1], [0], [1]])
    minus = torch.full((4, HIDDEN), -0.0).bfloat16()

    def sums(rank: int, buffer: Buffer) -> list[torch.Tensor]:
        handle = buffer.dispatch(x, idx, do_expand=True)[3]
        rows = torch.full((handle.num_expanded_tokens, HIDDEN), -0.0).bfloat16()
        staged = buffer.combine(rows, handle, bias=minus)[0]
        buffer.barrier()
        in_place = buffer.combine(buffer.combine_input(handle).copy_(rows), handle, bias=minus)[0]
        return [staged, in_place]

    with open_ranks(num_topk=1, num_experts=2) as ranks:
        for staged, in_place in ranks.run(sums):
            assert torch.equal(staged.view(torch.int16), in_place.view(torch.int16))
            assert not staged.view(torch.int16).any(), "+0"


def test_a_slot_of_a_captured_dispatch_is_not_handed_out() -> None:
    """Replays overwrite it, whether or not anything refers to it."""
    slots = _Slots(3)
    captured = slots.take()
    assert slots.may_keep(captured, capturing=True)
    taken = [slots.take() for _ in range(6)]
    assert captured in taken, "rows may land there, and be copied out"
    assert not slots.may_keep(captured, capturing=False)
    assert all(slots.may_keep(slot, capturing=False) for slot in taken if slot != captured)
    assert slots.may_keep(captured, capturing=True)


# ---------------------------------------------------------------- long lives


@pytest.mark.parametrize("start", [2**30 - 1, 2**31 - 2, 2**31, 2**32 - 4, 2**32 - 3, 2**32 - 1, 2**33 - 2])
@pytest.mark.parametrize("do_expand", [False, True], ids=["rank", "expand"])
def test_epochs_wrap(start: int, do_expand: bool) -> None:
    """Words carry the lower half of the epoch. The buffer is as after `start` dispatches and as many combines."""
    x, idx = draw(10)
    expected = reference.dispatch(
        x, idx, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, do_expand=do_expand, expand_factor=8.0
    )
    rows: list[Any] = [output.recv_x for output in expected]
    sums = reference.combine(rows, [output.handle for output in expected])

    def rounds(rank: int, buffer: Buffer) -> None:
        for _ in range(3):
            recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank], do_expand=do_expand)
            assert isinstance(recv_x, torch.Tensor) and torch.equal(recv_x, expected[rank].recv_x)  # type: ignore[arg-type]
            assert torch.equal(buffer.combine(recv_x, handle)[0], sums[rank].combined_x)

    with open_ranks(expand_factor=8.0) as ranks:
        for buffer in ranks:
            backend: Any = buffer._backend
            control, memory = backend._layout.control, backend.world._region
            memory[control.words : control.tallies].view("uint64")[:] = 2 * start << 32 & (1 << 64) - 1
            for tallies in (control.done, control.read_done):
                memory[tallies : tallies + 8 * len(ranks)].view("uint64")[:] = start << 32 & (1 << 64) - 1
        ranks.run(rounds)
