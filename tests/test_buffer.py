"""`Buffer` as its users see it: payloads, views, dtypes, defaults, sizes, and what importing needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import Pools

import tile_ep
from tile_ep import ArgumentError, Buffer, DestroyedError, EventOverlap
from tile_ep.backends.base import BufferConfig
from tile_ep.backends.collective import CollectiveBackend


def make_alone(**sizes: Any) -> Buffer:
    """A buffer of one rank in this very process."""
    config = BufferConfig(
        **{
            "num_max_tokens_per_rank": 8,
            "hidden": 16,
            "num_topk": 0,
            "num_experts": 0,
            "dtype": torch.float32,
            "max_scale_bytes": 64,
            "expand_factor": 2.0,
            "num_slots": 2,
            "timeout_s": 10.0,
            "pipeline_depth": 2,
            **sizes,
        }
    )
    return Buffer.from_backend(CollectiveBackend(dist.HashStore(), 0, 1, config, torch.device("cpu")), config)


@pytest.fixture
def alone() -> Iterator[Buffer]:
    with make_alone() as buffer:
        yield buffer


def test_public_names() -> None:
    for name in tile_ep.__all__:
        if name != "loopback":
            assert getattr(tile_ep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tile_ep.nonsense  # noqa: B018
    assert tile_ep.__version__


IMPORT_BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tilelang", "tvm", "matplotlib", "typer", "rich", "safetensors"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import torch
import tile_ep
assert not torch.cuda.is_initialized()
print(tile_ep.Buffer.get_buffer_size_hint(8, 128, 64))
try:
    tile_ep.Buffer(num_max_tokens_per_rank=4, hidden=8)
except tile_ep.ArgumentError as error:
    print(error.argument)
try:
    tile_ep.loopback(2, num_max_tokens_per_rank=4, hidden=8)
except tile_ep.BackendUnavailableError as error:
    print("pip install 'tile-ep[gpu]'" in str(error))
"""


def test_import_needs_neither_tilelang_nor_the_cli() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_BLOCKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    size, argument, told = done.stdout.split()
    assert int(size) == Buffer.get_buffer_size_hint(8, 128, 64)
    assert argument == "group"
    assert told == "True"


# ---------------------------------------------------------------- payloads and views


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8).reshape(len(tensor), -1)


PAYLOADS = {
    "bf16": lambda x: x.bfloat16(),
    "fp16": lambda x: x.half(),
    "fp32": lambda x: x,
    "fp8 with fp32 scales": lambda x: (x.to(torch.float8_e4m3fn), torch.rand(len(x), 1)),
    "fp8 with e8m0 scales": lambda x: (x.to(torch.float8_e5m2), torch.ones(len(x), 4).to(torch.float8_e8m0fnu)),
    "packed 4-bit": lambda x: ((100 * x).to(torch.uint8), torch.randint(0, 256, (len(x), 3), dtype=torch.uint8)),
    "int8 with int32 scales": lambda x: ((100 * x).to(torch.int8), torch.ones(len(x), 5, dtype=torch.int32)),
    "fp64 with bool scales": lambda x: (x[:, :8].double(), x[:, :1] > 0),
}


@pytest.mark.parametrize("col_major", [False, True])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_arrive_to_the_bit(name: str, expand: bool, col_major: bool, alone: Buffer) -> None:
    x = PAYLOADS[name](torch.randn(5, 16))
    idx = torch.tensor([[0], [2], [-1], [1], [0]])
    order = [0, 4, 3, 1] if expand else [0, 1, 3, 4]
    recv = alone.dispatch(x, idx, num_experts=3, do_expand=expand, use_tma_aligned_col_major_sf=col_major)[0]
    for sent, got in zip(
        x if isinstance(x, tuple) else (x,), recv if isinstance(recv, tuple) else (recv,), strict=True
    ):
        assert got.dtype == sent.dtype
        assert torch.equal(as_bytes(got), as_bytes(sent)[order])
    if isinstance(recv, tuple):
        rows = -(-4 * recv[1].element_size() // 16) * 16 // recv[1].element_size()
        assert recv[1].stride() == ((1, rows) if col_major else (recv[1].shape[1], 1))


@pytest.mark.parametrize("hidden", [1, 7, 64, 1024, 2880, 3072, 5120, 7168, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_sizes(hidden: int, dtype: torch.dtype) -> None:
    with make_alone(hidden=hidden, dtype=dtype) as buffer:
        x = torch.randn(3, hidden).to(dtype)
        recv_x, _, _, handle, _ = buffer.dispatch(x, torch.tensor([[0, 1], [1, -1], [-1, -1]]), num_experts=2)
        assert torch.equal(recv_x, x[:2])
        assert torch.equal(buffer.combine(recv_x, handle)[0], torch.cat([x[:2], 0 * x[2:].abs()]))


def test_strided_views(alone: Buffer) -> None:
    wide = torch.randn(16, 8).bfloat16()
    x = wide.t()  # [8, 16], transposed
    idx = torch.stack([torch.arange(8) % 3, torch.full((8,), 99), torch.arange(8) % 2], dim=1)[:, ::2]
    weights = torch.rand(2, 8, dtype=torch.float16).t()
    bias = torch.randn(8, 32).bfloat16()[:, ::2]
    assert not (x.is_contiguous() or idx.is_contiguous() or weights.is_contiguous() or bias.is_contiguous())
    recv_x, recv_idx, recv_w, handle, _ = alone.dispatch(x, idx, weights, num_experts=3)
    assert torch.equal(recv_x, x) and torch.equal(recv_idx, idx)
    assert recv_w.dtype == torch.float32 and torch.equal(recv_w, weights.float())
    out, out_w, _ = alone.combine(recv_x.t().contiguous().t(), handle, recv_w.bfloat16(), bias=bias)
    assert torch.equal(out, (bias.float() + x.float()).bfloat16())
    assert torch.equal(out_w, weights.bfloat16().float())
    scales = torch.rand(3, 8).t()
    (_, recv_scales), *_ = alone.dispatch((x, scales), idx, num_experts=3)
    assert torch.equal(recv_scales, scales)


def test_views_whose_memory_holds_the_negative(alone: Buffer) -> None:
    """`torch._neg_view`, which imaginary parts of conjugates are: contiguous, and the sign is in no byte."""
    x = torch._neg_view(torch.randn(4, 16).bfloat16())
    scales = torch.complex(torch.rand(4, 2), torch.rand(4, 2)).conj()
    weights, bias = torch._neg_view(torch.rand(4, 1)), torch._neg_view(torch.randn(4, 16).bfloat16())
    assert x.is_neg() and x.is_contiguous() and scales.is_conj() and scales.is_contiguous()
    idx = torch.tensor([[0], [1], [0], [1]])
    (recv_x, recv_scales), _, recv_w, handle, _ = alone.dispatch((x, scales), idx, weights, num_experts=2)
    assert torch.equal(recv_x, x) and torch.equal(recv_scales, scales) and torch.equal(recv_w, weights)
    out, out_w, _ = alone.combine(torch._neg_view(recv_x), handle, torch._neg_view(recv_w), bias=bias)
    assert torch.equal(out, (bias.float() - x.float()).bfloat16()) and torch.equal(out_w, -weights)


def test_strides_along_dimensions_of_size_one(alone: Buffer) -> None:
    """PyTorch calls these contiguous, whatever the stride of the dimension of size 1."""
    column = torch.arange(12.0).reshape(3, 4).t()[:, 1:2]  # [4, 1], stride (1, 4)
    scales = torch.rand(3, 4).t()[:, :1]
    idx = torch.tensor([[0, 1, 0, -1], [9, 9, 9, 9]]).t()[:, :1]
    weights = torch.rand(2, 4).t()[:, :1]
    (data, recv_scales), _, recv_w, handle, _ = alone.dispatch((column, scales), idx, weights, num_experts=2)
    assert torch.equal(data, column[:3]) and torch.equal(recv_scales, scales[:3]) and torch.equal(recv_w, weights[:3])
    y = torch.rand(3, 3).t()[:, :1]
    out = alone.combine(y, handle, torch.rand(2, 3).t()[:, :1], bias=torch.rand(2, 4).t()[:, 1:])[0]
    assert out.shape == (4, 1)
    (data, recv_scales), *_ = alone.dispatch(
        (column[:0], scales[:0]), idx[:0], num_experts=2, use_tma_aligned_col_major_sf=True
    )
    assert data.shape == recv_scales.shape == (0, 1)
    nothing = torch.ones(16, 4).t()[:0]  # [0, 16], stride (1, 4)
    assert alone.dispatch(nothing, torch.zeros(0, 1, dtype=torch.int64), num_experts=2)[0].shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_travel_as_fp32(dtype: torch.dtype, alone: Buffer) -> None:
    weights = torch.rand(2, 2).to(dtype)
    recv_w = alone.dispatch(torch.ones(2, 4), torch.zeros(2, 2, dtype=torch.int64), weights, num_experts=1)[2]
    assert recv_w.dtype == torch.float32 and torch.equal(recv_w, weights.float())


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_index_dtype_comes_back(dtype: torch.dtype, sync: bool, alone: Buffer) -> None:
    idx = torch.tensor([[0, -1], [1, 0]], dtype=dtype)
    recv_idx, handle = alone.dispatch(torch.ones(2, 4), idx, num_experts=2, do_cpu_sync=sync)[1::2]
    assert recv_idx.dtype == handle.topk_idx.dtype == dtype
    assert torch.equal(recv_idx[:2], idx)
    assert torch.equal(alone.dispatch(torch.ones(2, 4), handle=handle)[1], recv_idx)


def test_tails_without_host_synchronisation(alone: Buffer) -> None:
    idx = torch.tensor([[0, 1], [-1, -1], [1, -1]])
    payload = (torch.ones(3, 16).to(torch.float8_e4m3fn), torch.full((3, 4), 2.0))
    for expand in (False, True):
        (_, scales), recv_idx, weights, handle, _ = alone.dispatch(
            payload, idx, torch.ones(3, 2), num_experts=2, do_cpu_sync=False, do_expand=expand, expert_alignment=4
        )
        real = 8 if expand else 2
        assert len(weights) == len(scales) == (2 * 16 + 2 * 3 if expand else 8) - (16 if expand else 0)
        assert not weights[real:].any()
        assert scales[real:].isfinite().all()
        assert handle.num_recv_tokens == 8 and handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [2]
        assert handle.num_recv_tokens_per_expert_list == []
        if not expand:
            assert (recv_idx[real:] == -1).all()


# ---------------------------------------------------------------- defaults and handles


def test_handle_keeps_a_copy_of_the_routing_unless_told_otherwise(alone: Buffer) -> None:
    idx = torch.tensor([[0], [1]])
    copied = alone.dispatch(torch.ones(2, 4), idx, num_experts=2)[3]
    shared = alone.dispatch(torch.ones(2, 4), idx, num_experts=2, do_handle_copy=False)[3]
    idx.fill_(-1)
    assert copied.topk_idx.tolist() == [[0], [1]]
    assert shared.topk_idx is idx


def test_calls_may_use_less_than_the_buffer_holds(alone: Buffer) -> None:
    with make_alone(num_topk=4, num_experts=9) as buffer:
        handle = buffer.dispatch(
            torch.ones(2, 3).half(), torch.tensor([[1], [2]]), num_experts=3, num_max_tokens_per_rank=2
        )[3]
        assert (handle.num_experts, handle.num_max_tokens_per_rank) == (3, 2)
        out = buffer.combine(torch.ones(2, 11), handle)[0]  # hidden and dtype of combine are its own
        assert torch.equal(out, torch.ones(2, 11))


def test_counts_that_change_from_call_to_call(alone: Buffer) -> None:
    for tokens in (8, 0, 3, 1, 7):
        x, idx = torch.randn(tokens, 16), torch.arange(2 * tokens).reshape(tokens, 2) % 5
        recv_x, _, _, handle, _ = alone.dispatch(x, idx, num_experts=5, do_expand=tokens % 2 == 1, expert_alignment=3)
        out = alone.combine(recv_x, handle)[0]
        assert torch.equal(out, x if tokens % 2 == 0 else 2 * x)


def test_events_are_empty_on_cpus(alone: Buffer) -> None:
    idx = torch.zeros(1, 1, dtype=torch.int64)
    recv_x, _, _, handle, event = alone.dispatch(
        torch.ones(1, 4), idx, num_experts=1, async_with_compute_stream=True, allocate_on_comm_stream=True
    )
    assert isinstance(event, EventOverlap) and event.event is None
    with event:
        pass
    again = alone.combine(recv_x, handle, previous_event=event, allocate_on_comm_stream=True)[2]
    again.current_stream_wait()
    assert again.event is None


def test_statistics_add_up(alone: Buffer) -> None:
    stats = torch.tensor([5, 0, 1], dtype=torch.int32)
    idx = torch.tensor([[0, 0], [2, -1]])
    handle = alone.dispatch(torch.ones(2, 4), idx, None, stats, 3)[3]
    assert stats.tolist() == [7, 0, 2]
    alone.dispatch(torch.ones(2, 4), handle=handle, cumulative_local_expert_recv_stats=stats)
    assert stats.tolist() == [9, 0, 3]


def test_gradients_do_not_follow(alone: Buffer) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    recv_x, _, _, handle, _ = alone.dispatch(x, torch.zeros(2, 1, dtype=torch.int64), num_experts=1)
    assert not recv_x.requires_grad
    assert not alone.combine(recv_x.clone().requires_grad_(), handle)[0].requires_grad


def test_use_after_destroy() -> None:
    buffer = make_alone()
    x, idx = torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64)
    recv_x, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=1)
    buffer.destroy()
    buffer.destroy()
    for call in (
        lambda: buffer.dispatch(x, idx, num_experts=1),
        lambda: buffer.combine(recv_x, handle),
        lambda: buffer.combine_input(handle),
        buffer.barrier,
        buffer.reset,
    ):
        with pytest.raises(DestroyedError, match="destroyed"):
            call()


def test_debug_mode_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_EP_DEBUG", "1")
    with make_alone() as buffer:
        x, idx = torch.randn(3, 4), torch.tensor([[0, 1], [1, 1], [-1, 0]])
        recv_x, _, recv_w, handle, _ = buffer.dispatch(x, idx, torch.ones(3, 2), num_experts=2)
        assert torch.equal(buffer.combine(recv_x, handle, recv_w)[0], x)
        assert torch.equal(buffer.dispatch(x, handle=handle)[0], x)


# ---------------------------------------------------------------- memory before there is any


def test_size_hint_grows_with_what_it_is_told() -> None:
    hint = Buffer.get_buffer_size_hint
    base = hint(8, 4096, 7168, 8, num_experts=256)
    assert base % (2 << 20) == 0
    # two receive slots and the combine input, each at least a bf16 row for every token of every rank
    assert base >= 3 * 8 * 4096 * 7168 * 2
    assert hint(16, 4096, 7168) > hint(8, 4096, 7168)
    assert hint(8, 8192, 7168, 8, num_experts=256) > base
    assert hint(8, 4096, 8192, 8, num_experts=256) > base
    assert hint(8, 4096, 7168, 8, num_experts=256, dtype=torch.float32) > base
    assert hint(8, 4096, 7168, 8, num_experts=256, num_slots=3) > base
    assert hint(8, 4096, 7168, 8, num_experts=256, expand_factor=4.0) > base
    assert hint(8, 4096, 7168, 8, num_experts=256, max_scale_bytes=4096) > base
    assert hint(8, 4096, 7168) < base
    for wrong in ({"hidden": 0}, {"num_max_tokens_per_rank": 0}, {"num_topk": 33}, {"num_experts": 7}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            hint(**{"group": 8, "num_max_tokens_per_rank": 1, "hidden": 1, **wrong})


def capped(rank: int, cap: int) -> int:
    with Buffer(num_max_tokens_per_rank=4096, hidden=1024, num_topk=2, num_experts=8, max_bytes=cap) as buffer:
        return Buffer.get_buffer_size_hint(buffer.group, 4096, 1024, 2, num_experts=8)


def test_memory_cap(pools: Pools) -> None:
    needed = Buffer.get_buffer_size_hint(2, 4096, 1024, 2, num_experts=8)
    assert pools(2).run(capped, needed) == [needed, needed]
    for outcome in pools(2).outcomes(capped, needed - 1):
        assert outcome.error == "ArgumentError"
        assert f"max_bytes: got {needed - 1} bytes, expected at least {needed} bytes" in outcome.message
        fits = int(outcome.message.split("num_max_tokens_per_rank=")[1].split()[0])
        assert Buffer.get_buffer_size_hint(2, fits, 1024, 2, num_experts=8) < needed
        assert Buffer.get_buffer_size_hint(2, fits + 1, 1024, 2, num_experts=8) >= needed


# ---------------------------------------------------------------- between processes


def empty_ranks(rank: int, holder: int) -> None:
    """Only `holder` has tokens; with -1, nobody."""
    tokens = 3 if rank == holder else 0
    with Buffer(num_max_tokens_per_rank=3, hidden=5, num_topk=2, num_experts=4) as buffer:
        assert (buffer.rank, buffer.num_ranks, buffer.backend_name, buffer.num_bytes) == (rank, 3, "collective", 0)
        for expand in (False, True):
            x, idx = torch.randn(tokens, 5).bfloat16(), torch.arange(2 * tokens).reshape(tokens, 2) % 4
            recv_x, _, recv_w, handle, _ = buffer.dispatch(x, idx, torch.rand(tokens, 2), do_expand=expand)
            counts = (0, 0, 0) if holder < 0 else (4, 1, 1) if expand else (2, 1, 1)
            assert len(recv_x) == len(recv_w) == counts[rank]
            out, out_w, _ = buffer.combine(recv_x, handle, recv_w)
            assert out.shape == (tokens, 5) and out_w.shape == (tokens, 2)
            again = buffer.dispatch(x, handle=handle, do_expand=expand)[0]
            assert torch.equal(again, recv_x)


@pytest.mark.parametrize("holder", [-1, 0, 2])
def test_ranks_without_tokens(holder: int, pools: Pools) -> None:
    pools(3).run(empty_ranks, holder)


def all_to_one(rank: int) -> list[int]:
    with Buffer(num_max_tokens_per_rank=64, hidden=3, num_topk=2, num_experts=4, expand_factor=4) as buffer:
        x, idx = torch.full((64, 3), float(rank)).bfloat16(), torch.full((64, 2), 2)
        counts = []
        for expand in (False, True):
            recv_x, _, _, handle, _ = buffer.dispatch(x, idx, do_expand=expand)
            counts += [len(recv_x), *handle.num_unaligned_recv_tokens_per_expert.tolist()]
            assert torch.equal(buffer.combine(recv_x, handle)[0], x * (1 + expand))
        return counts


def test_every_token_to_one_expert(pools: Pools) -> None:
    assert pools(4).run(all_to_one) == [[0, 0, 0, 0], [0, 0, 0, 0], [256, 512, 512, 512], [0, 0, 0, 0]]


def many_local_experts(rank: int, num_experts: int) -> list[int]:
    with Buffer(num_max_tokens_per_rank=num_experts, hidden=1, num_topk=1, num_experts=num_experts) as buffer:
        idx = torch.arange(num_experts).flip(0)[:, None]
        x = idx.to(torch.float16)
        recv_x = buffer.dispatch(x, idx, do_expand=True)[0]
        first = 0 if rank == 0 else (num_experts + 1) // 2
        expected = torch.arange(first, first + len(recv_x) // 2).repeat_interleave(2)[:, None]
        assert torch.equal(recv_x, expected.half())
        return [len(recv_x)]


@pytest.mark.parametrize("per_rank", [16, 17, 64, 160])
def test_many_experts_on_a_rank(per_rank: int, pools: Pools) -> None:
    assert pools(2).run(many_local_experts, 2 * per_rank) == [[2 * per_rank], [2 * per_rank]]


def environment_wins(rank: int) -> str:
    os.environ["TILE_EP_BACKEND"] = "collective"
    try:
        with Buffer(num_max_tokens_per_rank=1, hidden=1, backend="nvlink") as buffer:
            return buffer.backend_name
    finally:
        del os.environ["TILE_EP_BACKEND"]


def test_environment_chooses_the_backend(pools: Pools) -> None:
    assert pools(2).run(environment_wins) == ["collective", "collective"]


def default_timeout(rank: int) -> float:
    with Buffer(num_max_tokens_per_rank=1, hidden=1) as buffer:
        return buffer.config.timeout_s


def test_timeout_is_the_group_s_own(pools: Pools) -> None:
    assert pools(2).run(default_timeout) == [60.0, 60.0]
