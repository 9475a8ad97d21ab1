"""A check of the expert layer, forward and backward, on ranks that share a process: on one GPU, or in the simulator.

What crosses is compared to the bit with the reference, in both directions. What the layer makes of it is compared with
every expert on every token, computed in fp64 on the CPU from the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tile_ep import autograd, reference
from tile_ep.buffer import Buffer
from tile_ep.errors import CapacityError
from tile_ep.nn import MoE
from tile_ep.worlds.loopback import Loopback, loopback

NUM_RANKS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Most `|found - expected| / |expected|` (Frobenius norms) of an output or a gradient."""

ROUTINGS = {"uniform": 16, "skewed": 128, "masked": 16, "empty rank": 128, "idle experts": 16, "no tokens": 16}
"""How tokens are routed, and the alignment of the experts' rows."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; experts that ranks hold unequal numbers of."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int


SHAPES = {"cuda": Shape(96, 512, 256, 14, 4), "sim": Shape(9, 64, 32, 6, 3)}


@dataclass
class Inputs:
    """Of all ranks, on the CPU: a list by rank."""

    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    weights: list[torch.Tensor]
    grad: list[torch.Tensor]


def check_layer(device: str = "cuda") -> str:
    """Forward and backward of `MoE` over four ranks in fp32 and bf16, under several routings; says what was found.

    Args:
        device: `"cuda"`, all ranks on the current GPU; or `"sim"`.

    Raises:
        AssertionError: something differs; the message says what.
    """
    shape, worst = SHAPES[device], []
    for dtype in TOLERANCE:
        with _ranks(device, shape, dtype, float(shape.experts)) as ranks:
            errors = [
                _check_routing(ranks, shape, dtype, routing, alignment, seed)
                for seed, (routing, alignment) in enumerate(ROUTINGS.items())
            ]
            errors.append(_check_router(ranks, shape, dtype))
        worst.append(f"{str(dtype).removeprefix('torch.')} within {max(errors):.1e}")
    _check_overflow(device, shape)
    return f"{len(ROUTINGS)} routings and a router, rows equal the reference; of a dense layer {', '.join(worst)}"


def _ranks(device: str, shape: Shape, dtype: torch.dtype, expand_factor: float) -> Loopback:
    return loopback(
        NUM_RANKS,
        device,
        num_max_tokens_per_rank=shape.tokens,
        hidden=shape.hidden,
        num_topk=shape.topk,
        num_experts=shape.experts,
        dtype=dtype,
        expand_factor=expand_factor,
    )


def _layer(buffer: Buffer, shape: Shape, dtype: torch.dtype, **options: Any) -> MoE:
    generator = torch.Generator().manual_seed(1)
    return MoE(
        buffer, shape.hidden, shape.intermediate, shape.experts, shape.topk, dtype=dtype, generator=generator, **options
    )


def _draw(shape: Shape, dtype: torch.dtype, routing: str, seed: int) -> Inputs:
    random = torch.Generator().manual_seed(seed)
    inputs = Inputs([], [], [], [])
    for rank in range(NUM_RANKS):
        count = int(torch.randint(1, shape.tokens + 1, (), generator=random))
        if routing == "no tokens" or (routing == "empty rank" and rank == 1):
            count = 0
        scores = torch.rand(count, shape.experts, generator=random)
        if routing == "skewed":
            scores[:, 1] += 1
        elif routing == "idle experts":
            scores[:, shape.experts - shape.topk :] += 1  # the first ranks hold none of these
        idx = scores.topk(shape.topk, dim=1).indices
        if routing == "masked":
            idx[torch.rand(idx.shape, generator=random) < 0.4] = -1
            idx[:1] = -1
        inputs.x.append(torch.randn(count, shape.hidden, generator=random).to(dtype))
        inputs.topk_idx.append(idx)
        inputs.weights.append(torch.rand(count, shape.topk, generator=random))
        inputs.grad.append(torch.randn(count, shape.hidden, generator=random).to(dtype))
    return inputs


# ---------------------------------------------------------------- one routing


def _check_routing(ranks: Loopback, shape: Shape, dtype: torch.dtype, routing: str, alignment: int, seed: int) -> float:
    """The largest relative error of an output or a gradient."""
    inputs = _draw(shape, dtype, routing, seed)
    found = ranks.run(lambda rank, buffer: _step(rank, buffer, shape, inputs, dtype, alignment))
    place = f"{routing}, alignment {alignment}"
    _check_rows(shape, inputs, found, alignment, f"{dtype}, {place}")
    return _relative_error(_dense(inputs, found), found, dtype, place)


def _step(
    rank: int, buffer: Buffer, shape: Shape, inputs: Inputs, dtype: torch.dtype, alignment: int
) -> dict[str, torch.Tensor]:
    """The layer in one piece, and again in its parts, with everything that crosses between ranks. On the CPU."""
    moe = _layer(buffer, shape, dtype, router=False, expert_alignment=alignment)
    where = buffer.device
    idx, grad = inputs.topk_idx[rank].to(where), inputs.grad[rank].to(where)

    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        # Copies, since on the CPU `to` gives the same tensor.
        return tuple(part[rank].to(where, copy=True).requires_grad_() for part in (inputs.x, inputs.weights))  # type: ignore[return-value]

    x, weights = leaves()
    out = moe(x, idx, weights)
    out.backward(grad)
    whole = {"out": out, "x.grad": x.grad, "weights.grad": weights.grad}
    experts = {"gate_up.grad": moe.gate_up.grad, "down.grad": moe.down.grad, "gate_up": moe.gate_up, "down": moe.down}
    moe.zero_grad()  # takes new memory for the second pass

    x, weights = leaves()
    received = autograd.dispatch(buffer, x, idx, weights, expert_alignment=alignment)
    rows = moe._experts(received.x, received.ends)
    assert received.topk_weights is not None
    for part in (received.x, received.topk_weights, rows):
        part.retain_grad()
    combined = autograd.combine(buffer, rows, received, received.topk_weights)
    combined.backward(grad)
    parts = {
        "received": received.x,
        "received.grad": received.x.grad,
        "received weights": received.topk_weights,
        "received weights.grad": received.topk_weights.grad,
        "rows": rows,
        "rows.grad": rows.grad,
        "counts": received.handle.num_unaligned_recv_tokens_per_expert,
        "combined": combined,
        "combined x.grad": x.grad,
        "combined weights.grad": weights.grad,
    }
    said = {**whole, **experts, **parts}
    missing = [name for name, value in said.items() if value is None]
    assert not missing, f"rank {rank}: nothing in {missing}"
    return {name: value.detach().to("cpu", copy=True) for name, value in said.items() if value is not None}


def _check_rows(shape: Shape, inputs: Inputs, found: list[dict[str, torch.Tensor]], alignment: int, place: str) -> None:
    """Raise unless all that crossed is what the reference makes of what was sent."""

    def column(name: str) -> list[torch.Tensor]:
        return [of_rank[name] for of_rank in found]

    def same(name: str, expected: list[Any]) -> None:
        for rank, (got, want) in enumerate(zip(column(name), expected, strict=True)):
            assert torch.equal(got, want), f"{place}, rank {rank}: {name} differs from the reference"

    sizes = {
        "num_experts": shape.experts,
        "num_max_tokens_per_rank": shape.tokens,
        "expert_alignment": alignment,
        "expand_factor": float(shape.experts),
    }
    there = reference.dispatch(
        inputs.x,
        inputs.topk_idx,
        inputs.weights,
        do_expand=True,
        do_zero_padding=True,
        **sizes,  # type: ignore[arg-type]
    )
    handles = [one.handle for one in there]
    same("received", [one.recv_x for one in there])
    same("received weights", [one.recv_topk_weights for one in there])
    same("counts", [handle.num_unaligned_recv_tokens_per_expert for handle in handles])
    weights = column("received weights")
    back = reference.combine(column("rows"), handles, weights, apply_weights=True)
    same("combined", [one.combined_x for one in back])
    grads: list[Any] = [
        one.recv_x
        for one in reference.dispatch(inputs.grad, None, handles=handles, do_expand=True, do_zero_padding=True)
    ]
    weighted = [(g.float() * w[:, None]).to(g.dtype) for g, w in zip(grads, weights, strict=True)]
    same("rows.grad", weighted)
    home = reference.combine(column("received.grad"), handles, column("received weights.grad"))
    same("combined x.grad", [one.combined_x for one in home])
    same("combined weights.grad", [one.combined_topk_weights for one in home])
    for rank, of_rank in enumerate(found):
        idle = of_rank["counts"] == 0
        for name in ("gate_up.grad", "down.grad"):
            assert not of_rank[name][idle].any(), f"{place}, rank {rank}: {name} of an expert without rows"


# ---------------------------------------------------------------- the same layer, densely


def _experts_densely(
    x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where it was not selected."""
    total = torch.zeros_like(x)
    for expert in range(len(down)):
        weight = (weights * (idx == expert)).sum(dim=1, keepdim=True)
        gate, up = (x @ gate_up[expert].T).chunk(2, dim=1)
        total = total + weight * ((F.silu(gate) * up) @ down[expert].T)
    return total


def _dense(inputs: Inputs, found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Output and gradients in fp64, of the tokens and experts of all ranks."""
    x, weights = _wide(inputs.x), _wide(inputs.weights)
    gate_up, down = (_wide([of_rank[name] for of_rank in found]) for name in ("gate_up", "down"))
    out = _experts_densely(x, torch.cat(inputs.topk_idx), weights, gate_up, down)
    grads = torch.autograd.grad(out, (x, weights, gate_up, down), torch.cat(inputs.grad).double())
    names = ("x.grad", "weights.grad", "gate_up.grad", "down.grad")
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def _wide(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).double().requires_grad_()


def _relative_error(
    expected: dict[str, torch.Tensor], found: list[dict[str, torch.Tensor]], dtype: torch.dtype, place: str
) -> float:
    """The largest of any name, within the tolerance of the dtype; 0 must be met by 0."""
    errors = {}
    for name, want in expected.items():
        difference = (torch.cat([of_rank[name] for of_rank in found]).double() - want).norm()
        norm = want.norm()
        assert norm or not difference, f"{dtype}, {place}: {name} is not 0"
        errors[name] = float(difference / norm) if norm else 0.0
    within = all(error <= TOLERANCE[dtype] for error in errors.values())  # not so for nan
    assert within, f"{dtype}, {place}: relative errors {errors}, allowed {TOLERANCE[dtype]:.0e}"
    return max(errors.values())


# ---------------------------------------------------------------- a router, and rows that do not fit


def _check_router(ranks: Loopback, shape: Shape, dtype: torch.dtype) -> float:
    """Gradients that reach a linear router through the weights of the experts that it chose."""
    inputs = _draw(shape, dtype, "uniform", seed=40)

    def step(rank: int, buffer: Buffer) -> dict[str, torch.Tensor]:
        moe = _layer(buffer, shape, dtype)
        assert moe.router is not None
        x = inputs.x[rank].to(buffer.device, copy=True).requires_grad_()
        with torch.no_grad():
            chosen = moe.route(x)[0]
        out = moe(x)
        out.backward(inputs.grad[rank].to(buffer.device))
        router = moe.router.get_parameter("weight")
        assert x.grad is not None and router.grad is not None
        values = {"out": out, "x.grad": x.grad, "router.grad": router.grad, "chosen": chosen, "router": router}
        return {n: v.detach().cpu() for n, v in {**values, "gate_up": moe.gate_up, "down": moe.down}.items()}

    found = ranks.run(step)
    x, gate_up, down = (
        _wide(parts) for parts in (inputs.x, *([one[name] for one in found] for name in ("gate_up", "down")))
    )
    idx, router = torch.cat([one["chosen"] for one in found]), _wide([found[0]["router"]])
    out = _experts_densely(x, idx, (x @ router.T).gather(1, idx).softmax(dim=1), gate_up, down)
    grads = torch.autograd.grad(out, (x, router), torch.cat(inputs.grad).double())
    total = sum(one.pop("router.grad") for one in found)
    assert isinstance(total, torch.Tensor)
    errors = [
        _relative_error({"out": out.detach(), "x.grad": grads[0]}, found, dtype, "router"),
        _relative_error({"router.grad": grads[1]}, [{"router.grad": total}], dtype, "router"),
    ]
    return max(errors)


def _check_overflow(device: str, shape: Shape) -> None:
    """Where the rows of a rank do not fit, all ranks raise, and the next step goes through."""
    dtype = torch.float32
    inputs = _draw(shape, dtype, "uniform", seed=50)

    def step(rank: int, buffer: Buffer) -> None:
        moe = _layer(buffer, shape, dtype, router=False, expert_alignment=1)
        x = torch.ones(shape.tokens, shape.hidden, device=buffer.device)
        weights = torch.ones(shape.tokens, shape.topk, device=buffer.device)
        try:
            moe(x, torch.zeros(shape.tokens, shape.topk, dtype=torch.int64, device=buffer.device), weights)
        except CapacityError:
            x, idx = inputs.x[rank].to(buffer.device), inputs.topk_idx[rank].to(buffer.device)
            moe(x, idx, weights[: len(x)]).sum().backward()
            return
        raise AssertionError(f"rank {rank}: no CapacityError")

    with _ranks(device, shape, dtype, 2.0) as ranks:
        ranks.run(step)
