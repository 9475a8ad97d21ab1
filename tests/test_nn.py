"""The expert layer and its gradients, against a dense layer that one process computes."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from workers import Pools

from tile_ep import ArgumentError, Buffer, CapacityError, autograd, loopback
from tile_ep.nn import MoE, _one_by_one, shared_parameters
from tile_ep.selftest_layer import check_layer

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 32, 24, 7, 3
SIMULATOR = importlib.util.find_spec("tilelang") is not None and shutil.which("g++") is not None
TOKENS = [9, 5, 12]
"""Of each rank, of three; with fewer ranks the first hold more."""


SIZES: dict[str, Any] = {
    "num_max_tokens_per_rank": 26,
    "hidden": HIDDEN,
    "num_topk": TOPK,
    "num_experts": EXPERTS,
    "dtype": torch.float32,
    "expand_factor": 8.0,
}


def buffer_for(**sizes: Any) -> Buffer:
    return Buffer(**{**SIZES, **sizes}, timeout_s=30, backend="collective")


def layer(buffer: Buffer, seed: int = 3, **options: Any) -> MoE:
    generator = torch.Generator().manual_seed(seed)
    return MoE(
        buffer, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, **{"dtype": torch.float32, "generator": generator, **options}
    )


def dense(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where it was not selected."""
    total = torch.zeros_like(x)
    for expert in range(len(down)):
        weight = (topk_weights * (topk_idx == expert)).sum(dim=1, keepdim=True)
        gate, up = (x @ gate_up[expert].T).chunk(2, dim=1)
        total = total + weight * ((F.silu(gate) * up) @ down[expert].T)
    return total


# ---------------------------------------------------------------- one step with given routing


def inputs(tokens: list[int], routing: str) -> list[dict[str, torch.Tensor]]:
    """Of every rank: tokens, routing, weights, and the gradient of the output."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for count in tokens:
        idx = torch.rand(count, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
        if routing == "masked":
            idx = idx.masked_fill(torch.rand(idx.shape, generator=generator) < 0.4, -1)
            idx[:1] = -1
        elif routing == "one expert":
            idx = torch.full_like(idx, -1).index_fill_(1, torch.tensor([1]), 2)
        elif routing == "first rank only":  # experts 1 to 6 get nothing
            idx = torch.full_like(idx, -1).index_fill_(1, torch.tensor([0]), 0)
        elif routing == "nothing":
            idx = torch.full_like(idx, -1)
        elif routing == "twice":
            idx[:, 1] = idx[:, 0]
        made.append(
            {
                "x": torch.randn(count, HIDDEN, generator=generator),
                "topk_idx": idx,
                "topk_weights": torch.rand(count, TOPK, generator=generator),
                "grad": torch.randn(count, HIDDEN, generator=generator),
            }
        )
    return made


def step(buffer: Buffer, given: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Forward and backward of one rank."""
    x, weights = given["x"].requires_grad_(), given["topk_weights"].requires_grad_()
    moe = layer(buffer, router=False, **options)
    out = moe(x, given["topk_idx"], weights)
    out.backward(given["grad"])
    assert x.grad is not None and weights.grad is not None
    assert moe.gate_up.grad is not None and moe.down.grad is not None
    return {
        "out": out.detach(),
        "x": x.grad,
        "weights": weights.grad,
        "gate_up": moe.gate_up.grad,
        "down": moe.down.grad,
        "values": torch.cat([moe.gate_up.detach().flatten(1), moe.down.detach().flatten(1)], dim=1),
    }


def step_in_process(rank: int, given: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with buffer_for() as buffer:
        return step(buffer, given, options)


def expected_step(given: list[dict[str, torch.Tensor]], values: torch.Tensor) -> dict[str, torch.Tensor]:
    split = 2 * INTERMEDIATE * HIDDEN
    gate_up = values[:, :split].reshape(EXPERTS, 2 * INTERMEDIATE, HIDDEN).clone().requires_grad_()
    down = values[:, split:].reshape(EXPERTS, HIDDEN, INTERMEDIATE).clone().requires_grad_()
    joined = {name: torch.cat([one[name].detach() for one in given]) for name in given[0]}
    x, weights = joined["x"].requires_grad_(), joined["topk_weights"].requires_grad_()
    out = dense(x, joined["topk_idx"], weights, gate_up, down)
    grads = torch.autograd.grad(out, (x, weights, gate_up, down), joined["grad"])
    return {"out": out.detach(), **dict(zip(("x", "weights", "gate_up", "down"), grads, strict=True))}


ROUTINGS = ["spread", "masked", "one expert", "first rank only", "nothing", "twice"]


def tokens_of(num_ranks: int) -> list[int]:
    return [sum(TOKENS[rank::num_ranks]) for rank in range(num_ranks)]


def check_step(pools: Pools, tokens: list[int], routing: str, **options: Any) -> None:
    given = inputs(tokens, routing)
    check_ranks(given, pools(len(tokens)).run(step_in_process, per_rank=[(one, options) for one in given]))


def check_ranks(given: list[dict[str, torch.Tensor]], ranks: list[dict[str, torch.Tensor]]) -> None:
    found = {name: torch.cat([of_rank[name] for of_rank in ranks]) for name in ranks[0]}
    expected = expected_step(given, found.pop("values"))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_equal_a_dense_layer(pools: Pools, num_ranks: int, routing: str) -> None:
    check_step(pools, tokens_of(num_ranks), routing)


@pytest.mark.parametrize("tokens", [[0, 7], [7, 0], [0, 9, 0], [0, 0]])
def test_ranks_without_tokens(pools: Pools, tokens: list[int]) -> None:
    check_step(pools, tokens, "spread")


@pytest.mark.parametrize("alignment", [1, 5, 64])
def test_any_alignment(pools: Pools, alignment: int) -> None:
    check_step(pools, tokens_of(2), "masked", expert_alignment=alignment)


@pytest.mark.skipif(not SIMULATOR, reason="needs tilelang (pip install tilelang) and g++")
@pytest.mark.parametrize("routing", ["masked", "first rank only"])
def test_on_the_simulated_kernels(routing: str) -> None:
    given = inputs(TOKENS, routing)
    with loopback(len(TOKENS), device="sim", **SIZES) as ranks:
        check_ranks(given, ranks.run(lambda rank, buffer: step(buffer, given[rank], {})))


def test_experts_do_not_depend_on_the_number_of_ranks(pools: Pools) -> None:
    values = [
        torch.cat(
            [
                one["values"]
                for one in pools(n).run(step_in_process, per_rank=[(g, {}) for g in inputs([2] * n, "spread")])
            ]
        )
        for n in (1, 2, 3)
    ]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    assert not torch.equal(values[0][0], values[0][1])


# ---------------------------------------------------------------- router, two layers


def two_layers(rank: int, x: torch.Tensor, grad: torch.Tensor) -> dict[str, Any]:
    """Two routed layers on one buffer; the second also sees the first one's output beside the input."""
    with buffer_for() as buffer:
        first, second = layer(buffer, 3), layer(buffer, 4)
        x = x.requires_grad_()
        middle = x + first(x)
        out = middle + second(middle) + second(x)  # three handles alive
        out.backward(grad)
        names = ("router.weight", "gate_up", "down")
        grads = {f"{i}.{n}": m.get_parameter(n).grad for i, m in enumerate((first, second)) for n in names}
        values = {f"{i}.{n}": m.get_parameter(n).detach() for i, m in enumerate((first, second)) for n in names}
        assert {id(p) for p in shared_parameters(first)} == {id(first.get_parameter("router.weight"))}
        return {"out": out.detach(), "x": x.grad, "grads": grads, "values": values}


def dense_routed(x: torch.Tensor, values: dict[str, torch.Tensor], index: int) -> torch.Tensor:
    probabilities = (x @ values[f"{index}.router.weight"].T).softmax(dim=1)
    weights, idx = probabilities.topk(TOPK, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return dense(x, idx, weights, values[f"{index}.gate_up"], values[f"{index}.down"])


@pytest.mark.parametrize("tokens", [[8], [6, 9], [6, 0, 11]])
def test_two_routed_layers_equal_dense_ones(pools: Pools, tokens: list[int]) -> None:
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(count, HIDDEN, generator=generator) for count in tokens]
    grads = [torch.randn(count, HIDDEN, generator=generator) for count in tokens]
    ranks = pools(len(tokens)).run(two_layers, per_rank=list(zip(xs, grads, strict=True)))
    values = {
        name: (value if "router" in name else torch.cat([one["values"][name] for one in ranks])).requires_grad_()
        for name, value in ranks[0]["values"].items()
    }
    x = torch.cat([one.detach() for one in xs]).requires_grad_()
    middle = x + dense_routed(x, values, 0)
    out = middle + dense_routed(middle, values, 1) + dense_routed(x, values, 1)
    out.backward(torch.cat(grads))
    close = {"rtol": 1e-5, "atol": 5e-6}
    torch.testing.assert_close(torch.cat([one["out"] for one in ranks]), out.detach(), **close)
    torch.testing.assert_close(torch.cat([one["x"] for one in ranks]), x.grad, **close)
    for name, value in values.items():
        found = [one["grads"][name] for one in ranks]
        joined = torch.stack(found).sum(dim=0) if "router" in name else torch.cat(found)
        torch.testing.assert_close(joined, value.grad, **close, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------- who joins the backward


def uneven_needs(rank: int) -> dict[str, Any]:
    """Only rank 0's tokens need a gradient, rank 1 holds no trainable expert and neither do its weights."""
    torch.manual_seed(rank)
    x = torch.randn(4, HIDDEN, requires_grad=rank == 0)
    with buffer_for() as buffer:
        moe = layer(buffer, router=False).requires_grad_(rank == 0)
        out = moe(x, torch.tensor([[0, 3, 6]] * 4), torch.full((4, TOPK), 0.5))
        out.sum().backward()
        return {"needs": out.requires_grad, "grad": x.grad, "experts": moe.down.grad is not None}


def test_every_rank_joins_the_backward(pools: Pools) -> None:
    first, second = pools(2).run(uneven_needs)
    assert first["needs"] and second["needs"]
    assert first["grad"].abs().sum() > 0 and second["grad"] is None
    assert first["experts"] and not second["experts"]


def cut_rows(rank: int) -> torch.Tensor:
    """Rank 1's expert ignores its rows: its combine still leads back to its dispatch."""
    x = torch.ones(3, HIDDEN, requires_grad=True)
    with buffer_for() as buffer:
        received = autograd.dispatch(buffer, x, torch.tensor([[0, 6]] * 3))
        rows = received.x * 2 if rank == 0 else torch.ones_like(received.x)
        autograd.combine(buffer, rows, received).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_combine_leads_back_to_its_dispatch(pools: Pools) -> None:
    for grad in pools(2).run(cut_rows):
        assert torch.equal(grad, torch.full((3, HIDDEN), 2.0))


def without_grad(rank: int) -> dict[str, Any]:
    x = torch.ones(3, HIDDEN, requires_grad=True)
    with buffer_for() as buffer:
        moe = layer(buffer)
        with torch.no_grad():
            quiet = moe(x)
        with torch.inference_mode():
            inferred = moe(x).clone()
        loud = moe(x)
        loud.sum().backward()
        return {
            "same": torch.equal(quiet, loud) and bool((inferred == loud).all()),
            "quiet": quiet.requires_grad,
            "loud": loud.requires_grad,
        }


def test_no_grad(pools: Pools) -> None:
    for found in pools(2).run(without_grad):
        assert found == {"same": True, "quiet": False, "loud": True}


# ---------------------------------------------------------------- the pair itself


def rank_layout(rank: int, twice: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum over ranks of (sum of the local weights) * x`, in the rank layout; combined twice from one dispatch."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, HIDDEN, generator=generator).requires_grad_()
    weights = torch.rand(4, 2, generator=generator).requires_grad_()
    with buffer_for() as buffer:
        received = autograd.dispatch(
            buffer, x, torch.tensor([[0, 6], [1, 2], [-1, 5], [-1, -1]]), weights, do_expand=False
        )
        assert received.topk_idx is not None and received.topk_weights is not None
        scale = (received.topk_weights * (received.topk_idx >= 0)).sum(dim=1, keepdim=True)
        out = autograd.combine(buffer, received.x * scale, received)
        if twice:
            out = out + autograd.combine(buffer, received.x * scale, received)
        out.sum().backward()
    assert x.grad is not None and weights.grad is not None
    used = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]) * (1 + twice)
    torch.testing.assert_close(x.grad, (weights.detach() * used).sum(dim=1, keepdim=True).expand_as(x))
    torch.testing.assert_close(weights.grad, x.detach().sum(dim=1, keepdim=True) * used)
    return x.grad, weights.grad


@pytest.mark.parametrize("twice", [False, True])
def test_rank_layout(pools: Pools, twice: bool) -> None:
    pools(2).run(rank_layout, twice)


def wrong_calls(rank: int) -> dict[str, str]:
    messages = {}
    with buffer_for() as buffer:
        moe = layer(buffer, router=False)
        x = torch.zeros(2, HIDDEN)
        received = autograd.dispatch(buffer, x, torch.zeros(2, 1, dtype=torch.int64), do_expand=False)
        calls = {
            "rank layout": lambda: autograd.combine(buffer, received.x, received, torch.ones(len(received.x))),
            "no router": lambda: moe(x),
            "no weights": lambda: moe(x, torch.zeros(2, TOPK, dtype=torch.int64)),
            "no routing": lambda: moe(x, None, torch.zeros(2, TOPK)),
            "dtype": lambda: moe(x.bfloat16()),
            "hidden": lambda: moe(x[:, :8]),
            "num_topk": lambda: MoE(buffer, HIDDEN, INTERMEDIATE, EXPERTS, EXPERTS + 1),
            "num_experts": lambda: MoE(buffer, HIDDEN, INTERMEDIATE, 1, 1),
        }
        for name, call in calls.items():
            with pytest.raises(ArgumentError) as raised:
                call()
            messages[name] = raised.value.argument
    return messages


def test_wrong_calls(pools: Pools) -> None:
    for messages in pools(2).run(wrong_calls):
        assert messages == {
            "rank layout": "topk_weights",
            "no router": "topk_idx",
            "no weights": "topk_weights",
            "no routing": "topk_weights",
            "dtype": "x",
            "hidden": "x",
            "num_topk": "num_topk",
            "num_experts": "num_experts",
        }


# ---------------------------------------------------------------- dtypes, and where grouped products cannot run


def in_bf16(rank: int) -> dict[str, Any]:
    """Gradients in bf16 beside those of the same values in fp32, which `test_gradients_...` checks."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(rank * 8, HIDDEN, generator=generator).bfloat16().to(dtype).requires_grad_()
        idx = torch.rand(rank * 8, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
        weights = torch.rand(rank * 8, TOPK, generator=generator).requires_grad_()
        with buffer_for() as buffer:
            moe = layer(buffer, router=False, dtype=dtype)
            with torch.no_grad():
                for parameter in moe.parameters():
                    parameter.copy_(parameter.bfloat16())
            out = moe(x, idx, weights)
            assert out.dtype == dtype
            out.float().square().sum().backward()
        found.append([g.float() for g in (out.detach(), x.grad, weights.grad, moe.gate_up.grad, moe.down.grad)])
    errors = [(b - a).norm() / a.norm().clamp(min=1e-20) for a, b in zip(*found, strict=True)]
    return {"error": float(max(errors)), "moved": float(found[1][3].abs().sum())}


def test_bf16(pools: Pools) -> None:
    for found in pools(2).run(in_bf16):
        assert found["error"] < 0.02
        assert found["moved"] > 0


def matmuls(rank: int) -> dict[str, Any]:
    """Sizes whose strides grouped products refuse, and both ways on sizes that they take."""
    with buffer_for() as buffer:
        torch.manual_seed(0)
        odd = MoE(buffer, 31, 23, EXPERTS, TOPK, dtype=torch.float32)
        odd(torch.randn(4, 31)).sum().backward()
        moe = layer(buffer)
        rows, ends = torch.randn(9, HIDDEN), torch.arange(1, len(moe.down) + 1, dtype=torch.int32) * 9 // len(moe.down)
        gate, up = _one_by_one(rows, moe.gate_up, ends).chunk(2, dim=1)
        single = _one_by_one(F.silu(gate) * up, moe.down, ends)
        torch.testing.assert_close(moe._experts(rows, ends), single, rtol=1e-5, atol=1e-6)
        return {"odd": odd.uses_grouped_mm, "grouped": moe.uses_grouped_mm}


def test_one_product_per_expert_where_grouped_ones_cannot_run(pools: Pools) -> None:
    for found in pools(2).run(matmuls):
        assert found == {"odd": False, "grouped": hasattr(torch, "_grouped_mm")}


# ---------------------------------------------------------------- as a module of PyTorch, over gloo and on simulated kernels

OnRank = Callable[..., Any]


def in_process(rank: int, function: OnRank, sizes: dict[str, Any], args: tuple[Any, ...]) -> Any:
    with buffer_for(**sizes) as buffer:
        return function(rank, buffer, *args)


class Ranks:
    """Runs `function(rank, buffer, *args)` on every rank."""

    def __init__(self, world: str, pools: Pools) -> None:
        self._world, self._pools = world, pools

    def run(self, num_ranks: int, function: OnRank, *args: Any, **sizes: Any) -> list[Any]:
        if self._world == "gloo":
            return self._pools(num_ranks).run(in_process, function, sizes, args)
        with loopback(num_ranks, device="sim", **{**SIZES, **sizes}) as ranks:
            return ranks.run(lambda rank, buffer: function(rank, buffer, *args))


@pytest.fixture(params=["gloo", "sim"])
def ranks(request: pytest.FixtureRequest, pools: Pools) -> Ranks:
    if request.param == "sim" and not SIMULATOR:
        pytest.skip("needs tilelang (pip install tilelang) and g++")
    return Ranks(request.param, pools)


def drawn(rank: int, count: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def gradients(out: torch.Tensor, x: torch.Tensor, moe: nn.Module, **options: Any) -> list[torch.Tensor]:
    """Of the sum of squares of `out`; forgets earlier ones."""
    x.grad = None
    moe.zero_grad()
    out.square().sum().backward(**options)
    assert x.grad is not None
    return [x.grad, *(parameter.grad.clone() for parameter in moe.parameters() if parameter.grad is not None)]


def checkpointed(rank: int, buffer: Buffer, reentrant: bool) -> None:
    moe, x = layer(buffer), drawn(rank, 5 * rank)
    out = moe(x)
    expected = gradients(out, x, moe)
    again = checkpoint(moe, x, use_reentrant=reentrant)
    assert torch.equal(out, again)
    found = gradients(again, x, moe)
    assert len(found) == len(expected) == 4
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(ranks: Ranks, reentrant: bool) -> None:
    ranks.run(2, checkpointed, reentrant)


def checkpointed_parts(rank: int, buffer: Buffer, parts: str) -> float:
    """Only rank 0's experts save anything for backward, yet both ranks recompute."""
    x = torch.ones(3, HIDDEN, requires_grad=True)

    def first(x: torch.Tensor) -> tuple[autograd.Received, torch.Tensor]:
        received = autograd.dispatch(buffer, x, torch.tensor([[0, 6]] * 3))
        return received, received.x.square() if rank == 0 else received.x * 3

    def both(x: torch.Tensor) -> torch.Tensor:
        received, rows = first(x)
        return autograd.combine(buffer, rows, received)

    if parts == "both":
        out = checkpoint(both, x, use_reentrant=False)
    else:
        received, rows = checkpoint(first, x, use_reentrant=False)
        out = autograd.combine(buffer, rows, received)
    out.sum().backward()
    assert x.grad is not None
    return x.grad.unique().item()


@pytest.mark.parametrize("parts", ["both", "dispatch"])
def test_checkpoint_where_ranks_save_different_tensors(pools: Pools, parts: str) -> None:
    assert Ranks("gloo", pools).run(2, checkpointed_parts, parts) == [5.0, 5.0]


def backward_twice(rank: int, buffer: Buffer) -> None:
    moe, x = layer(buffer), drawn(rank, 4)
    out = moe(x)
    first = gradients(out, x, moe, retain_graph=True)
    assert all(map(torch.equal, first, gradients(out, x, moe)))
    with pytest.raises(RuntimeError, match="a second time"):
        gradients(out, x, moe)


def test_backward_twice(ranks: Ranks) -> None:
    ranks.run(2, backward_twice)


def overflow(rank: int, buffer: Buffer) -> str:
    moe, x = layer(buffer, router=False, expert_alignment=1), drawn(rank, 26)
    weights = torch.ones(26, TOPK)
    with pytest.raises(CapacityError) as raised:
        moe(x, torch.zeros(26, TOPK, dtype=torch.int64), weights)
    even = torch.arange(26 * TOPK).view(26, TOPK) % EXPERTS
    assert gradients(moe(x, even, weights), x, moe)[0].any()
    return str(raised.value)


def test_every_rank_raises_on_overflow_and_goes_on(ranks: Ranks) -> None:
    first, second = ranks.run(2, overflow, expand_factor=1.1)
    assert first == second
    assert "rank 0 needs" in first


def shared_buffer(rank: int, buffer: Buffer) -> None:
    """Layers of other sizes than the buffer's, whose passes interleave, against each of them alone."""
    sizes = [(HIDDEN, 8, EXPERTS, TOPK), (16, 24, 5, 1), (20, 4, 3, 2)]
    layers = [MoE(buffer, *size, dtype=torch.float32) for size in sizes]
    xs = [drawn(rank, 4 + i, size[0]) for i, size in enumerate(sizes)]
    alone = [gradients(moe(x), x, moe) for moe, x in zip(layers, xs, strict=True)]
    outs = [moe(x) for moe, x in zip(layers, xs, strict=True)]
    for i in (1, 2, 0):
        assert all(map(torch.equal, gradients(outs[i], xs[i], layers[i]), alone[i]))


def test_layers_of_other_sizes_share_a_buffer(ranks: Ranks) -> None:
    ranks.run(2, shared_buffer)


def in_place(rank: int, buffer: Buffer) -> None:
    """Received rows belong to who received them: they may be changed, and later calls do not change them."""
    moe, x = layer(buffer), drawn(rank, 4)
    received = autograd.dispatch(buffer, x, torch.tensor([[0, 6]] * 4))
    rows = received.x.mul_(2)
    kept = rows.clone()
    for _ in range(3):
        moe(x)
    assert torch.equal(rows, kept)
    autograd.combine(buffer, rows, received).sum().backward()
    assert x.grad is not None and (x.grad == 4).all()


def test_rows_changed_in_place(ranks: Ranks) -> None:
    ranks.run(2, in_place)


def finite_differences(rank: int, buffer: Buffer) -> dict[str, tuple[float, float]]:
    """For each tensor, this rank's share of the slope along a direction, and of (f(v + e d) - f(v - e d)) / 2e."""
    moe, x = layer(buffer, router=False), drawn(rank, 3 + 4 * rank)
    generator = torch.Generator().manual_seed(20 + rank)
    idx = torch.rand(len(x), EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
    weights = torch.rand(len(x), TOPK, generator=generator).requires_grad_()
    shares = torch.randn(len(x), HIDDEN, generator=generator)
    tensors = {"x": x, "weights": weights, "gate_up": moe.gate_up, "down": moe.down}
    grads = torch.autograd.grad((moe(x, idx, weights) * shares).sum(), list(tensors.values()))
    found = {}
    for (name, tensor), grad in zip(tensors.items(), grads, strict=True):
        direction = torch.randn(tensor.shape, generator=generator)
        values = []
        with torch.no_grad():
            for step in (0.002, -0.004):
                tensor.add_(direction, alpha=step)
                values.append(float((moe(x, idx, weights) * shares).double().sum()))
            tensor.add_(direction, alpha=0.002)
        found[name] = (float((grad.double() * direction).sum()), (values[0] - values[1]) / 0.004)
    return found


def test_gradients_are_slopes(ranks: Ranks) -> None:
    found = ranks.run(3, finite_differences)
    for name in found[0]:
        slope, difference = (sum(of_rank[name][i] for of_rank in found) for i in (0, 1))
        assert difference == pytest.approx(slope, rel=1e-3, abs=1e-3), name


def autocast(rank: int, buffer: Buffer) -> None:
    """A layer in fp32 computes as one in bf16 with the rounded parameters; its router and gradients stay in fp32."""
    moe, x = layer(buffer), drawn(rank, 6)
    rounded = copy.deepcopy(moe).to(torch.bfloat16)
    idx, weights = moe.route(x)
    expected = rounded(x.bfloat16(), idx, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(moe.route(x)[1], weights)
        out, of_bf16 = moe(x), moe(x.bfloat16(), idx, weights)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected) and torch.equal(of_bf16, expected)
    found = gradients(out, x, moe)
    reference = gradients(rounded(x.bfloat16(), idx, weights), x, rounded)
    assert [grad.dtype for grad in found] == [torch.float32] * 4
    assert all(torch.equal(a, b.float()) for a, b in zip(found[1:3], reference[1:], strict=True))


def test_autocast(ranks: Ranks) -> None:
    ranks.run(2, autocast)


def copied(rank: int, buffer: Buffer) -> None:
    moe, x = layer(buffer), drawn(rank, 4)
    twin = copy.deepcopy(moe)
    assert twin.buffer is buffer and torch.equal(moe(x), twin(x))
    with torch.no_grad():
        twin.down.zero_()
    assert moe(x).any() and not twin(x).any()


def test_a_deep_copy_shares_the_buffer_only(pools: Pools) -> None:
    Ranks("gloo", pools).run(2, copied)


def moved(rank: int, buffer: Buffer) -> list[bool]:
    """Rows of 4 elements suit grouped products in fp32, not in bf16."""
    moe, x = MoE(buffer, 4, 4, EXPERTS, TOPK, dtype=torch.float32), drawn(rank, 5, 4)
    moe(x)
    uses = [moe.uses_grouped_mm]
    moe.to(torch.bfloat16)
    assert gradients(moe(x.bfloat16()), x, moe)[1].dtype == torch.bfloat16
    return [*uses, moe.uses_grouped_mm]


def test_moved_to_another_dtype(pools: Pools) -> None:
    assert Ranks("gloo", pools).run(2, moved) == [[hasattr(torch, "_grouped_mm"), False]] * 2


def from_meta(rank: int, buffer: Buffer) -> None:
    moe = layer(buffer, device="meta").to_empty(device="cpu")
    moe.reset_parameters(torch.Generator().manual_seed(3))
    for parameter, expected in zip(moe.parameters(), layer(buffer).parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_made_without_memory_and_drawn_later(pools: Pools) -> None:
    Ranks("gloo", pools).run(2, from_meta)


def states(
    rank: int, buffer: Buffer, x: torch.Tensor, state: dict[str, torch.Tensor] | None
) -> tuple[Any, torch.Tensor]:
    moe = layer(buffer, seed=3 if state is None else 4)
    if state is not None:
        moe.load_state_dict(state)
    return moe.state_dict(), moe(x).detach()


def test_state_of_many_ranks_loads_on_one(pools: Pools) -> None:
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    saved = Ranks("gloo", pools).run(3, states, x, None)
    whole = {name: torch.cat([state[name] for state, _ in saved]) for name in ("gate_up", "down")}
    whole["router.weight"] = saved[0][0]["router.weight"]
    [(_, found)] = Ranks("gloo", pools).run(1, states, x, whole)
    for _, expected in saved:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def data_parallel(rank: int, buffer: Buffer, kind: str) -> None:
    """What every rank holds is averaged by PyTorch, the experts are left to the layer; against sums made by hand."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer(buffer)), drawn(rank, 5)
    expected = gradients(model(x), x, model)
    shared = {id(parameter) for parameter in shared_parameters(model)}
    experts = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in shared}
    assert list(experts) == ["1.gate_up", "1.down"]
    for parameter, grad in zip(model.parameters(), expected[1:], strict=True):
        if id(parameter) in shared:
            torch.distributed.all_reduce(grad)
            grad /= 2
    parallel: nn.Module = model
    if kind == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        parallel = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(experts.values()))
    found = gradients(parallel(x), x, model)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.full_tensor() if hasattr(a, "full_tensor") else a, b)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_data_parallel(pools: Pools, kind: str) -> None:
    Ranks("gloo", pools).run(2, data_parallel, kind)


def compiled(rank: int, buffer: Buffer) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), layer(buffer)), drawn(rank, 4)
    out = model(x)
    expected = gradients(out, x, model)
    again = torch.compile(model, backend="aot_eager")(x)
    torch.testing.assert_close(again, out)
    for found, of_eager in zip(gradients(again, x, model), expected, strict=True):
        torch.testing.assert_close(found, of_eager)


def test_compile_leaves_the_layer_out(pools: Pools) -> None:
    Ranks("gloo", pools).run(2, compiled)


def test_ranks_that_share_a_gpu_keep_their_backward() -> None:
    """There is no GPU here, so this looks at the switch that PyTorch's engine reads."""
    shared_gpu = SimpleNamespace(group=None, device=torch.device("cuda", 0))
    own_gpu = SimpleNamespace(group=object(), device=torch.device("cuda", 0))
    found = []

    def on_rank() -> None:
        for buffer in (own_gpu, shared_gpu):
            autograd._keep_backward_here(buffer)  # type: ignore[arg-type]
            found.append(torch._C._is_multithreading_enabled())

    thread = threading.Thread(target=on_rank)
    thread.start()
    thread.join()
    assert found == [True, False]
    assert torch._C._is_multithreading_enabled()


@pytest.mark.skipif(not SIMULATOR, reason="needs tilelang (pip install tilelang) and g++")
def test_self_test_of_the_layer() -> None:
    said = check_layer("sim")
    assert "routings" in said and "float32 within" in said and "bfloat16 within" in said


@pytest.mark.gpu
def test_layer_on_a_gpu() -> None:
    assert "bfloat16 within" in check_layer("cuda")
