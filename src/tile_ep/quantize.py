"""Per-token fp8 with one fp32 scale for each 128 elements: DeepEP's and DeepGEMM's convention for activations."""

from __future__ import annotations

import torch

from tile_ep.errors import ArgumentError
from tile_ep.layout import align, ceil_div

BLOCK = 128
"""Elements that share a scale."""

FP8_MAX = 448.0
"""Largest finite value of `torch.float8_e4m3fn`."""

_SMALLEST_MAXIMUM = 1e-4  # a block of zeros gets this for its maximum, as in DeepEP's `per_token_cast_to_fp8`


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows in blocks of 128 elements.

    A block's scale is its largest absolute value, at least 1e-4, divided by 448; an element is `x / scale`, rounded to
    fp8. The last block of a row may be shorter.

    Args:
        x: `[T, H]` bf16, fp16 or fp32, `H >= 1`.

    Returns:
        `(data [T, H] float8_e4m3fn, scales [T, ceil(H / 128)] fp32)`, a payload for `Buffer.dispatch`.

    Raises:
        ArgumentError: `x` is not a matrix of floats.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ArgumentError("x", f"{list(x.shape)} {x.dtype}", "[num_tokens, hidden] of floats")
    hidden = x.shape[1]
    blocks = _blocks(x.float())
    scales = blocks.abs().amax(dim=2).clamp(min=_SMALLEST_MAXIMUM) / FP8_MAX
    data = (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    flat = data.view(torch.uint8).flatten(1)[:, :hidden]
    return flat.contiguous().view(torch.float8_e4m3fn), scales


def per_token_cast_back(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Undo `per_token_cast_to_fp8`, up to its rounding.

    Args:
        data: `[T, H]` float8_e4m3fn.
        scales: `[T, ceil(H / 128)]` fp32, any strides.
        dtype: of the result.

    Returns:
        `[T, H]` of `dtype`.

    Raises:
        ArgumentError: the shapes do not belong together.
    """
    num_tokens, hidden = data.shape
    if tuple(scales.shape) != (num_tokens, ceil_div(hidden, BLOCK)):
        raise ArgumentError(
            "scales", list(scales.shape), f"[{num_tokens}, {ceil_div(hidden, BLOCK)}] for data {[*data.shape]}"
        )
    blocks = _blocks(data.float()) * scales.float().unsqueeze(2)
    return blocks.flatten(1)[:, :hidden].to(dtype)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """`[T, ceil(H / 128), 128]`, padded with zeros."""
    num_tokens, hidden = x.shape
    width = align(hidden, BLOCK)
    return torch.nn.functional.pad(x, (0, width - hidden)).view(num_tokens, width // BLOCK, BLOCK)
