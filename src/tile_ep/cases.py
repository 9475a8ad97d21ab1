"""One list of cases for every backend, how a case is run, and what it must give.

A `Case` is data: sizes, modes and a seed. `run_reference` says what every rank must return, `run_rank` what one rank of
a real `Buffer` does return, under the same names; `assert_same` compares them to the bit. What a backend may leave
undefined (rows beyond the count, alignment gaps) is zeroed in both, so nothing else is forgiven.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tile_ep import Buffer, CapacityError, EPHandle, reference
from tile_ep.layout import ExpertPartition, ceil_div, expanded_starts

if TYPE_CHECKING:
    from tile_ep.kernels.tuning import Tuning

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
INDEX_DTYPES = ("int16", "int32", "int64")
ROW_DTYPES = ("bf16", "fp16", "fp32")
SCALED = ("fp8", "packed4")
PAYLOADS = (*ROW_DTYPES, *SCALED)
MASKS = ("none", "some", "tokens", "all", "first", "last", "rank0")
SKEWS = ("uniform", "zipf", "one_expert", "one_rank", "empty_rank", "duplicates", "same")
STRIDES = ("dense", "columns", "transposed", "offset", "mixed")
CACHED = ("no", "same", "rank")

POISON = 1536.0  # in rows that nobody may read; finite in every dtype, and seen in any sum


@dataclass(frozen=True, repr=False)
class Case:
    """One exchange. Ranks are as many as `tokens` has entries.

    Attributes:
        tokens: tokens of each rank.
        hidden: elements of a row (half as many bytes for `packed4`).
        payload: `bf16`, `fp16`, `fp32`, `fp8` (fp32 scale per 128 elements), `packed4` (uint8 scale per 16).
        spare_tokens: by how much the buffer's most tokens per rank exceed those of the dispatch.
        mask: which selections are -1: `none`, `some`, whole `tokens`, `all`, the `first` or `last` column, all of `rank0`.
        skew: where selections go; `same` names one expert in every column of a token, `duplicates` draws with repetition.
        weights: dtype of `topk_weights` in dispatch, `None` for none.
        combine_weights: bring weights back.
        cached: replay the handle in the `same` layout, or in the `rank` layout.
        cached_weights: the replay carries weights too.
        combine_hidden: elements of a combined row, 0 for `hidden`.
        strides: memory of the inputs: `dense`, every second of the `columns`, `transposed`, dense at an unaligned
            `offset`, or `mixed`: another one on each rank.
        rounds: dispatches with new routings on the same buffer; each takes the next index dtype, and token counts move
            from rank to rank.
        num_sms: of dispatch and combine, where there are SMs.
        zero_copy: expert outputs are written to `combine_input`.
        overflow: whether an expanded dispatch is meant to exceed its capacity.
        heavy: too large for the simulator.
        seed: of the data.
        name: of the case, if its fields do not say what it is about.
    """

    tokens: tuple[int, ...]
    hidden: int = 64
    num_topk: int = 4
    num_experts: int = 8
    payload: str = "bf16"
    index_dtype: str = "int64"
    spare_tokens: int = 0
    do_expand: bool = False
    expert_alignment: int = 1
    expand_factor: float = 1000.0
    do_zero_padding: bool = False
    mask: str = "none"
    skew: str = "uniform"
    weights: str | None = "fp32"
    combine_weights: bool = False
    apply_weights: bool = False
    bias_count: int = 0
    cached: str = "no"
    cached_weights: bool = False
    stats: bool = False
    do_cpu_sync: bool = True
    do_handle_copy: bool = True
    combine_dtype: str = "bf16"
    combine_hidden: int = 0
    col_major_scales: bool = False
    strides: str = "dense"
    rounds: int = 1
    num_sms: int = 0
    zero_copy: bool = False
    overflow: bool = False
    heavy: bool = False
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        assert self.payload in PAYLOADS and self.index_dtype in INDEX_DTYPES and self.combine_dtype in ROW_DTYPES
        assert self.mask in MASKS and self.skew in SKEWS and self.strides in STRIDES and self.cached in CACHED
        assert self.num_experts >= self.num_ranks, "every rank has an expert"
        assert not self.apply_weights or (self.do_expand and self.combine_weights)
        assert self.do_expand or self.cached != "rank", "a rank-layout handle has one layout only"
        assert not (self.zero_copy and self.combine_hidden), "combine_input has the buffer's hidden"

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_max_tokens(self) -> int:
        """Most tokens of a rank in a dispatch."""
        return max(1, *self.tokens)

    @property
    def columns(self) -> int:
        """Elements of a combined row."""
        return self.combine_hidden or self.hidden

    def buffer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the case's `Buffer`, and of `loopback`."""
        wide = "fp32" in (self.payload, self.combine_dtype)
        return {
            "num_max_tokens_per_rank": self.num_max_tokens + self.spare_tokens,
            "hidden": max(self.hidden, self.columns),
            "num_topk": self.num_topk,
            "num_experts": self.num_experts,
            "dtype": torch.float32 if wide else torch.bfloat16,
            "max_scale_bytes": self._scale_shape[1] * self._scale_shape[0].itemsize if self.payload in SCALED else None,
            "expand_factor": self.expand_factor if self.do_expand else 2.0,
        }

    def tuned(self, tuning: Tuning) -> Tuning:
        """`tuning` with a limit of `few` by which some cases have many tokens, some few, and some few on some ranks."""
        most = max(self.tokens) * self.num_topk
        return replace(tuning, few=(0, most, most // 2, most)[self.seed % 4])

    @property
    def _scale_shape(self) -> tuple[torch.dtype, int]:
        """Dtype and number of the scales of a row."""
        return (
            (torch.float32, ceil_div(self.hidden, 128))
            if self.payload == "fp8"
            else (torch.uint8, ceil_div(self.hidden, 16))
        )

    def dispatch_modes(self) -> dict[str, Any]:
        """What a dispatch of the case is told besides its tensors; a replay takes only some of it."""
        return {
            "num_max_tokens_per_rank": self.num_max_tokens,
            "expert_alignment": self.expert_alignment,
            "do_handle_copy": self.do_handle_copy,
            "do_cpu_sync": self.do_cpu_sync,
            **self.replay_modes(self.do_expand),
        }

    def replay_modes(self, do_expand: bool) -> dict[str, Any]:
        return {
            "do_expand": do_expand,
            "do_zero_padding": self.do_zero_padding,
            "use_tma_aligned_col_major_sf": self.col_major_scales,
        }

    def __repr__(self) -> str:
        """The expression that makes this case again."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(changed)})"

    def __str__(self) -> str:
        counts = f"R{self.num_ranks}" if len(set(self.tokens)) == 1 else ""
        sizes = f"{counts}T{'.'.join(map(str, self.tokens[:1] if counts else self.tokens))}"
        shape = [f"H{self.hidden}", f"K{self.num_topk}", f"E{self.num_experts}"]
        words = [self.name, sizes, *shape] if self.name else [sizes, *shape]
        skipped = {"tokens", "hidden", "num_topk", "num_experts", "name", "heavy", "overflow", "seed", "expand_factor"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in skipped or value == f.default or self.name:
                continue
            short = _SHORT.get(f.name, f.name)
            if value in (True, False, None):
                words.append(short if value else f"no_{short}")
            else:
                words.append(
                    f"{short}{value}" if isinstance(value, int) else f"{short}_{value}" if short else str(value)
                )
        return "-".join([*words, *([f"seed{self.seed}"] if self.seed else [])])


_SHORT = {
    "payload": "", "index_dtype": "", "spare_tokens": "spare", "do_expand": "expand", "expert_alignment": "A",
    "do_zero_padding": "zeros", "skew": "", "bias_count": "bias", "weights": "w", "combine_weights": "cw",
    "apply_weights": "apply", "do_cpu_sync": "sync", "do_handle_copy": "copy", "combine_dtype": "out",
    "combine_hidden": "outH", "col_major_scales": "colmajor", "strides": "", "num_sms": "sms",
    "cached_weights": "again_w",
}  # fmt: skip


# ---------------------------------------------------------------- inputs


@dataclass
class Round:
    """What one rank passes in one round. Quantized data is kept as uint8, since float8 tensors cannot be pickled."""

    x: Payload
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    replay_x: Payload
    replay_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]


@dataclass
class Inputs:
    """What one rank passes; `stats` is added to by every dispatch."""

    rounds: list[Round]
    stats: torch.Tensor | None


def make_inputs(case: Case) -> list[Inputs]:
    """The inputs of every rank, dense and on the CPU. The same on each call, and never shared between two."""
    generator = torch.Generator().manual_seed(case.seed)
    partition = ExpertPartition(case.num_experts, case.num_ranks)
    inputs = []
    for rank in range(case.num_ranks):
        rounds = [
            _make_round(case, rank, case.tokens[(rank + i) % case.num_ranks], i, generator, partition)
            for i in range(case.rounds)
        ]
        stats = torch.randint(0, 99, (partition.num_local(rank),), generator=generator, dtype=torch.int32)
        inputs.append(Inputs(rounds, stats if case.stats else None))
    return inputs


def _make_round(
    case: Case, rank: int, tokens: int, number: int, generator: torch.Generator, partition: ExpertPartition
) -> Round:
    dtype = INDEX_DTYPES[(INDEX_DTYPES.index(case.index_dtype) + number) % 3]
    shape = (tokens, case.num_topk)

    def weights() -> torch.Tensor:
        drawn = torch.rand(shape, generator=generator) + 0.01
        return drawn.to(DTYPES[case.weights or "fp32"])

    return Round(
        x=_payload(case, tokens, generator),
        topk_idx=_routing(case, rank, tokens, generator, partition).to(DTYPES[dtype]),
        topk_weights=weights() if case.weights else None,
        replay_x=_payload(case, tokens, generator),
        replay_weights=weights() if case.cached_weights else None,
        biases=tuple(
            (torch.randn(tokens, case.columns, generator=generator) * 8.0).to(DTYPES[case.combine_dtype])
            for _ in range(case.bias_count)
        ),
    )


def _payload(case: Case, tokens: int, generator: torch.Generator) -> Payload:
    if case.payload not in SCALED:
        return torch.randn(tokens, case.hidden, generator=generator).to(DTYPES[case.payload])
    width = case.hidden if case.payload == "fp8" else ceil_div(case.hidden, 2)
    data = torch.randint(0, 256, (tokens, width), generator=generator).to(torch.uint8)
    kind, number = case._scale_shape
    scales = torch.rand(tokens, number, generator=generator) + 0.5
    if kind == torch.uint8:
        scales = scales * 100
    return data, scales.to(kind)


def _routing(
    case: Case, rank: int, tokens: int, generator: torch.Generator, partition: ExpertPartition
) -> torch.Tensor:
    """`[T, K]` int64."""
    num_topk, num_experts = case.num_topk, case.num_experts
    odds = torch.ones(num_experts)
    if case.skew == "zipf":
        odds = 1.0 / torch.arange(1, num_experts + 1)
    elif case.skew == "one_rank":
        odds[partition.first(1) :] = 0
    elif case.skew == "empty_rank":
        shunned = min(1, case.num_ranks - 1)
        if case.num_ranks > 1:
            odds[partition.first(shunned) : partition.first(shunned + 1)] = 0
    elif case.skew == "duplicates":
        odds[ceil_div(num_experts, 2) :] = 0
    repeated = case.skew == "duplicates" or num_topk > int((odds > 0).sum())
    idx = torch.empty(tokens, num_topk, dtype=torch.int64)
    for row in idx:
        row.copy_(torch.multinomial(odds, num_topk, replacement=repeated, generator=generator))
    if case.skew == "one_expert":
        idx[:], idx[:, 0] = -1, num_experts - 1
    elif case.skew == "same":
        idx[:] = idx[:, :1].clone()
    if case.mask == "some":
        idx[torch.rand(idx.shape, generator=generator) < 0.3] = -1
    elif case.mask == "tokens":
        idx[torch.rand(tokens, generator=generator) < 0.4] = -1
    elif case.mask == "all" or (case.mask == "rank0" and rank == 0):
        idx[:] = -1
    elif case.mask in ("first", "last"):
        idx[:, 0 if case.mask == "first" else -1] = -1
    return idx


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """In row-major order, with natural strides even along dimensions of size 0 or 1, so that bytes can be viewed."""
    return tensor.contiguous().as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def _typed(case: Case, x: Payload) -> Payload:
    """The payload in the dtype that its kind says."""
    return (x[0].view(torch.float8_e4m3fn), x[1]) if isinstance(x, tuple) and case.payload == "fp8" else x


def _dense_payload(case: Case, x: Payload) -> Payload:
    x = _typed(case, x)
    return (_dense(x[0]), _dense(x[1])) if isinstance(x, tuple) else _dense(x)


def _place(tensor: torch.Tensor, device: torch.device, strides: str, rank: int) -> torch.Tensor:
    """A copy of `tensor` on `device` with the strides asked for."""
    if strides == "mixed":
        strides = STRIDES[rank % (len(STRIDES) - 1)]
    rows, columns = tensor.shape
    if strides == "columns":
        out = torch.zeros(rows, 2 * columns + 1, dtype=tensor.dtype, device=device)[:, 1::2]
    elif strides == "transposed":
        out = torch.zeros(columns, rows, dtype=tensor.dtype, device=device).t()
    elif strides == "offset":
        out = torch.zeros(rows * columns + 1, dtype=tensor.dtype, device=device)[1:].view(rows, columns)
    else:
        return tensor.to(device, copy=True)
    return out.copy_(tensor)


def _placed(case: Case, rank: int, item: Round, device: torch.device) -> Round:
    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(put(part) for part in value)
        return None if value is None else _place(value, device, case.strides, rank)

    return Round(**{f.name: put(getattr(item, f.name)) for f in fields(Round)})


# ---------------------------------------------------------------- what is defined, and what experts compute


@dataclass
class Rows:
    """Which rows of a layout are defined, `[rows]` bool each."""

    real: torch.Tensor  # a token is there
    data: torch.Tensor  # the data is defined
    weights: torch.Tensor  # the weight is defined


def _rows(case: Case, handle: EPHandle, expanded: bool) -> Rows:
    if not expanded:
        real = torch.arange(handle.num_recv_tokens) < int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        return Rows(real, real, torch.ones_like(real))
    at = torch.arange(handle.num_expanded_tokens)
    real = torch.zeros_like(at, dtype=torch.bool)
    assert handle.num_rows_needed is not None
    if int(handle.num_rows_needed[handle.rank]) > handle.num_expanded_tokens:
        return Rows(real, real, real)
    counts = [int(count) for count in handle.num_unaligned_recv_tokens_per_expert]
    starts = expanded_starts(counts, handle.expert_alignment)
    for start, count in zip(starts, counts, strict=False):
        real |= (at >= start) & (at < start + count)
    data = at < starts[-1] if case.do_zero_padding else real
    return Rows(real, data, data | (at >= starts[-1]))


_EXPONENTS = torch.tensor([2.0**exponent for exponent in range(-14, 4)])


def _expert(x: Payload, real: torch.Tensor, rank: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, columns]`: numbers that depend on every byte of the row, its place and the rank.

    Their exponents are far enough apart for the order of a sum to show. Exact on every device: integers and powers of 2.
    """
    parts = [_dense(part).view(torch.uint8) for part in (x if isinstance(x, tuple) else (x,))]
    row = torch.cat(parts, dim=1).cpu().long()
    place = torch.arange(row.shape[1])
    checksum = (row * (place % 251 + 1)).sum(dim=1, keepdim=True) + 7919 * torch.arange(len(row))[:, None]
    column = torch.arange(columns)
    mixed = row[:, column % row.shape[1]] * 4099 + checksum * 31 + column * 977 + rank * 12289
    mixed = (mixed * 40503) % 1000003
    bits = 2**23 if dtype == torch.float32 else 256
    mantissa = ((mixed * 2654435761) >> 8) % (2 * bits) - bits
    values = mantissa.float() / bits * _EXPONENTS[mixed % len(_EXPONENTS)] * 8.0
    return torch.where(real[:, None], values, POISON).to(dtype)


def _returned_weights(
    case: Case, weights: torch.Tensor | None, real: torch.Tensor, rank: int, expanded: bool
) -> torch.Tensor:
    """The weights that combine brings back: made from those received, or from nothing but place and rank."""
    shape = (len(real),) if expanded else (len(real), case.num_topk)
    if weights is None:
        made = (torch.arange(math.prod(shape)).view(shape) % 8191).float() * 0.37 + rank
    else:
        made = weights.float().cpu() * 0.75 - rank
    return torch.where(real if expanded else real[:, None], made, POISON)


# ---------------------------------------------------------------- records


def _blanked(value: torch.Tensor, defined: torch.Tensor) -> torch.Tensor:
    """A dense copy on the CPU, undefined rows zeroed."""
    out = _dense(value.detach().cpu().clone())
    out.view(torch.uint8)[~defined.repeat_interleave(out.element_size()) if out.dim() == 1 else ~defined] = 0
    return out


@dataclass
class Record:
    """What one rank returned, by name."""

    case: Case
    rank: int
    values: dict[str, Any] = field(default_factory=dict)
    handles: dict[str, EPHandle] = field(default_factory=dict)

    def keep(self, step: str, handle: EPHandle, topk_idx: torch.Tensor) -> None:
        """Keep the handle of a dispatch of `topk_idx`, to note it at the end: no later call may change it."""
        self.handles[step] = handle
        if topk_idx.numel() and self.case.strides == "dense":
            self.values[f"{step}.handle.shares_topk_idx"] = handle.topk_idx.data_ptr() == topk_idx.data_ptr()
        if self.case.do_handle_copy:
            topk_idx.fill_(-1)  # the handle has a copy: nothing may change

    def finish(self, stats: torch.Tensor | None) -> dict[str, Any]:
        """Everything noted, by name."""
        for step, handle in self.handles.items():
            self._handle(step, handle)
        self.values["stats"] = None if stats is None else stats.cpu().clone()
        return self.values

    def dispatch(
        self,
        step: str,
        recv_x: Payload,
        recv_topk_idx: torch.Tensor | None,
        recv_topk_weights: torch.Tensor | None,
        handle: EPHandle,
        expanded: bool,
    ) -> Rows:
        """Note the outputs of a dispatch; returns what is defined in them."""
        rows = _rows(self.case, handle, expanded)
        data, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        self.values[f"{step}.recv_x.dtype"] = str(data.dtype)
        self.values[f"{step}.recv_x"] = _blanked(
            data.view(torch.uint8) if data.dtype.itemsize == 1 else data, rows.data
        )
        self.values[f"{step}.recv_scales"] = None if scales is None else _blanked(scales, rows.data)
        if scales is not None:
            self.values[f"{step}.recv_scales.stride"] = tuple(scales.stride())
            if not expanded:
                self.values[f"{step}.recv_scales.finite"] = bool(scales.float().isfinite().all())
        self.values[f"{step}.recv_topk_idx"] = None if recv_topk_idx is None else recv_topk_idx.cpu().clone()
        self.values[f"{step}.recv_topk_weights"] = (
            None if recv_topk_weights is None else _blanked(recv_topk_weights, rows.weights)
        )
        return rows

    def _handle(self, step: str, handle: EPHandle) -> None:
        """Note every public field but those that name the backend's own choices."""
        for f in fields(EPHandle):
            if f.name in ("num_sms", "buffer_id", "plan"):
                continue
            value = getattr(handle, f.name)
            if f.name == "recv_src_metadata":
                received = torch.arange(len(value)) < int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
                value = _blanked(value, received)
            elif isinstance(value, torch.Tensor):
                value = value.cpu().clone()
            elif isinstance(value, list):
                value = list(value)
            self.values[f"{step}.handle.{f.name}"] = value

    def combine(self, step: str, combined_x: torch.Tensor, combined_topk_weights: torch.Tensor | None) -> None:
        self.values[f"{step}.combined_x"] = combined_x.cpu().clone()
        self.values[f"{step}.combined_topk_weights"] = (
            None if combined_topk_weights is None else combined_topk_weights.cpu().clone()
        )

    def overflow(self, step: str, error: CapacityError) -> None:
        self.values["overflow"] = step
        self.values["overflow.rows_needed"] = error.rows_needed
        self.values["overflow.capacity"] = error.capacity
        self.values["overflow.expand_factor"] = error.expand_factor
        self.values["overflow.expand_factor_needed"] = error.expand_factor_needed


def run_reference(case: Case) -> list[dict[str, Any]]:
    """What `run_rank` must return, by rank."""
    inputs = make_inputs(case)
    records = [Record(case, rank) for rank in range(case.num_ranks)]
    try:
        for number in range(case.rounds):
            _reference_round(case, number, inputs, records)
    except _Overflow as overflow:
        for record in records:
            record.overflow(overflow.step, overflow.error)
    return [record.finish(given.stats) for record, given in zip(records, inputs, strict=True)]


class _Overflow(Exception):
    def __init__(self, step: str, error: CapacityError) -> None:
        super().__init__(step)
        self.step, self.error = step, error


def _reference_round(case: Case, number: int, inputs: list[Inputs], records: list[Record]) -> None:
    given = [of_rank.rounds[number] for of_rank in inputs]
    stats = [of_rank.stats for of_rank in inputs]
    weights = [item.topk_weights for item in given]
    out_dtype = DTYPES[case.combine_dtype]
    try:
        outputs = reference.dispatch(
            [_dense_payload(case, item.x) for item in given],
            [item.topk_idx for item in given],
            cast("list[torch.Tensor]", weights) if case.weights else None,
            num_experts=case.num_experts,
            expand_factor=case.expand_factor,
            stats=cast("list[torch.Tensor]", stats) if case.stats else None,
            **case.dispatch_modes(),
        )
    except CapacityError as error:
        raise _Overflow(f"dispatch{number}", error) from error
    handles = [output.handle for output in outputs]

    def note(step: str, outputs: Sequence[reference.DispatchOutput], expanded: bool) -> list[Rows]:
        return [
            record.dispatch(step, o.recv_x, o.recv_topk_idx, o.recv_topk_weights, o.handle, expanded)
            for record, o in zip(records, outputs, strict=True)
        ]

    def combine(
        step: str,
        outputs: Sequence[reference.DispatchOutput],
        rows: list[Rows],
        biases: list[tuple[torch.Tensor, ...]] | None,
    ) -> None:
        ys, back = [], []
        for rank, (output, defined) in enumerate(zip(outputs, rows, strict=True)):
            ys.append(_expert(output.recv_x, defined.real, rank, case.columns, out_dtype))
            back.append(_returned_weights(case, output.recv_topk_weights, defined.real, rank, case.do_expand))
        try:
            combined = reference.combine(
                ys, handles, back if case.combine_weights else None, biases, apply_weights=case.apply_weights
            )
        except CapacityError as error:
            raise _Overflow(step, error) from error
        for record, result in zip(records, combined, strict=True):
            record.combine(step, result.combined_x, result.combined_topk_weights)

    rows = note(f"dispatch{number}", outputs, case.do_expand)
    for record, output, item in zip(records, outputs, given, strict=True):
        record.keep(f"dispatch{number}", output.handle, item.topk_idx)
    combine(f"combine{number}", outputs, rows, [item.biases for item in given] if case.bias_count else None)
    if case.cached == "no":
        return
    expanded = case.do_expand and case.cached == "same"
    again = reference.dispatch(
        [_dense_payload(case, item.replay_x) for item in given],
        None,
        cast("list[torch.Tensor]", [item.replay_weights for item in given]) if case.cached_weights else None,
        handles=handles,
        stats=cast("list[torch.Tensor]", stats) if case.stats else None,
        **case.replay_modes(expanded),
    )
    rows = note(f"cached{number}", again, expanded)
    for record, output, handle in zip(records, again, handles, strict=True):
        record.values[f"cached{number}.same_handle"] = output.handle is handle
    if expanded == case.do_expand:
        combine(f"recombine{number}", again, rows, None)


def run_rank(buffer: Buffer, case: Case, inputs: Inputs) -> dict[str, Any]:
    """One rank's calls. Collective."""
    record = Record(case, buffer.rank)
    stats = None if inputs.stats is None else inputs.stats.to(buffer.device, copy=True)
    try:
        for number, item in enumerate(inputs.rounds):
            _rank_round(buffer, number, _placed(case, buffer.rank, item, buffer.device), stats, record)
    except _Overflow as overflow:
        record.overflow(overflow.step, overflow.error)
    return record.finish(stats)


def _rank_round(buffer: Buffer, number: int, given: Round, stats: torch.Tensor | None, record: Record) -> None:
    case, rank = record.case, record.rank
    try:
        recv_x, recv_topk_idx, recv_weights, handle, _ = buffer.dispatch(
            _typed(case, given.x),
            given.topk_idx,
            given.topk_weights,
            stats,
            num_sms=case.num_sms,
            **case.dispatch_modes(),
        )
    except CapacityError as error:
        raise _Overflow(f"dispatch{number}", error) from error

    def combine(
        step: str, recv_x: Payload, weights: torch.Tensor | None, rows: Rows, biases: tuple[torch.Tensor, ...]
    ) -> None:
        y = _expert(recv_x, rows.real, rank, case.columns, DTYPES[case.combine_dtype])
        if case.zero_copy:
            y = buffer.combine_input(handle, DTYPES[case.combine_dtype]).copy_(y)
        else:
            y = _place(y, buffer.device, case.strides, rank)
        back = None
        if case.combine_weights:
            back = _returned_weights(case, weights, rows.real, rank, case.do_expand).to(buffer.device)
        try:
            combined_x, combined_weights, _ = buffer.combine(
                y, handle, back, biases[0] if len(biases) == 1 else biases or None, apply_weights=case.apply_weights
            )
        except CapacityError as error:
            raise _Overflow(step, error) from error
        record.combine(step, combined_x, combined_weights)

    rows = record.dispatch(f"dispatch{number}", recv_x, recv_topk_idx, recv_weights, handle, case.do_expand)
    record.keep(f"dispatch{number}", handle, given.topk_idx)
    combine(f"combine{number}", recv_x, recv_weights, rows, given.biases)
    if case.cached == "no":
        return
    expanded = case.do_expand and case.cached == "same"
    recv_x, recv_topk_idx, recv_weights, again, _ = buffer.dispatch(
        _typed(case, given.replay_x),
        topk_weights=given.replay_weights,
        cumulative_local_expert_recv_stats=stats,
        handle=handle,
        num_sms=case.num_sms,
        **case.replay_modes(expanded),
    )
    rows = record.dispatch(f"cached{number}", recv_x, recv_topk_idx, recv_weights, again, expanded)
    record.values[f"cached{number}.same_handle"] = again is handle
    if expanded == case.do_expand:
        combine(f"recombine{number}", recv_x, recv_weights, rows, ())


# ---------------------------------------------------------------- comparison


def assert_same(case: Case, expected: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]]) -> None:
    """Every rank returned every name with the same type, dtype, shape and bits.

    Raises:
        AssertionError: naming rank, name, the first index that differs, both values, and the case as an expression.
    """
    problems = [] if len(expected) == len(got) else [f"{len(got)} ranks instead of {len(expected)}"]
    for rank, (want, have) in enumerate(zip(expected, got, strict=False)):
        for name in dict.fromkeys([*want, *have]):
            if name not in want or name not in have:
                problems.append(f"rank {rank}, {name}: only in what was {'got' if name in have else 'expected'}")
            elif problem := _difference(want[name], have[name]):
                problems.append(f"rank {rank}, {name}: {problem}")
    if problems:
        more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise AssertionError("\n".join([*problems[:8]]) + more + f"\nin cases.{case!r}")


def _brief(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _difference(want: Any, have: Any) -> str | None:
    if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
        if type(want) is type(have) and want == have:
            return None
        return f"expected {_brief(want)}, got {_brief(have)}"
    if want.dtype != have.dtype or want.shape != have.shape:
        return f"expected {want.dtype} {list(want.shape)}, got {have.dtype} {list(have.shape)}"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    different = _dense(want).view(bits) != _dense(have).view(bits)
    number = int(different.sum())
    if not number:
        return None
    at = tuple(different.nonzero()[0].tolist())
    values = [t[at].item() for t in (want, have)]
    return f"{number} of {want.numel()} differ, first at {list(at)}: expected {values[0]!r}, got {values[1]!r}"


# ---------------------------------------------------------------- the grid


def _pairwise(dimensions: Mapping[str, Sequence[Any]], seed: int, minimum: int) -> list[dict[str, Any]]:
    """Combinations in which every pair of values of any two dimensions occurs, and at least `minimum` of them."""
    draw = random.Random(seed)
    names = list(dimensions)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(dimensions[names[a]]))
        for j in range(len(dimensions[names[b]]))
    }

    def covers(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}

    found: list[dict[str, Any]] = []
    while pairs or len(found) < minimum:
        wanted = min(pairs, default=None)
        best: list[int] = []
        gain = -1
        for _ in range(12):
            row = [draw.randrange(len(dimensions[name])) for name in names]
            if wanted:
                row[wanted[0]], row[wanted[2]] = wanted[1], wanted[3]
            new = len(covers(row) & pairs)
            if new > gain:
                best, gain = row, new
        pairs -= covers(best)
        found.append({name: dimensions[name][i] for name, i in zip(names, best, strict=True)})
    return found


_COMMON: dict[str, Sequence[Any]] = {
    "tokens": [(5, 9), (8, 0, 17), (4, 4, 4, 4), (1, 7, 3, 12), (16,)],
    "experts": [(1, 0), (4, 0), (5, 1), (17, 1)],
    "num_topk": [1, 2, 6, 8],
    "hidden": [1, 7, 64, 136],
    "payload": PAYLOADS,
    "combine_dtype": ROW_DTYPES,
    "index_dtype": INDEX_DTYPES,
    "mask": ["none", "some", "tokens", "last"],
    "skew": ["uniform", "zipf", "one_expert", "empty_rank", "duplicates", "same"],
    "weights": [None, "fp32", "fp16", "bf16"],
    "bias_count": [0, 1, 2],
    "do_cpu_sync": [True, False],
    "do_handle_copy": [True, False],
    "stats": [False, True],
    "cached_weights": [False, True],
    "col_major_scales": [False, True],
    "strides": ["dense", "columns", "transposed", "mixed"],
    "zero_copy": [False, True],
    "spare_tokens": [0, 3],
    "rounds": [1, 2],
}


def _from_pairs(row: dict[str, Any], seed: int) -> Case:
    per_rank, extra = row.pop("experts")
    row["num_experts"] = per_rank * len(row["tokens"]) + extra
    back = row.pop("back")
    row["combine_weights"], row["apply_weights"] = back != "no", back == "apply"
    row["cached_weights"] &= row["cached"] != "no"
    row["col_major_scales"] &= row["payload"] in SCALED
    return Case(**row, seed=seed)


_RANK_GRID = [
    _from_pairs(row, seed)
    for seed, row in enumerate(
        _pairwise(
            {**_COMMON, "back": ["no", "yes"], "cached": ["no", "same"], "expert_alignment": [1, 8]}, 1, minimum=48
        ),
        start=1,
    )
]
_EXPANDED_GRID = [
    _from_pairs({**row, "do_expand": True}, seed)
    for seed, row in enumerate(
        _pairwise(
            {
                **_COMMON,
                "back": ["no", "yes", "apply"],
                "cached": CACHED,
                "expert_alignment": [1, 4, 128],
                "do_zero_padding": [False, True],
            },
            2,
            minimum=40,
        ),
        start=101,
    )
]


def _both_layouts(values: dict[str, Any]) -> list[Case]:
    """The case in the rank layout, and in the expanded one."""
    values = dict(values)
    name = values.pop("name")
    return [
        Case(**values, name=name),
        Case(**values, do_expand=True, expert_alignment=4, apply_weights=values.get("combine_weights", False),
             name=f"{name}-expand"),
    ]  # fmt: skip


_SITUATIONS: list[Case] = [
    case
    for values in [
        *[
            {"name": f"mask-{mask}", "tokens": (6, 9, 4), "mask": mask, "bias_count": 1, "combine_weights": True}
            for mask in MASKS
        ],
        *[{"name": f"skew-{skew}", "tokens": (11, 6), "skew": skew, "bias_count": 2} for skew in SKEWS],
        *[
            {"name": f"hidden-{hidden}-{payload}", "tokens": (3, 5), "hidden": hidden, "payload": payload, "num_topk": 2}
            for hidden, payload in [
                (1, "fp32"), (1, "packed4"), (7, "fp16"), (7, "packed4"), (1024, "bf16"), (2880, "fp8"), (2880, "fp16"),
            ]
        ],
        *[
            {"name": f"topk-{k}", "tokens": (4, 6), "num_topk": k, "num_experts": 34, "combine_weights": True}
            for k in (1, 6, 8, 10, 16, 22, 32)
        ],
        {"name": "topk-above-experts", "tokens": (4, 6), "num_topk": 16, "num_experts": 3, "combine_weights": True},
        {"name": "no-tokens-on-one", "tokens": (0, 5, 7), "cached": "same", "stats": True},
        {"name": "no-tokens-on-any", "tokens": (0, 0), "cached": "same", "bias_count": 1, "combine_weights": True},
        {"name": "no-tokens-no-sync", "tokens": (0, 0), "do_cpu_sync": False, "payload": "fp8"},
        {"name": "256-over-3", "tokens": (9, 4, 6), "num_experts": 256, "num_topk": 8},
        {"name": "8-over-8", "tokens": (2, 0, 5, 3, 1, 7, 4, 2), "num_experts": 8, "num_topk": 8},
        {"name": "1-over-1", "tokens": (5,), "num_experts": 1, "num_topk": 1, "cached": "same"},
        {"name": "one-rank-many-experts", "tokens": (13,), "num_experts": 40, "num_topk": 6},
        *[
            {"name": f"experts-{e}-on-one", "tokens": (4, 7), "num_experts": 2 * e, "num_topk": 6}
            for e in (16, 17, 64, 160)
        ],
        *[
            {"name": f"index-{dtype}", "tokens": (5, 6), "index_dtype": dtype, "rounds": 3, "mask": "some"}
            for dtype in INDEX_DTYPES
        ],
        *[
            {"name": f"strides-{s}", "tokens": (5, 6, 3, 4), "strides": s, "bias_count": 2, "weights": w}
            for s, w in zip(STRIDES[1:], ("fp16", "bf16", "fp32", "fp16"), strict=True)
        ],
        {"name": "strides-scales", "tokens": (5, 6), "strides": "mixed", "payload": "fp8", "hidden": 300},
        {"name": "bias-without-selection", "tokens": (4, 5), "mask": "all", "bias_count": 1, "combine_dtype": "fp16"},
        {"name": "empty-rank-no-sync", "tokens": (6, 7, 2), "skew": "empty_rank", "do_cpu_sync": False},
        {"name": "no-sync-scales", "tokens": (6, 1), "do_cpu_sync": False, "payload": "packed4", "cached": "same"},
        {"name": "changing-counts", "tokens": (7, 0, 3, 1), "rounds": 4, "cached": "same", "zero_copy": True},
        {"name": "narrow-combine", "tokens": (5, 3), "combine_hidden": 24, "payload": "fp8", "hidden": 128},
        {"name": "wide-combine", "tokens": (5, 3), "combine_hidden": 200, "payload": "packed4", "hidden": 32},
        {"name": "few-sms", "tokens": (31, 22), "num_sms": 1, "zero_copy": True, "stats": True},
        {"name": "eight-ranks", "tokens": (3, 9, 0, 4, 1, 6, 2, 5), "num_experts": 21, "skew": "zipf", "rounds": 2},
        {"name": "one-row-each", "tokens": (5, 0, 7), "num_experts": 7, "num_topk": 1, "zero_copy": True, "rounds": 2,
         "cached": "same"},
        {"name": "one-row-each-no-sync", "tokens": (6, 3), "num_topk": 1, "zero_copy": True, "do_cpu_sync": False},
        {"name": "one-row-on-some", "tokens": (6, 5, 4), "num_experts": 4, "num_topk": 2, "zero_copy": True,
         "combine_weights": True, "bias_count": 1, "hidden": 104},
        {"name": "large", "tokens": (190, 256, 77, 128), "num_experts": 64, "num_topk": 8, "hidden": 512, "heavy": True,
         "bias_count": 1, "combine_weights": True, "cached": "same"},
    ]
    for case in _both_layouts(cast("dict[str, Any]", values))
]  # fmt: skip

_OVERFLOWS = [
    Case(
        tokens=tokens,
        num_topk=num_topk,
        do_expand=True,
        overflow=True,
        skew=skew,
        expand_factor=factor,
        do_cpu_sync=sync,
        expert_alignment=alignment,
        payload=payload,
        combine_weights=True,
        apply_weights=True,
        stats=True,
        name=f"overflow-{skew}-{'sync' if sync else 'no_sync'}-A{alignment}",
    )
    for sync in (True, False)
    for tokens, num_topk, skew, factor, alignment, payload in [
        ((8, 8), 2, "one_rank", 1.5, 1, "bf16"),
        ((8, 6, 8), 1, "one_expert", 2.0, 4, "fp8"),
        ((8, 8, 8, 8), 4, "uniform", 0.25, 1, "bf16"),
        ((9, 12, 3), 4, "same", 0.5, 2, "packed4"),
    ]
]
_FITTING = [
    Case(
        tokens=(16, 16),
        num_topk=num_topk,
        do_expand=True,
        expand_factor=factor,
        do_cpu_sync=sync,
        expert_alignment=alignment,
        skew=skew,
        name=f"fits-{skew}-{'sync' if sync else 'no_sync'}-A{alignment}",
    )
    for sync in (True, False)
    for num_topk, factor, alignment, skew in [(8, 1.0, 1, "uniform"), (4, 2.0, 16, "one_rank")]
]

GRID: list[Case] = [*_RANK_GRID, *_EXPANDED_GRID, *_SITUATIONS, *_OVERFLOWS, *_FITTING]
"""What every backend must do."""
