"""A Mixture-of-Experts layer with SwiGLU experts: one expert, and the whole layer in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tile_ep.trace import Trace


@dataclass(frozen=True)
class Experts:
    """Weights of all experts, made from a seed when they are needed: the same ones on whichever rank asks.

    Attributes:
        hidden: `H`.
        seed: of the weights.
    """

    hidden: int
    seed: int

    @property
    def intermediate(self) -> int:
        """`I`, elements between the two matrices."""
        return min(self.hidden, 256)

    def weights(self, expert: int, device: torch.device | None = None) -> Weights:
        """Those of one expert, counted over all ranks."""
        generator = torch.Generator().manual_seed(self.seed * 65536 + expert)
        gate_up = torch.randn(self.hidden, 2 * self.intermediate, generator=generator) / self.hidden**0.5
        down = torch.randn(self.intermediate, self.hidden, generator=generator) / self.intermediate**0.5
        return Weights(gate_up.to(device), down.to(device))


@dataclass(frozen=True)
class Weights:
    """An expert: `gate_up` `[H, 2 I]` and `down` `[I, H]`, fp32."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`(silu(x @ gate) * (x @ up)) @ down`: `[n, H]` of any dtype to `[n, H]` fp32."""
        gate, up = (x.float() @ self.gate_up).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ self.down


def selected_rows(topk_idx: torch.Tensor, topk_weights: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that select `expert`, and the weight of it in each; a row that names it twice has both weights.

    Args:
        topk_idx, topk_weights: `[n, K]`.

    Returns:
        `[m]` int64 and `[m]` fp32.
    """
    here = topk_idx == expert
    rows = here.any(dim=1).nonzero().flatten()
    return rows, (topk_weights[rows].float() * here[rows]).sum(dim=1)


def dense_layer(trace: Trace, experts: Experts, tick: Callable[[], None]) -> torch.Tensor:
    """The whole layer in fp32, without any exchange: `[T, H]`. Calls `tick` after each expert."""
    output = torch.zeros(trace.num_tokens, trace.hidden)
    for expert in range(trace.num_experts):
        rows, weight = selected_rows(trace.topk_idx, trace.topk_weights, expert)
        if len(rows):
            output.index_add_(0, rows, experts.weights(expert)(trace.x[rows]) * weight.unsqueeze(1))
        tick()
    return output


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference, relative to that of `expected` where it is not 0."""
    difference = float((got.double() - expected.double()).norm())
    scale = float(expected.double().norm())
    return difference / scale if scale > 0 else difference
