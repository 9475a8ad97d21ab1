"""Every wrong argument: the exception, the argument it names, the value it shows, and that no rank is left waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import Pools

from tile_ep import ArgumentError, Buffer, EPHandle, RoutingError, StaleHandleError, TileEPError
from tile_ep.backends.base import BufferConfig, CombineRequest, CombineResult, DispatchRequest, DispatchResult
from tile_ep.backends.collective import CollectiveBackend

TOKENS, HIDDEN, TOPK, EXPERTS = 4, 8, 2, 6
SIZES = {"num_max_tokens_per_rank": 5, "hidden": HIDDEN, "num_topk": 3, "num_experts": EXPERTS}


@dataclass
class Scene:
    """A buffer with valid arguments, for a call to spoil."""

    buffer: Buffer
    rank_handle: EPHandle
    expanded_handle: EPHandle
    foreign_handle: EPHandle  # of another buffer that is like this one

    def dispatch(self, **changes: Any) -> object:
        arguments: dict[str, Any] = {"x": rows(), "topk_idx": routing(), "topk_weights": weights()}
        arguments.update(changes)
        return self.buffer.dispatch(**arguments)

    def cached(self, **changes: Any) -> object:
        return self.buffer.dispatch(**{"x": rows(), "handle": self.rank_handle, **changes})

    def combine(self, handle: Any = None, **changes: Any) -> object:
        handle = self.rank_handle if handle is None else handle
        count = 0
        if isinstance(handle, EPHandle):
            count = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        return self.buffer.combine(**{"x": rows(count), "handle": handle, **changes})


def rows(count: int = TOKENS, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.ones(count, hidden, dtype=torch.bfloat16)


def routing(topk: int = TOPK) -> torch.Tensor:
    return torch.arange(TOKENS * topk).reshape(TOKENS, topk) % EXPERTS


def weights(topk: int = TOPK) -> torch.Tensor:
    return torch.full((TOKENS, topk), 0.5)


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def spoiled(topk_idx: torch.Tensor, *values: int) -> torch.Tensor:
    topk_idx.view(-1)[: len(values)] = torch.tensor(values)
    return topk_idx


def fp8(count: int = TOKENS) -> torch.Tensor:
    return torch.zeros(count, HIDDEN).to(torch.float8_e4m3fn)


Wrong = Callable[[Scene], object]

WRONG: dict[str, tuple[type[TileEPError], Wrong, list[str]]] = {
    # what moves
    "x no tensor": (ArgumentError, lambda s: s.dispatch(x="rows"), ["x: got 'rows'", "tensor"]),
    "x dtype": (ArgumentError, lambda s: s.dispatch(x=rows().double()), ["x: got float64 [4, 8]", "bfloat16"]),
    "x fp8 alone": (ArgumentError, lambda s: s.dispatch(x=fp8()), ["x: got float8_e4m3fn", "(data, scales)"]),
    "x one dimension": (
        ArgumentError,
        lambda s: s.dispatch(x=rows()[0]),
        ["x: got bfloat16 [8]", "[num_tokens, hidden]"],
    ),
    "x three dimensions": (ArgumentError, lambda s: s.dispatch(x=rows()[None]), ["x: got bfloat16 [1, 4, 8]"]),
    "x device": (ArgumentError, lambda s: s.dispatch(x=meta(rows())), ["x: got", "on meta", "on cpu"]),
    "x sparse": (ArgumentError, lambda s: s.dispatch(x=rows().to_sparse()), ["x: got bfloat16 [4, 8]"]),
    "too many tokens": (
        ArgumentError,
        lambda s: s.dispatch(x=rows(6)),
        ["x: got 6 tokens", "num_max_tokens_per_rank=5"],
    ),
    "row too wide": (ArgumentError, lambda s: s.dispatch(x=rows(4, 9)), ["x: got rows of 18 bytes", "1 to 16 bytes"]),
    "row empty": (ArgumentError, lambda s: s.dispatch(x=rows(4, 0)), ["x: got rows of 0 bytes"]),
    "fp32 row in a bf16 buffer": (ArgumentError, lambda s: s.dispatch(x=rows().float()), ["x: got rows of 32 bytes"]),
    "three parts": (
        ArgumentError,
        lambda s: s.dispatch(x=(fp8(), rows(), rows())),
        ["x: got a tuple", "(data, scales)"],
    ),
    "scales for fewer tokens": (
        ArgumentError,
        lambda s: s.dispatch(x=(fp8(), torch.ones(3, 1))),
        ["x[1]: got float32 [3, 1]", "num_tokens=4"],
    ),
    "scales too wide": (
        ArgumentError,
        lambda s: s.dispatch(x=(fp8(), torch.ones(4, 2))),
        ["x[1]: got 8 bytes", "1 to 4 bytes", "max_scale_bytes=8"],
    ),
    "no scales": (ArgumentError, lambda s: s.dispatch(x=(fp8(), torch.ones(4, 0))), ["x[1]: got 0 bytes"]),
    "data device": (ArgumentError, lambda s: s.dispatch(x=(meta(fp8()), torch.ones(4, 1))), ["x[0]: got", "on meta"]),
    "too many tokens, with scales": (
        ArgumentError,
        lambda s: s.dispatch(x=(fp8(6), torch.ones(6, 1))),
        ["x[0]: got 6 tokens", "num_max_tokens_per_rank=5"],
    ),
    # routing
    "no routing": (ArgumentError, lambda s: s.dispatch(topk_idx=None), ["topk_idx: got None", "handle"]),
    "routing and handle": (
        ArgumentError,
        lambda s: s.cached(topk_idx=routing()),
        ["topk_idx: got int64 [4, 2]", "None"],
    ),
    "topk_idx tokens": (
        ArgumentError,
        lambda s: s.dispatch(topk_idx=routing()[:3]),
        ["topk_idx: got int64 [3, 2]", "=4"],
    ),
    "topk_idx float": (
        ArgumentError,
        lambda s: s.dispatch(topk_idx=routing().float()),
        ["topk_idx: got float32", "int64"],
    ),
    "topk_idx uint8": (ArgumentError, lambda s: s.dispatch(topk_idx=routing().byte()), ["topk_idx: got uint8"]),
    "topk_idx one dimension": (
        ArgumentError,
        lambda s: s.dispatch(topk_idx=routing()[:, 0]),
        ["topk_idx: got int64 [4]"],
    ),
    "topk_idx device": (ArgumentError, lambda s: s.dispatch(topk_idx=meta(routing())), ["topk_idx: got", "on meta"]),
    "more selections than built for": (
        ArgumentError,
        lambda s: s.dispatch(topk_idx=routing(4), topk_weights=None),
        ["topk_idx: got 4 selections per token", "1 to 3"],
    ),
    "no selections": (ArgumentError, lambda s: s.dispatch(topk_idx=routing()[:, :0]), ["topk_idx: got 0 selections"]),
    "index E": (
        RoutingError,
        lambda s: s.dispatch(topk_idx=spoiled(routing(), 6)),
        ["topk_idx: 1 of", "example 6", "-1..5"],
    ),
    "index -2": (RoutingError, lambda s: s.dispatch(topk_idx=spoiled(routing(), -2)), ["topk_idx: 1 of", "example -2"]),
    "three huge indices": (
        RoutingError,
        lambda s: s.dispatch(topk_idx=spoiled(routing(), 2**40, -(2**40), 7)),
        ["topk_idx: 3 of", f"example {2**40}"],
    ),
    # weights, statistics
    "weights shape": (
        ArgumentError,
        lambda s: s.dispatch(topk_weights=weights(3)),
        ["topk_weights: got float32 [4, 3]", "=2"],
    ),
    "weights dtype": (
        ArgumentError,
        lambda s: s.dispatch(topk_weights=routing()),
        ["topk_weights: got int64", "float32"],
    ),
    "weights device": (
        ArgumentError,
        lambda s: s.dispatch(topk_weights=meta(weights())),
        ["topk_weights: got", "on meta"],
    ),
    "stats length": (
        ArgumentError,
        lambda s: s.dispatch(cumulative_local_expert_recv_stats=torch.zeros(99, dtype=torch.int32)),
        ["cumulative_local_expert_recv_stats: got int32 [99]", "num_local_experts="],
    ),
    "stats dtype": (
        ArgumentError,
        lambda s: s.dispatch(cumulative_local_expert_recv_stats=torch.zeros(EXPERTS // s.buffer.num_ranks)),
        ["cumulative_local_expert_recv_stats: got float32", "int32"],
    ),
    "stats strided": (
        ArgumentError,
        lambda s: s.dispatch(
            cumulative_local_expert_recv_stats=torch.zeros(2 * EXPERTS // s.buffer.num_ranks, dtype=torch.int32)[::2]
        ),
        ["cumulative_local_expert_recv_stats: got strides (2,)", "contiguous"],
    ),
    "stats negated": (
        ArgumentError,
        lambda s: s.dispatch(
            cumulative_local_expert_recv_stats=torch._neg_view(
                torch.zeros(EXPERTS // s.buffer.num_ranks, dtype=torch.int32)
            )
        ),
        ["cumulative_local_expert_recv_stats: got a negated view", "contiguous"],
    ),
    # numbers
    "more experts than built for": (
        ArgumentError,
        lambda s: s.dispatch(num_experts=7),
        ["num_experts: got 7", "at most 6"],
    ),
    "no experts": (ArgumentError, lambda s: s.dispatch(num_experts=0), ["num_experts: got 0", ">= 1"]),
    "experts no integer": (ArgumentError, lambda s: s.dispatch(num_experts=6.0), ["num_experts: got 6.0", "integer"]),
    "tokens per rank beyond the buffer's": (
        ArgumentError,
        lambda s: s.dispatch(num_max_tokens_per_rank=9),
        ["num_max_tokens_per_rank: got 9", "1..5"],
    ),
    "tokens beyond the call's own limit": (
        ArgumentError,
        lambda s: s.dispatch(num_max_tokens_per_rank=3),
        ["x: got 4 tokens", "num_max_tokens_per_rank=3"],
    ),
    "alignment 0": (ArgumentError, lambda s: s.dispatch(expert_alignment=0), ["expert_alignment: got 0", "1..65536"]),
    "alignment a bool": (ArgumentError, lambda s: s.dispatch(expert_alignment=True), ["expert_alignment: got True"]),
    "negative num_sms": (ArgumentError, lambda s: s.dispatch(num_sms=-1), ["num_sms: got -1", ">= 0"]),
    # cached dispatch
    "handle of another buffer": (
        StaleHandleError,
        lambda s: s.cached(handle=s.foreign_handle),
        ["handle", "another Buffer"],
    ),
    "handle no handle": (ArgumentError, lambda s: s.cached(handle={}), ["handle: got a dict", "EPHandle"]),
    "cached with sync": (ArgumentError, lambda s: s.cached(do_cpu_sync=True), ["do_cpu_sync: got True", "handle"]),
    "expand a rank-layout handle": (
        ArgumentError,
        lambda s: s.cached(do_expand=True),
        ["do_expand: got True", "handle"],
    ),
    "cached tokens": (ArgumentError, lambda s: s.cached(x=rows(3)), ["x: got 3 tokens", "4 tokens, as in the handle"]),
    "cached num_experts": (
        ArgumentError,
        lambda s: s.cached(num_experts=5),
        ["num_experts: got 5", "6, as in the handle"],
    ),
    "cached alignment": (
        ArgumentError,
        lambda s: s.cached(expert_alignment=2),
        ["expert_alignment: got 2", "1, as in the"],
    ),
    "cached tokens per rank": (
        ArgumentError,
        lambda s: s.cached(num_max_tokens_per_rank=4),
        ["num_max_tokens_per_rank: got 4", "5, as in the handle"],
    ),
    "cached weights": (
        ArgumentError,
        lambda s: s.cached(topk_weights=weights(3)),
        ["topk_weights: got float32 [4, 3]"],
    ),
    # combine
    "combine handle of another buffer": (StaleHandleError, lambda s: s.combine(s.foreign_handle), ["another Buffer"]),
    "combine without a handle": (ArgumentError, lambda s: s.combine(5, x=rows()), ["handle: got 5", "EPHandle"]),
    "combine rows": (
        ArgumentError,
        lambda s: s.combine(x=rows(1)),
        ["x: got bfloat16 [1, 8]", "received rows of the handle"],
    ),
    "combine expanded rows": (
        ArgumentError,
        lambda s: s.combine(s.expanded_handle, x=rows(1)),
        ["x: got bfloat16 [1, 8]", "expanded rows of the handle"],
    ),
    "combine dtype": (
        ArgumentError,
        lambda s: s.combine(x=rows(s.rank_handle.num_recv_tokens).double()),
        ["x: got float64", "bfloat16 or float16 or float32"],
    ),
    "combine too wide": (
        ArgumentError,
        lambda s: s.combine(x=rows(s.rank_handle.num_recv_tokens, 9)),
        ["x: got rows of 18 bytes", "1 to 16 bytes"],
    ),
    "combine device": (
        ArgumentError,
        lambda s: s.combine(x=meta(rows(s.rank_handle.num_recv_tokens))),
        ["x: got", "on meta"],
    ),
    "combine weights": (
        ArgumentError,
        lambda s: s.combine(topk_weights=torch.ones(s.rank_handle.num_recv_tokens, 3)),
        ["topk_weights: got float32", "num_topk=2"],
    ),
    "combine expanded weights": (
        ArgumentError,
        lambda s: s.combine(s.expanded_handle, topk_weights=torch.ones(1, 2)),
        ["topk_weights: got float32 [1, 2]", "[rows="],
    ),
    "bias shape": (ArgumentError, lambda s: s.combine(bias=rows(3)), ["bias: got bfloat16 [3, 8]", "num_tokens=4"]),
    "bias dtype": (ArgumentError, lambda s: s.combine(bias=rows().float()), ["bias: got float32", "bfloat16"]),
    "bias device": (ArgumentError, lambda s: s.combine(bias=meta(rows())), ["bias: got", "on meta"]),
    "second bias": (ArgumentError, lambda s: s.combine(bias=(rows(), rows(2))), ["bias[1]: got bfloat16 [2, 8]"]),
    "three biases": (ArgumentError, lambda s: s.combine(bias=(rows(), rows(), rows())), ["bias: got 3 tensors", "two"]),
    "apply_weights in the rank layout": (
        ArgumentError,
        lambda s: s.combine(apply_weights=True, topk_weights=torch.ones(s.rank_handle.num_recv_tokens, 2)),
        ["apply_weights: got True", "do_expand=True"],
    ),
    "apply_weights without weights": (
        ArgumentError,
        lambda s: s.combine(s.expanded_handle, apply_weights=True),
        ["topk_weights: got None", "apply_weights"],
    ),
    "combine negative num_sms": (ArgumentError, lambda s: s.combine(num_sms=-3), ["num_sms: got -3"]),
}


class Recorder(CollectiveBackend):
    """A world of one rank that remembers what reached it."""

    def __init__(self, **sizes: Any) -> None:
        self.calls: list[str] = []
        config = BufferConfig(
            **{**SIZES, **sizes},
            dtype=torch.bfloat16,
            max_scale_bytes=4,
            expand_factor=2.0,
            num_slots=2,
            timeout_s=10.0,
            pipeline_depth=2,
        )
        super().__init__(dist.HashStore(), 0, 1, config, torch.device("cpu"))
        self.config = config

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        self.calls.append("dispatch")
        return super().dispatch(request)

    def combine(self, request: CombineRequest) -> CombineResult:
        self.calls.append("combine")
        return super().combine(request)


def make_scene(buffer: Buffer, other: Buffer) -> Scene:
    foreign = other.dispatch(rows(), routing())[3]
    return Scene(
        buffer, buffer.dispatch(rows(), routing())[3], buffer.dispatch(rows(), routing(), do_expand=True)[3], foreign
    )


@pytest.mark.parametrize("name", WRONG)
def test_refused_before_anything_moves(name: str) -> None:
    kind, call, shown = WRONG[name]
    backends = [Recorder(), Recorder()]
    scene = make_scene(*(Buffer.from_backend(backend, backend.config) for backend in backends))
    backends[0].calls.clear()
    with pytest.raises(kind) as raised:
        call(scene)
    assert type(raised.value) is kind
    for text in shown:
        assert text in str(raised.value)
    if isinstance(raised.value, ArgumentError):
        assert raised.value.argument == shown[0].split(":")[0]
    assert backends[0].calls == []
    scene.dispatch()  # the buffer is none the worse


def call_on_one_rank(rank: int, name: str, debug: bool) -> str:
    os.environ["TILE_EP_DEBUG"] = str(int(debug))
    with Buffer(**SIZES, timeout_s=20) as buffer, Buffer(**SIZES) as other:
        scene = make_scene(buffer, other)
        try:
            if rank == 1:
                WRONG[name][1](scene)
            else:
                scene.dispatch()
        finally:
            os.environ["TILE_EP_DEBUG"] = "0"
            buffer.barrier()  # still in step, whoever raised
    return "returned"


@pytest.mark.parametrize("name", WRONG)
def test_debug_tells_all_ranks(name: str, pools: Pools) -> None:
    kind, _, shown = WRONG[name]
    outcomes = pools(3).outcomes(call_on_one_rank, name, True)
    assert outcomes[1].error == kind.__name__, outcomes[1]
    for rank in (0, 2):
        assert outcomes[rank].error == "DisagreementError", outcomes[rank]
        for text in ("rank 0: valid", f"rank 1: {kind.__name__}", "rank 2: valid", *shown):
            assert text in outcomes[rank].message


# ---------------------------------------------------------------- building a buffer

WRONG_CONSTRUCTION: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no tokens": ({"num_max_tokens_per_rank": 0}, ["num_max_tokens_per_rank: got 0", ">= 1"]),
    "no hidden": ({"hidden": 0}, ["hidden: got 0", ">= 1"]),
    "hidden a float": ({"hidden": 8.5}, ["hidden: got 8.5", "integer"]),
    "33 selections": ({"num_topk": 33}, ["num_topk: got 33", "0..32", "The limit is 32"]),
    "negative experts": ({"num_experts": -1}, ["num_experts: got -1"]),
    "dtype": ({"dtype": torch.int8}, ["dtype: got torch.int8", "bfloat16"]),
    "max_scale_bytes": ({"max_scale_bytes": -1}, ["max_scale_bytes: got -1"]),
    "expand_factor 0": ({"expand_factor": 0}, ["expand_factor: got 0", "> 0"]),
    "expand_factor nan": ({"expand_factor": float("nan")}, ["expand_factor: got nan"]),
    "num_slots": ({"num_slots": 0}, ["num_slots: got 0", ">= 1"]),
    "pipeline_depth": ({"pipeline_depth": -1}, ["pipeline_depth: got -1"]),
    "timeout_s": ({"timeout_s": 0.0}, ["timeout_s: got 0.0", "> 0"]),
    "timeout_s too long": ({"timeout_s": 1e11}, ["timeout_s: got 100000000000.0", "at most 1e+09"]),
    "timeout_s without end": ({"timeout_s": float("inf")}, ["timeout_s: got inf", "at most 1e+09"]),
    "num_sms": ({"num_sms": -2}, ["num_sms: got -2"]),
    "backend": ({"backend": "mpi"}, ["backend: got 'mpi'", "'collective'", "'nvlink'"]),
    "device": ({"device": "meta"}, ["device: got meta", "CPU or CUDA"]),
    "no device": ({"device": "toaster"}, ["device: got 'toaster'"]),
    "group": ({"group": "world"}, ["group: got 'world'", "process group"]),
}


def build(rank: int, changes: dict[str, Any], everywhere: bool) -> str:
    if rank != 1 and not everywhere:
        changes = {}
    with Buffer(**{**SIZES, **changes}) as buffer:
        return buffer.backend_name


@pytest.mark.parametrize("name", WRONG_CONSTRUCTION)
def test_construction_refused_everywhere(name: str, pools: Pools) -> None:
    changes, shown = WRONG_CONSTRUCTION[name]
    for outcome in pools(2).outcomes(build, changes, True):
        assert outcome.error == "ArgumentError"
        for text in shown:
            assert text in outcome.message


@pytest.mark.parametrize("name", [name for name in WRONG_CONSTRUCTION if name != "group"])
def test_construction_wrong_on_one_rank(name: str, pools: Pools) -> None:
    changes, shown = WRONG_CONSTRUCTION[name]
    outcomes = pools(3).outcomes(build, changes, False)
    assert outcomes[1].error == "ArgumentError"
    for rank in (0, 2):
        assert outcomes[rank].error == "DisagreementError"
        for text in ("rank 0: valid", "rank 1: ArgumentError", *shown):
            assert text in outcomes[rank].message


DIFFERENT = {
    "num_max_tokens_per_rank": (6, "rank 0: 5, rank 1: 6, rank 2: 5"),
    "hidden": (16, "rank 0: 8, rank 1: 16, rank 2: 8"),
    "num_topk": (2, "rank 0: 3, rank 1: 2, rank 2: 3"),
    "num_experts": (7, "rank 0: 6, rank 1: 7, rank 2: 6"),
    "dtype": (torch.float32, "rank 0: torch.bfloat16, rank 1: torch.float32"),
    "max_scale_bytes": (32, "rank 0: 4, rank 1: 32"),
    "expand_factor": (3.0, "rank 0: 2.0, rank 1: 3.0"),
    "num_slots": (3, "rank 0: 2, rank 1: 3"),
    "backend": ("collective", "rank 0: auto, rank 1: collective"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_construction_disagreement(name: str, pools: Pools) -> None:
    value, shown = DIFFERENT[name]
    for outcome in pools(3).outcomes(build, {name: value}, False):
        assert outcome.error == "DisagreementError"
        assert f"disagree on {name} " in outcome.message
        assert shown in outcome.message


def build_with_debug_on_one(rank: int) -> None:
    os.environ["TILE_EP_DEBUG"] = str(int(rank == 0))
    try:
        Buffer(**SIZES)
    finally:
        os.environ["TILE_EP_DEBUG"] = "0"


def test_debug_must_be_set_everywhere(pools: Pools) -> None:
    for outcome in pools(2).outcomes(build_with_debug_on_one):
        assert outcome.error == "DisagreementError"
        assert "TILE_EP_DEBUG (rank 0: True, rank 1: False)" in outcome.message


def test_fewer_experts_than_ranks(pools: Pools) -> None:
    for outcome in pools(8).outcomes(build, {"num_experts": 7}, True):
        assert outcome.error == "ArgumentError"
        assert "num_experts: got 7 experts for 8 ranks" in outcome.message
        assert "num_experts >= 8" in outcome.message


def dispatch_few_experts(rank: int) -> None:
    with Buffer(**{**SIZES, "num_experts": 0}) as buffer:
        buffer.dispatch(rows(), routing() % 2, num_experts=2)


def test_fewer_experts_than_ranks_in_a_call(pools: Pools) -> None:
    for outcome in pools(3).outcomes(dispatch_few_experts):
        assert outcome.error == "ArgumentError"
        assert "num_experts: got 2 experts for 3 ranks" in outcome.message


def test_experts_must_come_from_somewhere() -> None:
    backend = Recorder(num_experts=0)
    with pytest.raises(ArgumentError, match="num_experts: got None"):
        Buffer.from_backend(backend, backend.config).dispatch(rows(), routing())


@pytest.mark.parametrize("topk", [1, 6, 8, 10, 16, 22, 32, 33])
def test_selections_per_token(topk: int) -> None:
    backend = Recorder(num_topk=0)
    buffer = Buffer.from_backend(backend, backend.config)
    if topk <= 32:
        assert buffer.dispatch(rows(), routing(topk))[1].shape == (TOKENS, topk)  # type: ignore[union-attr]
    else:
        with pytest.raises(ArgumentError, match=r"topk_idx: got 33 selections per token, expected 1 to 32, the limit"):
            buffer.dispatch(rows(), routing(topk))


def test_no_process_group() -> None:
    with pytest.raises(ArgumentError, match=r"group: got None.*init_process_group"):
        Buffer(num_max_tokens_per_rank=4, hidden=8)


def test_environment_names_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from tile_ep.config import backend_choice

    assert backend_choice("auto") == "auto"
    monkeypatch.setenv("TILE_EP_BACKEND", "collective")
    assert backend_choice("nvlink") == "collective"
    monkeypatch.setenv("TILE_EP_BACKEND", "mpi")
    with pytest.raises(
        ArgumentError, match=r"TILE_EP_BACKEND: got 'mpi', expected one of 'auto', 'collective', 'nvlink'"
    ):
        backend_choice("auto")


def test_nvlink_refused_on_cpus(pools: Pools) -> None:
    for outcome in pools(2).outcomes(build, {"backend": "nvlink"}, True):
        assert outcome.error == "BackendUnavailableError"
        assert "rank 0: its device is a CPU; rank 1: its device is a CPU" in outcome.message


def test_combine_input_dtype() -> None:
    backend = Recorder()
    buffer = Buffer.from_backend(backend, backend.config)
    handle = buffer.dispatch(rows(), routing())[3]
    for dtype in (torch.float32, torch.int8):
        with pytest.raises(ArgumentError, match=f"dtype: got {dtype}"):
            buffer.combine_input(handle, dtype)
