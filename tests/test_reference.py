"""The reference against a brute-force model on drawn routings, and against numbers worked out by hand.

`TILE_EP_HYPOTHESIS_EXAMPLES=10000 pytest tests/test_reference.py` draws more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import brute_force
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tile_ep import ArgumentError, CapacityError, EPHandle, RoutingError, reference

EXAMPLES = int(os.environ.get("TILE_EP_HYPOTHESIS_EXAMPLES", "300"))

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
PAYLOADS = (("bf16", None), ("fp16", None), ("fp32", None), ("fp8", "fp32"), ("uint8", "uint8"), ("fp8", "int32"))
FLOATS = ("bf16", "fp16", "fp32")
TENSOR_FIELDS = {
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "dst_expanded_idx",
    "num_rows_needed",
}


@dataclass(frozen=True)
class Example:
    """One exchange: how selections are drawn, and every mode."""

    routing: list[list[list[int]]]
    num_topk: int
    num_experts: int
    spare_tokens: int
    alignment: int
    expand_factor: float
    index_dtype: str
    payload: tuple[str, str | None]
    hidden: int
    num_scales: int
    strided: bool
    weights: str | None
    do_expand: bool
    do_cpu_sync: bool
    do_zero_padding: bool
    do_handle_copy: bool
    col_major: bool
    stats: bool
    cached: str
    cached_weights: bool
    combine_dtype: str
    combine_weights: str | None
    apply_weights: bool
    bias_count: int
    seed: int

    @property
    def most_tokens(self) -> int:
        return max(1, *(len(tokens) for tokens in self.routing)) + self.spare_tokens


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[list[int]]], int, int]:
    """Selections of every rank, `K`, `E`. A drawn byte picks from a pool of experts; the pool makes the skew."""
    tokens = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    num_topk = draw(st.integers(1, 6))
    num_experts = len(tokens) + draw(st.integers(0, 7))
    homes = brute_force.deal_experts(num_experts, len(tokens))
    chosen = draw(st.integers(0, len(tokens) - 1))
    on_chosen = [expert for expert, (rank, _) in enumerate(homes) if rank == chosen]
    elsewhere = [expert for expert, (rank, _) in enumerate(homes) if rank != chosen]
    pools = {
        "any": [-1, *range(num_experts)],
        "full": list(range(num_experts)),
        "one expert": on_chosen[-1:],
        "one rank": on_chosen,
        "empty rank": elsewhere or [-1],
        "few": [0, num_experts - 1],
        "mostly one": [*range(num_experts), *on_chosen[:1] * num_experts],
        "none": [-1],
    }
    pool = pools[draw(st.sampled_from(tuple(pools)))]
    mask = draw(st.sampled_from(("no", "first", "last", "tokens", "rank 0")))
    routing = []
    for rank, count in enumerate(tokens):
        picks = draw(st.binary(min_size=count * (num_topk + 1), max_size=count * (num_topk + 1)))
        lines = []
        for token in range(count):
            line = picks[token * (num_topk + 1) :][: num_topk + 1]
            selections = [pool[byte % len(pool)] for byte in line[:-1]]
            if (mask == "tokens" and line[-1] % 3 == 1) or (mask == "rank 0" and rank == 0):
                selections = [-1] * num_topk
            elif mask in ("first", "last"):
                selections[0 if mask == "first" else -1] = -1
            lines.append(selections)
        routing.append(lines)
    return routing, num_topk, num_experts


@st.composite
def examples(draw: st.DrawFn) -> Example:
    routing, num_topk, num_experts = draw(routings())
    do_expand = draw(st.booleans())
    weight_dtypes = st.sampled_from((None, *FLOATS))
    combine_weights = draw(weight_dtypes)
    cached = draw(st.sampled_from(("no", "same", "rank")))
    return Example(
        routing=routing,
        num_topk=num_topk,
        num_experts=num_experts,
        spare_tokens=draw(st.integers(0, 2)),
        alignment=draw(st.integers(1, 8)),
        expand_factor=draw(st.sampled_from((1000.0, 2.0, 1.0, 0.5, 0.25))),
        index_dtype=draw(st.sampled_from(("int64", "int32", "int16"))),
        payload=draw(st.sampled_from(PAYLOADS)),
        hidden=draw(st.integers(1, 5)),
        num_scales=draw(st.integers(1, 3)),
        strided=draw(st.booleans()),
        weights=draw(weight_dtypes),
        do_expand=do_expand,
        do_cpu_sync=draw(st.booleans()),
        do_zero_padding=draw(st.booleans()),
        do_handle_copy=draw(st.booleans()),
        col_major=draw(st.booleans()),
        stats=draw(st.booleans()),
        cached=cached,
        cached_weights=draw(st.booleans()),
        combine_dtype=draw(st.sampled_from(FLOATS)),
        combine_weights=combine_weights,
        apply_weights=do_expand and combine_weights is not None and draw(st.booleans()),
        bias_count=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


# ---------------------------------------------------------------- inputs, and tensors as lists


def any_bytes(rng: np.random.Generator, rows: int, columns: int, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    """`[rows, columns]` of arbitrary bits, infinities and NaN among them."""
    wide = torch.empty(rows, columns * (2 if strided else 1), dtype=dtype)
    wide.view(torch.uint8).copy_(
        torch.from_numpy(rng.integers(0, 256, (rows, wide.shape[1] * dtype.itemsize), np.uint8))
    )
    return wide[:, ::2] if strided else wide


def numbers(rng: np.random.Generator, rows: int, columns: int, kind: str) -> torch.Tensor:
    """`[rows, columns]` of magnitudes so different that the order of a sum shows; some are zeros of either sign."""
    values = rng.uniform(-2, 2, (rows, columns)) * 2.0 ** rng.integers(-12, 12, (rows, columns))
    values *= rng.random((rows, columns)) < 0.9
    return torch.from_numpy(values).to(DTYPES[kind])


def row_bytes(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each row, whatever the strides."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense.copy_(tensor)
    return [bytes(row.view(torch.uint8).tolist()) for row in dense]


def bits(values: Any) -> list[int]:
    """Bit patterns of float32 numbers, all dimensions flattened; NaN is one pattern."""
    array = values.float().numpy() if isinstance(values, torch.Tensor) else np.array(values, dtype=np.float32)
    array = np.where(np.isnan(array), np.float32("nan"), array)
    return np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).ravel().tolist()


# ---------------------------------------------------------------- checks


def check_rows(tensor: torch.Tensor, expected: list[bytes | None]) -> None:
    got = row_bytes(tensor)
    assert len(got) == len(expected)
    for number, (row, want) in enumerate(zip(got, expected, strict=True)):
        if want is brute_force.FINITE:
            assert torch.isfinite(tensor[number].float()).all(), f"row {number} is not finite"
        elif want is not None:
            assert row == want, f"row {number}"


def check_weights(tensor: torch.Tensor | None, expected: list[Any] | None, width: tuple[int, ...]) -> None:
    if expected is None:
        assert tensor is None
        return
    assert tensor is not None and tensor.dtype == torch.float32 and tuple(tensor.shape) == (len(expected), *width)
    for number, want in enumerate(expected):
        if want is not None:
            assert bits(tensor[number]) == bits(want), f"row {number}"


def check_handle(handle: EPHandle, expected: dict[str, Any]) -> None:
    assert {*vars(handle)} == {*expected, "plan"}
    for name, want in expected.items():
        got = getattr(handle, name)
        if name not in TENSOR_FIELDS and name != "topk_idx":
            assert got == want and type(got) is type(want), name
        elif want is None:
            assert got is None, name
        else:
            assert name == "topk_idx" or got.dtype == torch.int32, name
            if name == "recv_src_metadata":
                assert tuple(got.shape) == (handle.num_recv_tokens, handle.topk_idx.shape[1] + 2)
                got = got[: len(want)]
            assert got.tolist() == want, name


def check_dispatch(
    output: reference.DispatchOutput,
    post: brute_force.Post,
    rank: int,
    example: Example,
    parts: list[tuple[torch.Tensor, ...]],
    weights: list[torch.Tensor] | None,
    expand: bool,
) -> None:
    modes: dict[str, Any] = {"expand": expand, "exact": example.do_cpu_sync, "zero_padding": example.do_zero_padding}
    got = output.recv_x if isinstance(output.recv_x, tuple) else (output.recv_x,)
    assert len(got) == len(parts[0])
    for number, tensor in enumerate(got):
        sent = [part[number] for part in parts]
        assert tensor.dtype == sent[0].dtype and tensor.shape[1] == sent[0].shape[1]
        scales = number == 1
        check_rows(
            tensor,
            brute_force.received_rows(post, rank, [row_bytes(part) for part in sent], **modes, scales=scales),
        )
        if scales and example.col_major and len(tensor):
            unit = 16 // tensor.element_size()
            assert tensor.stride() == (1, -(-len(tensor) // unit) * unit)
        elif len(tensor):
            assert tensor.is_contiguous()
    if expand:
        assert output.recv_topk_idx is None
    else:
        assert output.recv_topk_idx is not None
        assert output.recv_topk_idx.dtype == DTYPES[example.index_dtype]
        assert output.recv_topk_idx.tolist() == brute_force.received_idx(post, rank, exact=example.do_cpu_sync)
    expected = None
    if weights is not None:
        expected = brute_force.received_weights(post, rank, [w.float().tolist() for w in weights], **modes)
    check_weights(output.recv_topk_weights, expected, () if expand else (example.num_topk,))


def check_capacity_error(error: CapacityError, post: brute_force.Post) -> None:
    over = post.overflowing
    assert error.rows_needed == {rank: post.boxes[rank].needed for rank in over}
    assert error.capacity == {rank: post.boxes[rank].room for rank in over}
    assert error.expand_factor == float(post.factor)
    assert error.expand_factor_needed == post.factor_needed()


@pytest.mark.timeout(300 + EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="TILE_EP_HYPOTHESIS_EXAMPLES" not in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(examples())
def test_agrees_with_brute_force(example: Example) -> None:
    rng = np.random.default_rng(example.seed)
    num_ranks, K = len(example.routing), example.num_topk
    post = brute_force.deliver(
        example.routing,
        num_topk=K,
        num_experts=example.num_experts,
        most_tokens=example.most_tokens,
        alignment=example.alignment,
        factor=example.expand_factor,
    )
    idxs = [torch.tensor(lines, dtype=DTYPES[example.index_dtype]).reshape(-1, K) for lines in example.routing]

    def payload() -> list[tuple[torch.Tensor, ...]]:
        data, scales = example.payload
        return [
            (any_bytes(rng, len(idx), example.hidden, DTYPES[data], example.strided),)
            + ((any_bytes(rng, len(idx), example.num_scales, DTYPES[scales], example.strided),) if scales else ())
            for idx in idxs
        ]

    def given_x(parts: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        return [part if len(part) == 2 else part[0] for part in parts]

    def token_weights() -> list[torch.Tensor]:
        return [numbers(rng, len(idx), K, example.weights or "fp32") for idx in idxs]

    parts = payload()
    weights = token_weights() if example.weights else None
    before = [torch.from_numpy(rng.integers(0, 99, box.hand, np.int32)) for box in post.boxes]
    stats = [counters.clone() for counters in before] if example.stats else None
    modes: dict[str, Any] = {
        "do_zero_padding": example.do_zero_padding,
        "use_tma_aligned_col_major_sf": example.col_major,
        "stats": stats,
    }

    def dispatch() -> list[reference.DispatchOutput]:
        return reference.dispatch(
            given_x(parts),
            idxs,
            weights,
            num_experts=example.num_experts,
            num_max_tokens_per_rank=example.most_tokens,
            expert_alignment=example.alignment,
            expand_factor=example.expand_factor,
            do_cpu_sync=example.do_cpu_sync,
            do_handle_copy=example.do_handle_copy,
            do_expand=example.do_expand,
            **modes,
        )

    overflow = example.do_expand and bool(post.overflowing)
    if overflow and example.do_cpu_sync:
        with pytest.raises(CapacityError) as caught:
            dispatch()
        check_capacity_error(caught.value, post)
        assert stats is None or all(torch.equal(a, b) for a, b in zip(stats, before, strict=True))
        return

    def check_stats(dispatches: int) -> None:
        for rank, counters in enumerate(stats or []):
            counts = post.boxes[rank].counts
            assert counters.tolist() == [a + dispatches * b for a, b in zip(before[rank].tolist(), counts, strict=True)]

    def check_handles() -> None:
        for rank, handle in enumerate(handles):
            check_handle(
                handle, brute_force.handle_fields(post, rank, expand=example.do_expand, exact=example.do_cpu_sync)
            )

    outputs = dispatch()
    handles = [output.handle for output in outputs]
    for rank, output in enumerate(outputs):
        check_dispatch(output, post, rank, example, parts, weights, example.do_expand)
    check_handles()
    check_stats(1)
    for idx, handle in zip(idxs, handles, strict=True):
        if example.do_handle_copy:
            idx.fill_(-1)  # the caller's tensor is the caller's again
        else:
            assert handle.topk_idx is idx

    if example.cached != "no":
        expand = example.do_expand and example.cached == "same"
        again, again_weights = payload(), token_weights() if example.cached_weights else None
        replayed = reference.dispatch(given_x(again), None, again_weights, handles=handles, do_expand=expand, **modes)
        for rank, output in enumerate(replayed):
            assert output.handle is handles[rank]
            check_dispatch(output, post, rank, example, again, again_weights, expand)
        check_handles()
        check_stats(2)

    # Rows that nobody sent are NaN: whoever reads one shows it.
    kind, expand = example.combine_dtype, example.do_expand
    ys, back_weights = [], []
    for box, handle in zip(post.boxes, handles, strict=True):
        used = sorted(box.shelf.values()) if expand else list(range(len(box.tokens)))
        rows = handle.num_expanded_tokens if expand else handle.num_recv_tokens
        y = torch.full((rows, example.hidden), torch.nan, dtype=DTYPES[kind])
        weight_kind = example.combine_weights or "fp32"
        w = torch.full((rows,) if expand else (rows, K), torch.nan, dtype=DTYPES[weight_kind])
        if not (expand and box.overflows):
            y[used] = numbers(rng, len(used), example.hidden, kind)
            drawn = numbers(rng, len(used), 1 if expand else K, weight_kind)
            w[used] = drawn[:, 0] if expand else drawn
        ys.append(y)
        back_weights.append(w)
    biases = [tuple(numbers(rng, len(idx), example.hidden, kind) for _ in range(example.bias_count)) for idx in idxs]

    def combine() -> list[reference.CombineOutput]:
        return reference.combine(
            ys,
            handles,
            back_weights if example.combine_weights else None,
            biases if example.bias_count else None,
            apply_weights=example.apply_weights,
        )

    if overflow:
        with pytest.raises(CapacityError) as caught:
            combine()
        check_capacity_error(caught.value, post)
        return
    plain_ys = [y.float().tolist() for y in ys]
    plain_weights = [w.float().tolist() for w in back_weights]
    for rank, combined in enumerate(combine()):
        want = brute_force.combined_rows(
            post,
            rank,
            plain_ys,
            width=example.hidden,
            kind=kind,
            expand=expand,
            biases=[bias.float().tolist() for bias in biases[rank]],
            weights=plain_weights if example.apply_weights else None,
        )
        assert combined.combined_x.dtype == DTYPES[kind]
        assert tuple(combined.combined_x.shape) == (len(want), example.hidden)
        assert bits(combined.combined_x) == bits(want)
        want_weights = None
        if example.combine_weights:
            want_weights = brute_force.combined_weights(post, rank, plain_weights, expand=expand)
        check_weights(combined.combined_topk_weights, want_weights, (K,))
    assert num_ranks == len(outputs)


# ---------------------------------------------------------------- by hand: two ranks, three experts (0 and 1 on rank 0)

TINY = [[[0, 2], [1, 1]], [[2, -1]]]
TINY_X = [[[1.0], [2.0]], [[3.0]]]
TINY_WEIGHTS = [[[0.5, 0.25], [0.75, 1.5]], [[2.0, 4.0]]]


def tiny(**modes: Any) -> list[reference.DispatchOutput]:
    options: dict[str, Any] = {"num_experts": 3, "num_max_tokens_per_rank": 2, "expert_alignment": 2} | modes
    return reference.dispatch(
        [torch.tensor(x) for x in TINY_X],
        [torch.tensor(idx) for idx in TINY],
        [torch.tensor(w) for w in TINY_WEIGHTS],
        **options,
    )


def lists(handle: EPHandle, *names: str) -> list[Any]:
    return [getattr(handle, name).tolist() for name in names]


def test_rank_layout_by_hand() -> None:
    first, second = tiny()
    assert isinstance(first.recv_x, torch.Tensor) and isinstance(second.recv_x, torch.Tensor)
    assert first.recv_topk_idx is not None and second.recv_topk_idx is not None
    assert first.recv_topk_weights is not None and second.recv_topk_weights is not None
    assert first.recv_x.tolist() == [[1.0], [2.0]] and second.recv_x.tolist() == [[1.0], [3.0]]
    assert first.recv_topk_idx.tolist() == [[0, -1], [1, 1]] and second.recv_topk_idx.tolist() == [[-1, 0], [0, -1]]
    assert first.recv_topk_weights.tolist() == [[0.5, 0.25], [0.75, 1.5]]
    assert second.recv_topk_weights.tolist() == [[0.5, 0.25], [2.0, 4.0]]
    names = (
        "psum_num_recv_tokens_per_scaleup_rank",
        "psum_num_recv_tokens_per_expert",
        "num_unaligned_recv_tokens_per_expert",
        "recv_src_metadata",
        "dst_buffer_slot_idx",
    )
    assert lists(first.handle, *names) == [[2, 2], [2, 4], [1, 2], [[0, 0, -1, -1], [1, 0, -1, -1]], [[0, 0], [1, 1]]]
    assert lists(second.handle, *names) == [[1, 2], [2], [2], [[0, 1, -1, -1], [2, 2, -1, -1]], [[1, -1]]]
    assert first.handle.num_recv_tokens_per_expert_list == [2, 2]
    assert second.handle.num_recv_tokens_per_expert_list == [2]
    assert first.handle.num_recv_tokens == second.handle.num_recv_tokens == 2
    assert first.handle.num_expanded_tokens == 0 and first.handle.num_rows_needed is None


def test_expanded_layout_by_hand() -> None:
    first, second = tiny(do_expand=True, do_zero_padding=True)
    assert isinstance(first.recv_x, torch.Tensor) and isinstance(second.recv_x, torch.Tensor)
    assert first.recv_topk_weights is not None and second.recv_topk_weights is not None
    assert first.recv_x.tolist() == [[1.0], [0.0], [2.0], [2.0]] and second.recv_x.tolist() == [[1.0], [3.0]]
    assert first.recv_topk_idx is None and second.recv_topk_idx is None
    assert first.recv_topk_weights.tolist() == [0.5, 0.0, 0.75, 1.5] and second.recv_topk_weights.tolist() == [
        0.25,
        2.0,
    ]
    names = (
        "psum_num_recv_tokens_per_scaleup_rank",
        "psum_num_recv_tokens_per_expert",
        "num_unaligned_recv_tokens_per_expert",
        "recv_src_metadata",
        "dst_buffer_slot_idx",
        "dst_expanded_idx",
        "num_rows_needed",
    )
    assert lists(first.handle, *names) == [
        [2, 2], [1, 4], [1, 2], [[0, 0, 0, -1], [1, 0, 2, 3]], [[0, 0], [1, 1]], [[0, 0], [2, 3]], [4, 2],
    ]  # fmt: skip
    assert lists(second.handle, *names) == [
        [1, 2], [2], [2], [[0, 1, -1, 0], [2, 2, 1, -1]], [[1, -1]], [[1, -1]], [4, 2],
    ]  # fmt: skip
    assert (first.handle.num_expanded_tokens, second.handle.num_expanded_tokens) == (4, 2)
    assert (first.handle.num_recv_tokens, second.handle.num_recv_tokens) == (2, 2)


def test_combine_by_hand() -> None:
    handles = [output.handle for output in tiny()]
    ys = [torch.tensor([[10.0], [20.0]]), torch.tensor([[100.0], [200.0]])]
    weights = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])]
    first, second = reference.combine(ys, handles, weights)
    assert first.combined_x.tolist() == [[110.0], [20.0]] and second.combined_x.tolist() == [[200.0]]
    assert first.combined_topk_weights is not None and second.combined_topk_weights is not None
    assert first.combined_topk_weights.tolist() == [[1.0, 6.0], [3.0, 4.0]]
    assert second.combined_topk_weights.tolist() == [[7.0, 0.0]]


@pytest.mark.parametrize(
    ("apply_weights", "expected"), [(False, ([[17.0], [12.0]], [[32.0]])), (True, ([[16.5], [17.0]], [[128.0]]))]
)
def test_expanded_combine_by_hand(apply_weights: bool, expected: tuple[list[list[float]], ...]) -> None:
    handles = [output.handle for output in tiny(do_expand=True)]
    nan = float("nan")
    ys = [torch.tensor([[1.0], [nan], [4.0], [8.0]]), torch.tensor([[16.0], [32.0]])]
    weights = [torch.tensor([0.5, nan, 0.25, 2.0]), torch.tensor([1.0, 4.0])]
    outputs = reference.combine(ys, handles, weights, apply_weights=apply_weights)
    assert tuple(output.combined_x.tolist() for output in outputs) == expected
    back = [output.combined_topk_weights for output in outputs]
    assert back[0] is not None and back[0].tolist() == [[0.5, 1.0], [0.25, 2.0]]
    assert back[1] is not None and back[1].tolist() == [[4.0, 0.0]]


def test_zero_padding_covers_scales() -> None:
    x = [(torch.full((1, 2), 7, dtype=torch.uint8), torch.full((1, 1), 9.0))]
    (output,) = reference.dispatch(
        x, [torch.tensor([[0]])], num_experts=2, num_max_tokens_per_rank=1, expert_alignment=3,
        do_expand=True, do_zero_padding=True,
    )  # fmt: skip
    data, scales = output.recv_x
    assert data.tolist() == [[7, 7], [0, 0], [0, 0]] and scales.tolist() == [[9.0], [0.0], [0.0]]


# ---------------------------------------------------------------- without host synchronisation


def test_tails() -> None:
    for output in tiny(do_cpu_sync=False):
        assert output.recv_topk_idx is not None and output.recv_topk_weights is not None
        assert output.recv_x.shape == (4, 1) and output.handle.num_recv_tokens == 4  # type: ignore[union-attr]
        assert output.recv_topk_idx[2:].tolist() == [[-1, -1], [-1, -1]]
        assert output.recv_topk_weights[2:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert output.handle.num_recv_tokens_per_expert_list == []


def test_expanded_tails() -> None:
    # Of 8 selections, 6 and 3 would be balanced; twice that is 8 at most and 6; gaps take one row per expert more.
    outputs = tiny(do_expand=True, do_cpu_sync=False)
    assert [output.handle.num_expanded_tokens for output in outputs] == [10, 7]
    for output, used in zip(outputs, (4, 2), strict=True):
        assert output.recv_topk_weights is not None
        assert output.recv_topk_weights[used:].tolist() == [0.0] * (output.handle.num_expanded_tokens - used)


@pytest.mark.parametrize("do_expand", [False, True])
def test_tails_of_scales_are_finite(do_expand: bool) -> None:
    x = [(torch.zeros(1, 4, dtype=torch.float8_e4m3fn), torch.ones(1, 2)) for _ in range(2)]
    idx = [torch.tensor([[0]]), torch.tensor([[1]])]
    options: dict[str, Any] = {"num_experts": 2, "num_max_tokens_per_rank": 3, "do_cpu_sync": False}
    for output in reference.dispatch(x, idx, do_expand=do_expand, **options):
        _, scales = output.recv_x
        assert scales.shape == (6, 2) and scales[0].tolist() == [1.0, 1.0]
        assert torch.isfinite(scales).all()


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("do_zero_padding", [False, True])
def test_undefined_bytes_are_ones(do_expand: bool, do_zero_padding: bool) -> None:
    """One token of a rank that has room for two, in segments of two rows. Gaps are zeros where they are padded."""
    data, scales, weights = torch.ones(1, 2), torch.ones(1, 1), torch.ones(1, 1)
    (output,) = reference.dispatch(
        [(data, scales)], [torch.tensor([[1]])], [weights], num_experts=2, num_max_tokens_per_rank=2,
        expert_alignment=2, do_cpu_sync=False, do_expand=do_expand, do_zero_padding=do_zero_padding,
    )  # fmt: skip
    assert output.recv_topk_weights is not None
    recv_data, recv_scales = (row_bytes(part) for part in output.recv_x)
    ones, zeros = b"\xff" * 8, bytes(8)
    if do_expand:  # a row, its gap, and a tail of two rows
        blank = zeros if do_zero_padding else ones
        assert recv_data[1:] == [blank] * 3 and recv_scales[1:] == [blank[:4], zeros[:4], zeros[:4]]
        assert bits(output.recv_topk_weights[1:]) == bits([0.0 if do_zero_padding else torch.nan, 0.0, 0.0])
    else:
        assert recv_data[1:] == [ones] and recv_scales[1:] == [zeros[:4]]


# ---------------------------------------------------------------- overflow


def crowded(**modes: Any) -> list[reference.DispatchOutput]:
    """Two ranks send three of their four tokens to rank 0, which has room for four."""
    options: dict[str, Any] = {"num_experts": 2, "num_max_tokens_per_rank": 4, "expand_factor": 1.0, "do_expand": True}
    x = [torch.arange(4.0).unsqueeze(1) + 10 * rank for rank in range(2)]
    return reference.dispatch(x, [torch.tensor([[0], [0], [0], [1]])] * 2, **options | modes)


def check_crowded(error: CapacityError) -> None:
    assert error.rows_needed == {0: 6} and error.capacity == {0: 4}
    assert (error.expand_factor, error.expand_factor_needed) == (1.0, 1.5)
    assert "rank 0 needs 6 rows and holds 4" in str(error) and "expand_factor>=1.5" in str(error)


def test_overflow_is_raised_before_anything_moves() -> None:
    stats = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    with pytest.raises(CapacityError) as caught:
        crowded(stats=stats)
    check_crowded(caught.value)
    assert [counters.tolist() for counters in stats] == [[0], [0]]
    crowded(expand_factor=1.5)


def test_overflow_without_host_synchronisation() -> None:
    outputs = crowded(do_cpu_sync=False)
    for output in outputs:
        handle = output.handle
        assert handle.num_rows_needed is not None and handle.num_rows_needed.tolist() == [6, 2]
        assert handle.dst_expanded_idx is not None
        assert handle.dst_expanded_idx.tolist() == [[-1], [-1], [-1], [handle.rank]]
    assert outputs[0].handle.recv_src_metadata[:6, 2].tolist() == [-1] * 6
    assert outputs[1].handle.recv_src_metadata[:2, 2].tolist() == [0, 1]
    assert outputs[1].recv_x[:2].tolist() == [[3.0], [13.0]]  # type: ignore[union-attr]
    ys = [torch.zeros(4, 1), torch.zeros(4, 1)]
    with pytest.raises(CapacityError) as caught:
        reference.combine(ys, [output.handle for output in outputs])
    check_crowded(caught.value)


def test_overflow_names_every_rank_that_overflows() -> None:
    idx = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(CapacityError) as caught:
        reference.dispatch(
            [torch.zeros(2, 1)] * 3, [idx] * 3, num_experts=3, num_max_tokens_per_rank=2, expand_factor=1.0,
            do_expand=True,
        )  # fmt: skip
    assert caught.value.rows_needed == {0: 6, 1: 6} and caught.value.capacity == {0: 4, 1: 4}
    assert caught.value.expand_factor_needed == 1.5


@pytest.mark.parametrize(("needed", "factor"), [([3, 0, 5], 1.25), ([5, 0, 3], 1.25), ([2, 2, 4], 1.0)])
def test_the_factor_needed_is_that_of_the_fullest_rank(needed: list[int], factor: float) -> None:
    """Three ranks, each with four tokens of one selection: four rows are a rank's share."""
    selections = [expert for expert, rows in enumerate(needed) for _ in range(rows)]
    idx = list(torch.tensor(selections + [-1] * (12 - len(selections))).view(3, 4, 1))
    options: dict[str, Any] = {"num_experts": 3, "num_max_tokens_per_rank": 4, "do_expand": True}
    with pytest.raises(CapacityError) as caught:
        reference.dispatch([torch.zeros(4, 1)] * 3, idx, expand_factor=0.5, **options)
    assert caught.value.rows_needed == {rank: rows for rank, rows in enumerate(needed) if rows > 2}
    assert caught.value.expand_factor_needed == factor
    reference.dispatch([torch.zeros(4, 1)] * 3, idx, expand_factor=factor, **options)


# ---------------------------------------------------------------- sums


def combine_one(
    named: list[int], sent: list[float], bias: tuple[float, ...] = (), dtype: torch.dtype = torch.float32
) -> float:
    """Rank 0's only token names ranks (an expert each); rank `r` sends `sent[r]` back."""
    num_ranks = len(sent)
    nobody = torch.full((0, len(named)), -1)
    outputs = reference.dispatch(
        [torch.zeros(1, 1)] + [torch.zeros(0, 1)] * (num_ranks - 1),
        [torch.tensor([named])] + [nobody] * (num_ranks - 1),
        num_experts=num_ranks,
        num_max_tokens_per_rank=1,
    )
    handles = [output.handle for output in outputs]
    ys = [
        torch.full((handle.num_recv_tokens, 1), value, dtype=dtype) for handle, value in zip(handles, sent, strict=True)
    ]
    biases = [tuple(torch.full((int(rank == 0), 1), value, dtype=dtype) for value in bias) for rank in range(num_ranks)]
    return reference.combine(ys, handles, biases=biases if bias else None)[0].combined_x.item()


LARGE = 2.0**24  # the first float32 to which adding one changes nothing


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ([0, 1, 2], 1.0),
        ([2, 0, 1], 0.0),
        ([1, 0, 2], 1.0),
        ([0, 2, 1], 0.0),
        ([0, 0, 2, 1, 1], 0.0),
        ([-1, 1, -1, 0, 2, 0], 1.0),
    ],
)
def test_sum_in_the_order_first_named(named: list[int], expected: float) -> None:
    assert combine_one(named, [LARGE, -LARGE, 1.0]) == expected


def test_biases_come_first() -> None:
    assert combine_one([0, 1], [LARGE, -LARGE], bias=(1.0,)) == 0.0
    assert combine_one([0], [1.0], bias=(LARGE, -LARGE)) == 1.0
    assert combine_one([0], [-LARGE], bias=(1.0, LARGE)) == 0.0


def test_rounds_once() -> None:
    # bf16 has steps of 2 at 256: rounding after each addition would stay at 256.
    assert combine_one([0, 1], [1.0, 1.0], bias=(256.0,), dtype=torch.bfloat16) == 258.0


def test_partial_sums_of_a_rank_are_rounded() -> None:
    # Rank 0 sends 256 + 1, which bf16 rounds to 256; with the 1 of rank 1 that is 257, which rounds to 256 again.
    outputs = reference.dispatch(
        [torch.zeros(1, 1), torch.zeros(0, 1)],
        [torch.tensor([[0, 1, 2]]), torch.full((0, 3), -1)],
        num_experts=4, num_max_tokens_per_rank=1, do_expand=True,
    )  # fmt: skip
    ys = [torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16), torch.tensor([[1.0]], dtype=torch.bfloat16)]
    combined = reference.combine(ys, [output.handle for output in outputs])
    assert combined[0].combined_x.item() == 256.0


def test_local_sum_in_ascending_k() -> None:
    # The token names expert 2 first: k ascending is not expert ascending.
    outputs = reference.dispatch(
        [torch.zeros(1, 1)], [torch.tensor([[2, 0, 1]])], num_experts=3, num_max_tokens_per_rank=1, do_expand=True
    )
    handles = [output.handle for output in outputs]
    assert reference.combine([torch.tensor([[LARGE], [-LARGE], [1.0]])], handles)[0].combined_x.item() == 0.0
    assert reference.combine([torch.tensor([[1.0], [LARGE], [-LARGE]])], handles)[0].combined_x.item() == 1.0


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_selections_the_bias_comes_back_exactly(dtype: torch.dtype, do_expand: bool) -> None:
    (output,) = reference.dispatch(
        [torch.zeros(2, 3)], [torch.full((2, 2), -1)], num_experts=1, num_max_tokens_per_rank=2, do_expand=do_expand
    )
    bias = torch.tensor([[-0.0, 0.0, 1 / 3], [float("inf"), -1e-7, 65504.0]]).to(dtype)
    nothing = torch.zeros(0, 3, dtype=dtype)
    (combined,) = reference.combine([nothing], [output.handle], biases=[(bias,)])
    assert torch.equal(combined.combined_x.view(torch.uint8), bias.view(torch.uint8))
    (combined,) = reference.combine([nothing], [output.handle])
    assert torch.equal(combined.combined_x.view(torch.uint8), torch.zeros(2, 3, dtype=dtype).view(torch.uint8))


# ---------------------------------------------------------------- refusals, and plans side by side


@pytest.mark.parametrize("bad", [3, -2, 2**40])
def test_out_of_range(bad: int) -> None:
    with pytest.raises(RoutingError) as caught:
        reference.dispatch([torch.zeros(1, 1)], [torch.tensor([[0, bad]])], num_experts=3, num_max_tokens_per_rank=1)
    assert caught.value.num_bad == 1 and str(bad) in str(caught.value)


def test_expanded_needs_an_expanded_plan() -> None:
    handles = [output.handle for output in tiny()]
    with pytest.raises(ArgumentError, match="do_expand"):
        reference.dispatch([torch.tensor(x) for x in TINY_X], None, handles=handles, do_expand=True)
    ys = [torch.zeros(2, 1)] * 2
    with pytest.raises(ArgumentError, match="apply_weights"):
        reference.combine(ys, handles, [torch.zeros(2, 2)] * 2, apply_weights=True)
    expanded = [output.handle for output in tiny(do_expand=True)]
    with pytest.raises(ArgumentError, match="apply_weights"):
        reference.combine([torch.zeros(4, 1), torch.zeros(2, 1)], expanded, apply_weights=True)


def test_handles_outlive_later_dispatches() -> None:
    earlier = [output.handle for output in tiny()]
    kept = [handle.recv_src_metadata.clone() for handle in earlier]
    tiny(num_experts=4)
    test_combine_by_hand()
    assert all(torch.equal(handle.recv_src_metadata, copy) for handle, copy in zip(earlier, kept, strict=True))
