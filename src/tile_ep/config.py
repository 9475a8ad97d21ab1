"""Where a buffer's settings come from: arguments, the group's own, the environment. Read once, when it is built."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tile_ep import validation as check
from tile_ep.backends.base import BufferConfig
from tile_ep.errors import ArgumentError, BackendUnavailableError
from tile_ep.layout import ceil_div, region_layout

BACKENDS = ("auto", "collective", "nvlink")
DEFAULT_TIMEOUT_S = 300.0
MAX_TIMEOUT_S = 1e9
"""About 31 years. Clocks and semaphores of Python and gloo overflow soon after."""


def debug_enabled() -> bool:
    """Whether `TILE_EP_DEBUG` asks for a collective check of every call's arguments."""
    return os.environ.get("TILE_EP_DEBUG", "0") not in ("", "0")


def backend_choice(argument: str) -> str:
    """The backend to use: `TILE_EP_BACKEND` where it is set, else `argument`.

    Raises:
        ArgumentError: the name is not one of `BACKENDS`.
    """
    override = os.environ.get("TILE_EP_BACKEND", "")
    name, choice = ("TILE_EP_BACKEND", override) if override else ("backend", argument)
    if choice not in BACKENDS:
        raise ArgumentError(name, repr(choice), "one of " + ", ".join(map(repr, BACKENDS)))
    return choice


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "group",
                "None, and no default process group",
                "a torch.distributed process group",
                "Call torch.distributed.init_process_group first, or use tile_ep.loopback for one process",
            )
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            "group", check.describe(group), "a torch.distributed process group that this rank belongs to"
        )
    return group


def parse_device(device: object, expected: str) -> torch.device:
    try:
        return torch.device(device)  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ArgumentError("device", check.describe(device), expected) from error


def resolve_device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """With an index, so that it compares equal to the device of tensors."""
    if device is None:
        uses_nccl = "cuda:nccl" in str(dist.get_backend_config(group))
        device = "cuda" if uses_nccl and torch.cuda.is_available() else "cpu"
    where = parse_device(device, "a CPU or CUDA device")
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError("device", where, "a CPU or CUDA device")
    if where.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BackendUnavailableError(f"device={where}: this PyTorch sees no CUDA device. Use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)


def group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    try:
        timeout = group._get_backend(device).options._timeout
        return min(float(timeout.total_seconds()), MAX_TIMEOUT_S)
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT_S


def make_config(
    num_ranks: int,
    *,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    dtype: torch.dtype,
    max_scale_bytes: int | None,
    expand_factor: float,
    num_slots: int,
    pipeline_depth: int,
    timeout_s: float,
) -> BufferConfig:
    if dtype not in check.ROW_DTYPES:
        raise ArgumentError("dtype", check.describe(dtype), "torch.bfloat16, torch.float16 or torch.float32")
    experts = check.check_int("num_experts", num_experts, 0)
    width = check.check_int("hidden", hidden, 1)
    default_scales = 4 * ceil_div(width, 128)
    return BufferConfig(
        num_max_tokens_per_rank=check.check_int("num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
        hidden=width,
        num_topk=check.check_num_topk(num_topk, minimum=0),
        num_experts=check.check_num_experts(experts, num_ranks) if experts else 0,
        dtype=dtype,
        max_scale_bytes=default_scales
        if max_scale_bytes is None
        else check.check_int("max_scale_bytes", max_scale_bytes, 0),
        expand_factor=check.check_positive("expand_factor", expand_factor),
        num_slots=check.check_int("num_slots", num_slots, 1),
        timeout_s=check.check_positive("timeout_s", timeout_s, MAX_TIMEOUT_S),
        pipeline_depth=check.check_int("pipeline_depth", pipeline_depth, 0),
    )


def size_of(config: BufferConfig, num_ranks: int, num_max_tokens_per_rank: int) -> int:
    """Symmetric memory per rank, in bytes, with this many tokens per rank."""
    return region_layout(
        num_ranks,
        num_max_tokens_per_rank,
        config.hidden * config.dtype.itemsize,
        config.max_scale_bytes,
        config.num_topk,
        config.num_experts,
        config.expand_factor,
        config.num_slots,
    ).allocation


def check_cap(config: BufferConfig, num_ranks: int, max_bytes: int | None) -> None:
    """Refuse sizes beyond the caller's limit, and say how many tokens would fit."""
    if max_bytes is None:
        return
    limit = check.check_int("max_bytes", max_bytes, 1)
    needed = size_of(config, num_ranks, config.num_max_tokens_per_rank)
    if needed <= limit:
        return
    fits, too_many = 0, config.num_max_tokens_per_rank
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if size_of(config, num_ranks, middle) <= limit else (fits, middle)
    hint = f"num_max_tokens_per_rank={fits} fits" if fits else "Not even one token per rank fits"
    raise ArgumentError("max_bytes", f"{limit} bytes", f"at least {needed} bytes for these sizes", hint)
