"""Dispatch and combine that gradients pass through.

The backward of a dispatch is a combine of the rows' gradients, and the backward of a combine is a cached dispatch of
the tokens' gradients. Both are collective: every rank that took part in the forward takes part in the backward, also
one without tokens, without rows, or whose own tensors need no gradient. So whatever `dispatch` and `combine` return
requires a gradient whenever grad mode is on, and each combine leads back to its dispatch even where no row does.

Every rank must run the backward of what it has run forward: the same calls, and a loss that depends on every combined
result (the sum over no rows does). Backward then runs the collectives in the reverse order of forward, on every rank.

Under `torch.utils.checkpoint` the recomputed forward is collective as well. Dispatch and combine both save a tensor, and
ask for it before they communicate, so that every rank recomputes, at the same point.

PyTorch runs the backward of everything on one GPU in one thread of the process. Where the ranks are threads that share a
GPU (`tile_ep.loopback`), the backward of one rank would wait there for that of the next, queued behind it. So in such a
world dispatch and combine switch that off for the thread that calls them, as `torch.autograd.set_multithreading_enabled
(False)` does: its backward, called in the same thread, runs in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tile_ep.buffer import Buffer
from tile_ep.errors import ArgumentError
from tile_ep.handle import EPHandle


@dataclass(frozen=True, eq=False)
class Received:
    """What a differentiable dispatch brought to this rank.

    Attributes:
        x: `[rows, H]`, in the dtype that was sent; differentiable. In the expanded layout the gaps that alignment
            leaves are zero.
        topk_idx: `[rows, K]`, local experts or -1, in the rank layout; `None` in the expanded layout.
        topk_weights: `[rows]` fp32 in the expanded layout, 0 in gaps; `[rows, K]` in the rank layout; `None` where
            none were sent; differentiable.
        handle: the plan.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: EPHandle
    _link: torch.Tensor

    @property
    def ends(self) -> torch.Tensor:
        """`[E_local]` int32: the row after each expert's segment of the expanded layout, gap included."""
        alignment = self.handle.expert_alignment
        real = self.handle.psum_num_recv_tokens_per_expert
        return torch.div(real + (alignment - 1), alignment, rounding_mode="floor").mul(alignment).to(torch.int32)


@torch.compiler.disable
def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    num_experts: int | None = None,
    expert_alignment: int | None = None,
    do_expand: bool = True,
) -> Received:
    """`Buffer.dispatch` with gradients to `x` and `topk_weights`. Collective, and so is its backward.

    Args:
        buffer: the exchange.
        x: `[T, H]` bf16, fp16 or fp32.
        topk_idx: `[T, K]`, experts or -1.
        topk_weights: `[T, K]`. All ranks give it, or none. Its gradient has 0 where nothing was selected; in the
            rank layout, what arrives for the selections of other ranks counts for nothing.
        num_experts, expert_alignment: as in `Buffer.dispatch`.
        do_expand: one row per (token, expert), grouped by expert, rather than one per (token, rank).

    Returns:
        The rows received, exactly as many as there are (this synchronises with the host).

    Raises:
        Whatever `Buffer.dispatch` raises.
    """
    _keep_backward_here(buffer)
    plan: list[EPHandle] = []
    options = {"num_experts": num_experts, "expert_alignment": expert_alignment, "do_expand": do_expand}
    recv_x, recv_idx, recv_weights, link = _Dispatch.apply(buffer, options, plan, _anchor(x), x, topk_idx, topk_weights)
    return Received(recv_x, recv_idx, recv_weights, plan[0], link)


@torch.compiler.disable
def combine(
    buffer: Buffer, x: torch.Tensor, received: Received, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """`Buffer.combine` with gradients to `x` and `topk_weights`. Collective, and so is its backward.

    Args:
        buffer: the exchange that `received` came through.
        x: expert outputs, `[rows, H']` bf16, fp16 or fp32, one for each row received.
        received: what the dispatch returned; may be combined any number of times.
        topk_weights: `[rows]`, by which the rows of an expanded layout are multiplied (in fp32) before they are
            summed. All ranks give it, or none.

    Returns:
        `[T, H']` in the dtype of `x`.

    Raises:
        ArgumentError: weights for a rank layout.
        Whatever `Buffer.combine` raises.
    """
    if topk_weights is not None and not received.handle.do_expand:
        raise ArgumentError("topk_weights", "weights of rows", "None for a rank layout", "Dispatch with do_expand=True")
    _keep_backward_here(buffer)
    combined: torch.Tensor = _Combine.apply(buffer, received.handle, _anchor(x), received._link, x, topk_weights)
    return combined


def _keep_backward_here(buffer: Buffer) -> None:
    """Where ranks are threads that share a GPU, let a backward that this thread calls run in this thread."""
    if buffer.group is None and buffer.device.type == "cuda" and torch.is_grad_enabled():
        torch.autograd.set_multithreading_enabled(False)


def _anchor(like: torch.Tensor) -> torch.Tensor:
    """An input that requires a gradient and gets none: what is made of it has a backward."""
    return torch.zeros((), device=like.device, requires_grad=True)


class _Dispatch(torch.autograd.Function):
    """Also returns a link: a scalar for the combine to depend on, so that this backward runs after that one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        buffer: Buffer,
        options: dict[str, Any],
        plan: list[EPHandle],
        anchor: torch.Tensor,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
            x.detach(), topk_idx, topk_weights, do_zero_padding=options["do_expand"], **options
        )
        assert isinstance(recv_x, torch.Tensor)
        plan.append(handle)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(anchor)
        ctx.weights_dtype = None if topk_weights is None else topk_weights.dtype
        if recv_idx is not None:
            ctx.mark_non_differentiable(recv_idx)
        # `data`: views of a slot that autograd does not take for views, which could not be changed in place.
        return recv_x.data, recv_idx, None if recv_weights is None else recv_weights.data, anchor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_x: torch.Tensor, _idx: Any, grad_weights: torch.Tensor, _link: torch.Tensor
    ) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # what a checkpoint has to recompute, it recomputes now
        weighted = ctx.weights_dtype is not None
        back, weights, _ = ctx.buffer.combine(grad_x, ctx.handle, grad_weights if weighted else None)
        return None, None, None, None, back, None, weights.to(ctx.weights_dtype) if weighted else None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        buffer: Buffer,
        handle: EPHandle,
        anchor: torch.Tensor,
        link: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(anchor, *(() if topk_weights is None else (x, topk_weights)))
        combined, _, _ = buffer.combine(x.detach(), handle, topk_weights, apply_weights=topk_weights is not None)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        _, *weighted = ctx.saved_tensors  # what a checkpoint has to recompute, it recomputes now
        expand = ctx.handle.do_expand
        rows, _, _, _, _ = ctx.buffer.dispatch(grad, handle=ctx.handle, do_expand=expand, do_zero_padding=expand)
        link = torch.zeros((), device=grad.device)
        if not weighted:
            return None, None, None, link, rows, None
        x, weights = weighted
        wide = rows.float()
        grad_x = (wide * weights.float().unsqueeze(1)).to(rows.dtype) if ctx.needs_input_grad[4] else None
        grad_weights = (wide * x.float()).sum(dim=1).to(weights.dtype) if ctx.needs_input_grad[5] else None
        return None, None, None, link, grad_x, grad_weights
