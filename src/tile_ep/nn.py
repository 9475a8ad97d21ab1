"""An expert-parallel Mixture-of-Experts layer over a `Buffer`."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tile_ep import autograd
from tile_ep.buffer import Buffer
from tile_ep.errors import ArgumentError
from tile_ep.layout import ExpertPartition

GroupedMatmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rows [N, I], weights [E, O, I], ends [E] int32) -> [N, O]`; segment `e` ends before row `ends[e]`, the last at `N`."""


class MoE(nn.Module):
    """SwiGLU experts, dealt to the ranks of a buffer: `sum_k w_k * down_e(silu(gate_e(x)) * up_e(x))`.

    `forward` is collective, and so is its backward: every rank calls it equally often, with the same `num_topk`, also
    a rank without tokens. A layer neither owns nor destroys its buffer, which any number of layers may share.

    Gradients of the expert parameters already hold what the tokens of all ranks contribute. Those of the router, as
    of every parameter that all ranks hold, are of this rank's tokens and are yours to sum over the ranks
    (`shared_parameters`). With a loss that is the sum of the ranks' losses, both then are gradients of it.

    Under `torch.autocast` tokens cross, and experts compute, in its dtype; a linear router keeps its own. The number of
    rows differs from call to call and ranks wait for each other, so `torch.compile` leaves the layer as it is. A deep
    copy shares the buffer.

    Experts are drawn one by one: ranks whose generators are seeded alike hold parts of the same layer, whatever their
    number.

    Args:
        buffer: the exchange. It must take rows of `hidden` elements of `dtype`, `num_topk` selections, `num_experts`.
        hidden: elements `H` of a token.
        intermediate: elements `I` between the two matrix products of an expert.
        num_experts: experts over all ranks, at least one per rank.
        num_topk: experts per token, for the router.
        router: `True` for a linear one in fp32; a module that makes logits `[T, num_experts]` of `[T, H]`; `False`
            where the caller routes. The weights of a token are the softmax of its `num_topk` largest logits.
        dtype: of tokens and expert parameters: fp32, bf16 or fp16.
        expert_alignment: rows that each expert's segment is rounded up to, with zeros, for the matrix products.
        device: of the parameters; by default the buffer's.
        generator: of the initial parameters, on the CPU; by default the global one. Ranks that share a process need
            one each.

    Attributes:
        gate_up: `[E_local, 2 * intermediate, hidden]`, gate above up.
        down: `[E_local, hidden, intermediate]`.
        first_expert: global index of the first local expert.
        uses_grouped_mm: whether the matrix products of all experts are one call, rather than one for each expert, in the
            dtype and on the device of the parameters.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        buffer: Buffer,
        hidden: int,
        intermediate: int,
        num_experts: int,
        num_topk: int,
        *,
        router: nn.Module | bool = True,
        dtype: torch.dtype = torch.bfloat16,
        expert_alignment: int = 16,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_topk <= num_experts:
            raise ArgumentError("num_topk", num_topk, f"1 to num_experts={num_experts}")
        if num_experts < buffer.num_ranks:
            raise ArgumentError("num_experts", num_experts, f"at least one for each of {buffer.num_ranks} ranks")
        self.buffer = buffer
        self.hidden, self.num_experts, self.num_topk = hidden, num_experts, num_topk
        self.expert_alignment = expert_alignment
        partition = ExpertPartition(num_experts, buffer.num_ranks)
        num_local, self.first_expert = partition.num_local(buffer.rank), partition.first(buffer.rank)
        where = buffer.device if device is None else torch.device(device)
        self._draws_router = router is True
        self.router: nn.Module | None = router if isinstance(router, nn.Module) else None
        if self._draws_router:
            self.router = nn.utils.skip_init(nn.Linear, hidden, num_experts, bias=False, device=where)
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * intermediate, hidden, dtype=dtype, device=where))
        self.down = nn.Parameter(torch.empty(num_local, hidden, intermediate, dtype=dtype, device=where))
        self.reset_parameters(generator)

    @property
    def uses_grouped_mm(self) -> bool:
        return self._matmul(self.down.dtype) is _grouped

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the experts and the router anew, but not a router that was given."""
        if self._draws_router:
            assert self.router is not None
            _draw(self.router.get_parameter("weight"), generator)
        # An expert has its own seed, so it does not depend on which others are here.
        seed = int(torch.randint(2**62, (), generator=generator))
        for local in range(len(self.gate_up)):
            own = torch.Generator().manual_seed(seed + self.first_expert + local)
            for weight in (self.gate_up, self.down):
                _draw(weight[local], own)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that only this rank holds."""
        yield self.gate_up
        yield self.down

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The router's choice for tokens `[T, H]`: `topk_idx` `[T, K]` int64 and `topk_weights` `[T, K]` fp32.

        Raises:
            ArgumentError: the layer has no router.
        """
        if self.router is None:
            raise ArgumentError("topk_idx", None, "the routing, since the layer has no router")
        if isinstance(self.router, nn.Linear):
            with torch.autocast(x.device.type, enabled=False):
                logits = self.router(x.to(self.router.weight.dtype))
        else:
            logits = self.router(x)
        chosen, topk_idx = logits.float().topk(self.num_topk, dim=-1)
        return topk_idx, chosen.softmax(dim=-1)  # softmax over all, renormalised over the chosen

    @torch.compiler.disable
    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the experts make of the tokens. Collective.

        Args:
            x: `[..., hidden]` in the layer's dtype, under autocast in any; `T` tokens, which may differ from rank to rank
                and be 0.
            topk_idx: `[T, K]` experts, -1 selects nothing; by default the router chooses.
            topk_weights: `[T, K]`, given together with `topk_idx`.

        Returns:
            As `x`; under autocast, in its dtype. A token without selections gets zero.

        Raises:
            ArgumentError: an argument is wrong; nothing has moved.
            CapacityError: a rank's experts are chosen more often than the buffer's `expand_factor` allows.
        """
        kind = x.device.type
        casts = torch.is_autocast_enabled(kind) and x.is_floating_point()
        dtype = torch.get_autocast_dtype(kind) if casts else self.down.dtype
        if x.shape[-1:] != (self.hidden,) or not (casts or x.dtype == dtype):
            raise ArgumentError("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.hidden}] {dtype}")
        tokens = x.reshape(-1, self.hidden)
        if topk_idx is None:
            if topk_weights is not None:
                raise ArgumentError("topk_weights", "weights without topk_idx", "both, or none to use the router")
            topk_idx, topk_weights = self.route(tokens)
        elif topk_weights is None:
            raise ArgumentError("topk_weights", None, "weights, since topk_idx is given")
        received = autograd.dispatch(
            self.buffer,
            tokens.to(dtype),
            topk_idx,
            topk_weights,
            num_experts=self.num_experts,
            expert_alignment=self.expert_alignment,
        )
        with torch.autocast(kind, enabled=False):
            rows = self._experts(received.x, received.ends)
        return autograd.combine(self.buffer, rows, received, received.topk_weights).reshape(x.shape)

    def _experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        matmul = self._matmul(rows.dtype) if len(rows) else _one_by_one  # no rows: gradients of zero, not none
        gate, up = matmul(rows, self.gate_up.to(rows.dtype), ends).chunk(2, dim=1)
        return matmul(F.silu(gate) * up, self.down.to(rows.dtype), ends)

    def _matmul(self, dtype: torch.dtype) -> GroupedMatmul:
        works = all(
            _grouped_works(dtype, weight.device, weight.shape[1], weight.shape[2])
            for weight in (self.gate_up, self.down)
        )
        return _grouped if works else _one_by_one

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        memo[id(self.buffer)] = self.buffer
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, intermediate={self.down.shape[2]}, num_experts={self.num_experts}, "
            f"num_topk={self.num_topk}, local experts {self.first_expert} to {self.first_expert + len(self.down) - 1}"
        )


def shared_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of `module` that every rank holds: all but the experts of its `MoE` layers."""
    experts = {id(p) for part in module.modules() if isinstance(part, MoE) for p in part.expert_parameters()}
    return (parameter for parameter in module.parameters() if id(parameter) not in experts)


def _draw(weight: torch.Tensor, generator: torch.Generator | None) -> None:
    """Fill `[out, in]` as `nn.Linear` does."""
    bound = 1 / math.sqrt(weight.shape[1])
    with torch.no_grad():
        weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))


# ---------------------------------------------------------------- matrix products of segments


def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return product


def _one_by_one(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    return torch.cat([rows[a:b] @ w.T for a, b, w in zip(starts, stops, weights, strict=True)])


@functools.cache
def _grouped_works(dtype: torch.dtype, device: torch.device, outputs: int, inputs: int) -> bool:
    """Whether `_grouped` gets through forward and backward with weights of these sizes, by trial."""
    if any(size * dtype.itemsize % 16 for size in (outputs, inputs)):
        return False
    with torch.inference_mode(False), torch.enable_grad():
        weights = torch.zeros(2, outputs, inputs, dtype=dtype, device=device, requires_grad=True)
        rows = torch.zeros(16, inputs, dtype=dtype, device=device, requires_grad=True)
        ends = torch.tensor([16, 16], dtype=torch.int32, device=device)
        try:
            product = _grouped(rows, weights, ends)
            torch.autograd.grad(product, (rows, weights), torch.zeros_like(product))
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
    return True
