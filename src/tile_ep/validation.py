"""Checks of what a caller passes in. Nothing here communicates or touches a GPU; all of it is local.

Every function either returns the argument in the form that backends expect (contiguous, in the
expected dtype) or raises an exception that names the argument, what was given and what is accepted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NoReturn, cast

import torch

from tile_ep.backends.base import BufferConfig, Payload
from tile_ep.errors import ArgumentError, RoutingError, StaleHandleError
from tile_ep.handle import EPHandle
from tile_ep.layout import MAX_TOPK

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Rows without scales, and everything that combine sums."""

INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def describe(value: object) -> str:
    """A value in words, short enough for a message."""
    if isinstance(value, torch.Tensor):
        return f"{_name(value.dtype)} {list(value.shape)} on {value.device}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(describe(item) for item in value)})"
    return f"a {type(value).__name__}"


def _natural_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in row-major order, with the strides that its shape implies.

    PyTorch calls a tensor contiguous whatever its strides are along dimensions of size 0 or 1, and also where its
    memory holds the negative or the conjugate of what it says (`Tensor.is_neg`, `Tensor.is_conj`).
    """
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    natural = _natural_strides(tensor.shape)
    return tensor if tensor.stride() == natural else tensor.as_strided(tensor.shape, natural)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)


def check_int(argument: str, value: object, minimum: int, maximum: int | None = None, hint: str | None = None) -> int:
    """`value` as an int within `minimum .. maximum`."""
    expected = f"an integer >= {minimum}" if maximum is None else f"an integer in {minimum}..{maximum}"
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, torch.Tensor):
        raise ArgumentError(argument, describe(value), expected)
    number = operator.index(cast("int", value))
    if number < minimum or (maximum is not None and number > maximum):
        raise ArgumentError(argument, number, expected, hint)
    return number


def check_positive(argument: str, value: object, maximum: float = math.inf) -> float:
    """`value` as a finite float > 0 and at most `maximum`."""
    expected = "a finite number > 0" if maximum == math.inf else f"a number > 0 and at most {maximum:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum or value == math.inf:
        raise ArgumentError(argument, describe(value), expected)
    return float(value)


def check_num_experts(value: object, num_ranks: int, maximum: int = 0) -> int:
    """Number of experts of a call: at least one per rank, and at most what the buffer was built for (0: no limit)."""
    number = check_int("num_experts", value, 1)
    if number < num_ranks:
        raise ArgumentError(
            "num_experts",
            f"{number} experts for {num_ranks} ranks",
            f"at least one expert per rank, so num_experts >= {num_ranks}",
            "Use a smaller group",
        )
    if maximum and number > maximum:
        raise ArgumentError(
            "num_experts",
            number,
            f"at most {maximum}, what the Buffer was built with",
            f"Build the Buffer with num_experts={number}",
        )
    return number


def check_num_topk(value: object, argument: str = "num_topk", minimum: int = 1) -> int:
    """Selections per token, up to the limit of the kernels (a warp handles a token, a lane a selection)."""
    return check_int(argument, value, minimum, MAX_TOPK, f"The limit is {MAX_TOPK} selections per token")


def check_tensor(
    argument: str,
    value: object,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device,
    words: str,
) -> torch.Tensor:
    """`value`, if it is a dense tensor of this rank, dtype, device and shape (`None`: any size).

    Args:
        words: the shape in words, for the message, for example `"[num_tokens=4, num_topk=2]"`.
    """

    def refuse(hint: str | None = None) -> NoReturn:
        expected = f"a tensor {words}" + (f" of {_names(dtypes)}" if dtypes else "") + f" on {device}"
        raise ArgumentError(argument, describe(value), expected, hint)

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        refuse()
    if dtypes and value.dtype not in dtypes:
        refuse()
    if value.dim() != len(shape):
        refuse()
    if any(want is not None and got != want for got, want in zip(value.shape, shape, strict=True)):
        refuse()
    if value.device != device:
        refuse(f"Move it with .to({str(device)!r})")
    return value


def check_payload(x: object, config: BufferConfig, num_max_tokens: int, device: torch.device) -> Payload:
    """The rows of a dispatch: `[T, H]`, or `(data [T, H], scales [T, S])`."""
    if isinstance(x, tuple | list):
        if len(x) != 2:
            raise ArgumentError("x", describe(x), "a tensor, or a tuple (data, scales)")
        data = check_tensor("x[0]", x[0], (None, None), None, device, "[num_tokens, hidden]")
        tokens = data.shape[0]
        scales = check_tensor("x[1]", x[1], (tokens, None), None, device, f"[num_tokens={tokens}, num_scales]")
        _check_row("x[0]", data, config)
        width = scales.shape[1] * scales.element_size()
        if not 1 <= width <= config.max_scale_bytes:
            raise ArgumentError(
                "x[1]",
                f"{width} bytes of scales per token ({describe(scales)})",
                f"1 to {config.max_scale_bytes} bytes per token",
                f"Build the Buffer with max_scale_bytes={width}" if width else None,
            )
        _check_num_tokens("x[0]", tokens, num_max_tokens)
        return dense(data), dense(scales)
    if isinstance(x, torch.Tensor) and x.dtype not in ROW_DTYPES:
        raise ArgumentError(
            "x",
            describe(x),
            f"{_names(ROW_DTYPES)}, or a tuple (data, scales)",
            "Pass quantized rows with their scales",
        )
    data = check_tensor("x", x, (None, None), ROW_DTYPES, device, "[num_tokens, hidden]")
    _check_row("x", data, config)
    _check_num_tokens("x", data.shape[0], num_max_tokens)
    return dense(data)


def _check_num_tokens(argument: str, tokens: int, maximum: int) -> None:
    if tokens > maximum:
        raise ArgumentError(
            argument,
            f"{tokens} tokens",
            f"at most num_max_tokens_per_rank={maximum}",
            "Build the Buffer with a larger num_max_tokens_per_rank, or split the batch",
        )


def _check_row(argument: str, rows: torch.Tensor, config: BufferConfig) -> None:
    limit = config.hidden * config.dtype.itemsize
    width = rows.shape[1] * rows.element_size()
    if not 1 <= width <= limit:
        raise ArgumentError(
            argument,
            f"rows of {width} bytes ({describe(rows)})",
            f"1 to {limit} bytes, the Buffer's hidden={config.hidden} of {_name(config.dtype)}",
            "Build the Buffer with a larger hidden or a wider dtype" if width else None,
        )


def check_topk_idx(
    topk_idx: object, tokens: int, max_topk: int, num_experts: int, device: torch.device
) -> torch.Tensor:
    """The routing `[T, K]`. Its values are checked where the host can see them without waiting: on CPUs."""
    words = f"[num_tokens={tokens}, num_topk]"
    idx = check_tensor("topk_idx", topk_idx, (tokens, None), INDEX_DTYPES, device, words)
    if not 1 <= idx.shape[1] <= max_topk:
        limit = "the limit" if max_topk == MAX_TOPK else "what the Buffer was built with"
        raise ArgumentError("topk_idx", f"{idx.shape[1]} selections per token", f"1 to {max_topk}, {limit}")
    if device.type == "cpu":
        bad = (idx < -1) | (idx >= num_experts)
        num_bad = int(bad.sum())
        if num_bad:
            raise RoutingError(num_bad, num_experts, int(idx[bad][0]))
    return dense(idx)


def check_weights(weights: object, shape: Sequence[int], device: torch.device, words: str) -> torch.Tensor | None:
    """`topk_weights` of dispatch or combine, as contiguous fp32."""
    if weights is None:
        return None
    return dense(check_tensor("topk_weights", weights, shape, WEIGHT_DTYPES, device, words).to(torch.float32))


def check_stats(stats: object, num_local_experts: int, device: torch.device) -> torch.Tensor | None:
    """The caller's counters. They are updated in place, so they must be contiguous already."""
    if stats is None:
        return None
    name = "cumulative_local_expert_recv_stats"
    words = f"[num_local_experts={num_local_experts}]"
    tensor = check_tensor(name, stats, (num_local_experts,), (torch.int32,), device, words)
    if tensor.is_neg() or not tensor.is_contiguous():
        given = "a negated view" if tensor.is_neg() else f"strides {tensor.stride()}"
        raise ArgumentError(name, given, "a contiguous tensor, since it is updated in place")
    return tensor


def check_handle(handle: object, buffer_id: int) -> EPHandle:
    """A handle that this very buffer returned."""
    if not isinstance(handle, EPHandle):
        raise ArgumentError("handle", describe(handle), "the EPHandle that a dispatch of this Buffer returned")
    if handle.buffer_id != buffer_id:
        raise StaleHandleError(
            f"handle: got a handle of another Buffer (rank {handle.rank} of {handle.num_ranks}), expected one that a "
            "dispatch of this Buffer returned. Dispatch on this Buffer first, or combine on the one that dispatched"
        )
    return handle


def check_matches_handle(argument: str, value: object, of_handle: object) -> None:
    """An argument that a cached dispatch may leave out, and may not contradict."""
    if value is not None and value != of_handle:
        raise ArgumentError(argument, describe(value), f"{of_handle}, as in the handle", "Leave it out")


def check_expert_rows(x: object, handle: EPHandle, config: BufferConfig, device: torch.device) -> torch.Tensor:
    """The expert outputs given to combine: one row for each row of the dispatch."""
    rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    kind = "expanded rows" if handle.do_expand else "received rows"
    tensor = check_tensor("x", x, (rows, None), ROW_DTYPES, device, f"[{rows} {kind} of the handle, hidden]")
    _check_row("x", tensor, config)
    return dense(tensor)


def check_bias(bias: object, tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """No, one or two `[T, H]` tensors in the dtype of `like`."""
    if bias is None:
        return ()
    biases = bias if isinstance(bias, tuple | list) else (bias,)
    if len(biases) > 2:
        raise ArgumentError("bias", f"{len(biases)} tensors", "None, one tensor, or a tuple of at most two")
    shape = (tokens, like.shape[1])
    words = f"[num_tokens={shape[0]}, hidden={shape[1]}]"
    named = (
        [("bias", bias)]
        if len(biases) == 1 and bias is biases[0]
        else [(f"bias[{i}]", b) for i, b in enumerate(biases)]
    )
    return tuple(dense(check_tensor(name, b, shape, (like.dtype,), like.device, words)) for name, b in named)
