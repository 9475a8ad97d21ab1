"""The exchange with experts that change nothing: what comes back is known to the last bit."""

from __future__ import annotations

import torch

from tile_ep.backends.base import Payload
from tile_ep.buffer import Buffer
from tile_ep.layout import ExpertPartition
from tile_ep.quantize import per_token_cast_back


def as_rows(payload: Payload) -> torch.Tensor:
    """The rows of a payload as one tensor; quantised ones in fp32."""
    return per_token_cast_back(*payload, torch.float32) if isinstance(payload, tuple) else payload


def inexact_tokens(
    buffer: Buffer,
    x: Payload,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    partition: ExpertPartition,
    expand: bool,
    dtype: torch.dtype,
) -> int:
    """Send this rank's tokens out and get them back unchanged; how many sums or weights differ in any bit. Collective.

    Args:
        x: `[T, H]`, or data and scales.
        topk_idx, topk_weights: `[T, K]`, the weights fp32.
        expand: dispatch in the expanded layout.
        dtype: of the rows on their way back.
    """
    received, _, weights, handle, _ = buffer.dispatch(x, topk_idx, topk_weights, do_expand=expand)
    sums, weights_back, _ = buffer.combine(as_rows(received).to(dtype), handle, weights)
    assert weights_back is not None
    expected = expected_sums(as_rows(x).to(dtype), topk_idx, partition, expand)
    expected_weights = topk_weights.masked_fill(topk_idx < 0, 0.0)
    exact = (sums == expected).all(dim=1) & (weights_back == expected_weights).all(dim=1)
    return int((~exact).sum())


def expected_sums(rows: torch.Tensor, topk_idx: torch.Tensor, partition: ExpertPartition, expand: bool) -> torch.Tensor:
    """What combine gives if every expert returns its rows: a token as often as it was sent, added up as combine does.

    Args:
        rows: `[T, H]` floats.

    Returns:
        `[T, H]` of the same dtype.
    """
    owners = torch.tensor([partition.rank_of(expert) for expert in range(partition.num_experts)], device=rows.device)
    owner = owners[topk_idx.clamp(min=0).long()].masked_fill(topk_idx < 0, -1)
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for k in range(topk_idx.shape[1]):  # the first selection of a destination adds what that destination returns
        this = owner[:, k : k + 1]
        leads = (this[:, 0] >= 0) & ~(owner[:, :k] == this).any(dim=1)
        tokens = leads.nonzero().flatten()
        copies = (owner == this).sum(dim=1)[tokens] if expand else torch.ones_like(tokens)
        total[tokens] += _added_up(rows[tokens], copies).to(rows.dtype).float()
    return total.to(rows.dtype)


def _added_up(rows: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """Each row as often as `copies` says, added one by one in fp32: a product would round otherwise."""
    partial = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for done in range(int(copies.max()) if len(copies) else 0):
        more = copies > done
        partial[more] += rows[more].float()
    return partial
