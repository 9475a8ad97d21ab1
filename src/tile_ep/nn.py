"""An expert-parallel Mixture-of-Experts layer over a `Buffer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
        uses_grouped_mm: whether the matrix products of all experts are one call, rather than one for each expert.

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
        self.router: nn.Module | None
        if isinstance(router, nn.Module):
            self.router = router
        elif router:
            linear = nn.utils.skip_init(nn.Linear, hidden, num_experts, bias=False, device=where)
            _draw(linear.get_parameter("weight"), generator)
            self.router = linear
        else:
            self.router = None
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * intermediate, hidden, dtype=dtype, device=where))
        self.down = nn.Parameter(torch.empty(num_local, hidden, intermediate, dtype=dtype, device=where))
        self._draw_experts(generator)
        self._matmul = _choose_matmul(self.gate_up, self.down)

    @property
    def uses_grouped_mm(self) -> bool:
        return self._matmul is _grouped

    def _draw_experts(self, generator: torch.Generator | None) -> None:
        """Each from its own seed, so that it does not depend on which others are here."""
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
        tokens = x.float() if isinstance(self.router, nn.Linear) and self.router.weight.dtype == torch.float32 else x
        chosen, topk_idx = self.router(tokens).float().topk(self.num_topk, dim=-1)
        return topk_idx, chosen.softmax(dim=-1)  # softmax over all, renormalised over the chosen

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the experts make of the tokens. Collective.

        Args:
            x: `[..., hidden]` in the layer's dtype; `T` tokens, which may differ from rank to rank and be 0.
            topk_idx: `[T, K]` experts, -1 selects nothing; by default the router chooses.
            topk_weights: `[T, K]`, given together with `topk_idx`.

        Returns:
            As `x`. A token without selections gets zero.

        Raises:
            ArgumentError: an argument is wrong; nothing has moved.
            CapacityError: a rank's experts are chosen more often than the buffer's `expand_factor` allows.
        """
        if x.shape[-1:] != (self.hidden,) or x.dtype != self.down.dtype:
            raise ArgumentError("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.hidden}] {self.down.dtype}")
        tokens = x.reshape(-1, self.hidden)
        if topk_idx is None:
            if topk_weights is not None:
                raise ArgumentError("topk_weights", "weights without topk_idx", "both, or none to use the router")
            topk_idx, topk_weights = self.route(tokens)
        elif topk_weights is None:
            raise ArgumentError("topk_weights", None, "weights, since topk_idx is given")
        received = autograd.dispatch(
            self.buffer,
            tokens,
            topk_idx,
            topk_weights,
            num_experts=self.num_experts,
            expert_alignment=self.expert_alignment,
        )
        rows = self._experts(received.x, received.ends)
        return autograd.combine(self.buffer, rows, received, received.topk_weights).reshape(x.shape)

    def _experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        matmul = self._matmul if len(rows) else _one_by_one  # no rows: gradients of zero, not none
        gate, up = matmul(rows, self.gate_up, ends).chunk(2, dim=1)
        return matmul(F.silu(gate) * up, self.down, ends)

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


def _choose_matmul(*weights: nn.Parameter) -> GroupedMatmul:
    """`_grouped` where a trial with weights of these shapes gets through forward and backward."""
    for weight in weights:
        if any(size * weight.element_size() % 16 for size in weight.shape[1:]):
            return _one_by_one
        trial = torch.zeros_like(weight, requires_grad=True)
        rows = torch.zeros(16, weight.shape[2], dtype=weight.dtype, device=weight.device, requires_grad=True)
        ends = torch.full((len(weight),), 16, dtype=torch.int32, device=weight.device)
        try:
            with torch.enable_grad():
                product = _grouped(rows, trial, ends)
            torch.autograd.grad(product, (rows, trial), torch.zeros_like(product))
        except (AttributeError, NotImplementedError, RuntimeError):
            return _one_by_one
    return _grouped
