"""`torchrun --nproc-per-node N -m tile_ep.selftest_processes`: one rank a process, every output to the bit.

On GPUs a rank has one each: the kernels over peer memory and the collective backend over NCCL run the same calls and must
both give what the reference gives, hence the same. On CPUs only the collective backend can run, over gloo. The first rank
prints a line per check; every rank exits 1 if any check failed on any rank. No check can hang: its waits are bounded by the
buffers' timeout, and a process that exceeds the limit of a check says where it stood and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tile_ep import autograd, cases, reference
from tile_ep.buffer import Buffer
from tile_ep.cases import Case
from tile_ep.errors import PeerTimeoutError
from tile_ep.event import EventOverlap
from tile_ep.handle import EPHandle
from tile_ep.quantize import per_token_cast_to_fp8

if TYPE_CHECKING:
    from tile_ep.worlds.loopback import Loopback, Meeting

_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_LAYOUTS = {"rank layout": False, "expanded": True}
_SMS = {"cuda": (4, 8, 16), "cpu": (2, 4, 8)}  # of the rounds of a long run, in turn
_GRACE_S = 10.0
_DISTINCT = 32  # inputs of a long run, drawn in random order
_COMPILERS = 12  # processes of this host that compile side by side
TUNINGS: dict[str, dict[str, bool]] = {"pull": {}, "push": {"pushes": True}, "by-warp": {"by_warp": True}}
"""Variants of the kernels by name: combine pushes rows, which it otherwise pulls; dispatch copies rows by the warp."""


@dataclass(frozen=True)
class Shape:
    """Of one check's buffers: `R`, `T_max`, `H`, `K`, `E`."""

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int


@dataclass(frozen=True)
class Place:
    """What moves the rows of a buffer, and where its tensors are."""

    backend: str
    device: torch.device

    def __str__(self) -> str:
        return self.backend


class Skipped(Exception):
    """A check does not apply here; the message says why."""


class Ranks:
    """This process among the others.

    Attributes:
        rank, num_ranks: of the default group.
        places: where every exchange is run; the first is what is tested, the second what it is compared with.
        timeout_s: of every wait of a buffer.
    """

    def __init__(self, places: Sequence[Place], timeout_s: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.places, self.timeout_s = list(places), timeout_s
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=3 * timeout_s + 120))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, over a gloo group that carries nothing else. Collective."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, self._control)
        return values

    def meet(self) -> None:
        """Return once every rank has come. Collective."""
        self.gather(None)

    @contextlib.contextmanager
    def open(self, place: Place, shape: Shape, timeout_s: float | None = None, **options: Any) -> Iterator[Buffer]:
        """A buffer of `shape` with room for any routing; no rank leaves while another one may still read. Collective."""
        with Buffer(
            None,
            shape.tokens,
            shape.hidden,
            shape.topk,
            shape.experts,
            backend=place.backend,
            device=place.device,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            **{"expand_factor": shape.ranks + 1.0, **options},
        ) as buffer:
            assert buffer.backend_name == place.backend, f"{buffer.backend_name} instead of {place.backend}"
            yield buffer
            buffer.barrier()

    def kernels(self) -> Place:
        """Where the kernels run.

        Raises:
            Skipped: nowhere.
        """
        for place in self.places:
            if place.backend == "nvlink":
                return place
        raise Skipped("needs the kernels, hence GPUs")


class ThreadRanks(Ranks):
    """One rank among threads of this process, whose buffers are those of one loopback: on one GPU, or in the simulator.

    Args:
        meeting, opened: the same for all ranks.
    """

    def __init__(self, rank: int, device: str, meeting: Meeting, opened: dict[str, Loopback]) -> None:
        self.rank, self.num_ranks, self.timeout_s = rank, len(meeting), 60.0
        self.places = [Place("nvlink", torch.device("cpu" if device == "sim" else device))]
        self._device, self._meeting, self._opened = device, meeting, opened

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(self.rank, value)

    @contextlib.contextmanager
    def open(self, place: Place, shape: Shape, timeout_s: float | None = None, **options: Any) -> Iterator[Buffer]:
        from tile_ep.worlds.loopback import loopback

        name = str(shape)
        if self.rank == 0:
            self._opened[name] = loopback(
                shape.ranks,
                self._device,
                num_max_tokens_per_rank=shape.tokens,
                hidden=shape.hidden,
                num_topk=shape.topk,
                num_experts=shape.experts,
                timeout_s=timeout_s or self.timeout_s,
                **{"expand_factor": shape.ranks + 1.0, **options},
            )
        self.meet()
        with self._opened[name].lockstep():
            buffer = self._opened[name][self.rank]
            yield buffer
            buffer.barrier()
            self.meet()
        if self.rank == 0:
            self._opened.pop(name).destroy()


def in_threads(num_ranks: int, device: str, check: Callable[[Ranks], object]) -> str:
    """What `check` says where every rank is a thread.

    Args:
        device: of the ranks' buffers, as `loopback` takes it.

    Raises:
        AssertionError: it failed on a rank.
    """
    from tile_ep.worlds.loopback import Meeting

    meeting = Meeting(num_ranks, 120.0)
    opened: dict[str, Loopback] = {}

    def on_rank(rank: int) -> str | None:
        ranks = ThreadRanks(rank, device, meeting, opened)
        with contextlib.ExitStack() as stack:
            if device != "sim":
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            return together(ranks, lambda: str(check(ranks)))

    with ThreadPoolExecutor(num_ranks) as threads:
        return str(next(threads.map(on_rank, range(num_ranks))))


def use_tuning(name: str) -> None:
    """Let every buffer that this process builds on a GPU from now on use a variant of the kernels, one of `TUNINGS`."""
    if changes := TUNINGS[name]:
        from tile_ep.kernels.tuning import HOPPER
        from tile_ep.worlds.cuda import CudaDevice

        CudaDevice.tuning = replace(HOPPER, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the shared list of cases


def cases_for(num_ranks: int, do_expand: bool, number: int) -> list[Case]:
    """Cases of one layout over `num_ranks` ranks: those of the shared list, then others dealt out anew over as many ranks.

    Args:
        number: of cases, 0 for all.
    """
    every = [case for case in cases.GRID if case.do_expand == do_expand]
    own = [case for case in every if case.num_ranks == num_ranks]
    derived = [_over(case, num_ranks) for case in every if case.num_ranks != num_ranks and not case.heavy]
    if not number:
        return own + derived
    own = _spread(own, number)
    return own + _spread(derived, number - len(own))


def _spread(some: list[Case], number: int) -> list[Case]:
    """`number` of them, evenly spaced, or all."""
    if number >= len(some):
        return some
    return [some[i * len(some) // number] for i in range(number)]


def _over(case: Case, num_ranks: int) -> Case:
    """The case with its token counts repeated or cut to `num_ranks` ranks."""
    tokens = tuple(case.tokens[rank % case.num_ranks] for rank in range(num_ranks))
    experts = max(case.num_experts, num_ranks)
    return replace(case, tokens=tokens, num_experts=experts, name=f"{case.name or 'grid'}-from-{case.num_ranks}")


def check_cases(ranks: Ranks, do_expand: bool, number: int) -> str:
    """Every case in each place, against the reference and so against each other."""
    wanted = cases_for(ranks.num_ranks, do_expand, number)
    wrong = []
    for case in wanted:
        expected, inputs = cases.run_reference(case), cases.make_inputs(case)[ranks.rank]
        for place in ranks.places:
            try:
                got = _run_case(ranks, place, case, inputs)
                cases.assert_same(case, expected, [*expected[: ranks.rank], got, *expected[ranks.rank + 1 :]])
            except Exception:
                wrong.append(f"{place}: {case}\n{traceback.format_exc()}")
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(wanted)} cases:\n" + "\n".join(wrong[:3]))
    own = sum(case in cases.GRID for case in wanted)
    return f"{len(wanted)} cases, {own} of the shared list and {len(wanted) - own} derived from it"


def _run_case(ranks: Ranks, place: Place, case: Case, inputs: cases.Inputs) -> dict[str, Any]:
    options: dict[str, Any] = {"backend": place.backend, "device": place.device, "timeout_s": ranks.timeout_s}
    with Buffer(**case.buffer_arguments(), **options) as buffer:
        got = cases.run_rank(buffer, case, inputs)
        buffer.barrier()
        return got


def check_compiled(ranks: Ranks, number: int, tuning: str, checks: Sequence[str], tokens: int) -> str:
    """The same cases with all ranks on one GPU, and a little of other checks, a share of them on each: it compiles what those
    will launch, many kernels at a time. Whether the other checks pass, they say themselves.

    Args:
        number, tokens: as for the checks.
        checks: that will run.
    """
    ranks.kernels()
    wanted = [case for expand in _LAYOUTS.values() for case in cases_for(ranks.num_ranks, expand, number)]
    jobs = [(name, ranks.num_ranks, tokens) for name in rehearsals(tokens) if name in checks]
    context = multiprocessing.get_context("spawn")
    workers = max(1, _COMPILERS // ranks.num_ranks)
    with ProcessPoolExecutor(workers, context, _see_one_device, (torch.cuda.current_device(), tuning)) as pool:
        rehearsed = [pool.submit(_rehearse, *job) for job in jobs[ranks.rank :: ranks.num_ranks]]
        share = wanted[ranks.rank :: ranks.num_ranks]
        wrong = [error for error in pool.map(_run_on_one_device, share) if error is not None]
        vain = sum(ranks.gather(sum(job.exception() is not None for job in rehearsed)))
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(share)} cases:\n" + "\n".join(wrong[:3]))
    said = f"{len(wanted)} cases with all ranks on one GPU, a little of {len(jobs)} checks"
    return f"{said}, {vain} in vain" if vain else said


def rehearsals(tokens: int) -> dict[str, Callable[[Ranks], object]]:
    """What launches the same kernels as a check, by its name. That of graphs launches none of its own.

    Args:
        tokens: of a rank at V3 shape.
    """
    some: dict[str, Callable[[Ranks], object]] = {
        "two buffers": check_two_buffers,
        "gradients": lambda ranks: check_gradients(ranks, 1),
        "queued without sync": lambda ranks: check_queued(ranks, 2),
        "streams and events": lambda ranks: check_streams(ranks, 6),
    }
    for layout, expand in _LAYOUTS.items():
        some[f"rounds, {layout}"] = functools.partial(check_rounds, do_expand=expand, rounds=10)
        some[f"handles alive, {layout}"] = functools.partial(check_alive, do_expand=expand)
    for payload in ("bf16", "fp8"):
        some[f"V3 shape, {payload}"] = functools.partial(_rehearse_large, tokens=tokens, payload=payload)
    return some


def _rehearse_large(ranks: Ranks, tokens: int, payload: str) -> None:
    _large(ranks, ranks.places[0], large_shape(ranks.num_ranks, tokens), payload)


def _rehearse(name: str, num_ranks: int, tokens: int) -> str:
    return in_threads(num_ranks, "cuda", rehearsals(tokens)[name])


def _see_one_device(index: int, tuning: str) -> None:
    """Called in a new process, which has not looked for GPUs yet."""
    use_tuning(tuning)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)


def _run_on_one_device(case: Case) -> str | None:
    """What is wrong, or `None`."""
    from tile_ep.worlds.loopback import loopback

    try:
        inputs = cases.make_inputs(case)
        with loopback(case.num_ranks, "cuda", timeout_s=60.0, **case.buffer_arguments()) as buffers:
            got = buffers.run(lambda rank, buffer: cases.run_rank(buffer, case, inputs[rank]))
        cases.assert_same(case, cases.run_reference(case), got)
    except Exception:
        return f"{case}\n{traceback.format_exc()}"
    return None


# ---------------------------------------------------------------- exchanges of our own

Outputs = dict[str, torch.Tensor]


class Exchange:
    """Fresh inputs of one rank, and what the reference makes of those of all ranks; all on the CPU.

    Each rank's expert multiplies by a power of two of its own: exact, and seen where a row comes from the wrong rank.

    Attributes:
        handles: the reference's, by rank.
        rows: that this rank receives.
    """

    def __init__(self, shape: Shape, rank: int, seed: int, do_expand: bool) -> None:
        self.do_expand, self._factor = do_expand, _factor(rank)
        draw = torch.Generator().manual_seed(seed)
        tokens = [int(torch.randint(0, shape.tokens + 1, (), generator=draw)) for _ in range(shape.ranks)]
        x = [torch.randn(t, shape.hidden, generator=draw).bfloat16() for t in tokens]
        skew = torch.rand(shape.experts, generator=draw) * (seed % 3)
        topk_idx = [
            (torch.rand(t, shape.experts, generator=draw) + skew).topk(shape.topk, dim=1).indices for t in tokens
        ]
        for idx in topk_idx:
            idx[torch.rand(idx.shape, generator=draw) < 0.1] = -1
        weights = [torch.rand(t, shape.topk, generator=draw) for t in tokens]
        self._given = x[rank], topk_idx[rank], weights[rank]
        sent = reference.dispatch(
            x,
            topk_idx,
            weights,
            num_experts=shape.experts,
            num_max_tokens_per_rank=shape.tokens,
            do_expand=do_expand,
            expand_factor=shape.ranks + 1.0,
        )
        ys: list[Any] = [one.recv_x * _factor(peer) for peer, one in enumerate(sent)]  # type: ignore[operator]
        back: list[Any] = [one.recv_topk_weights for one in sent]
        self.handles = handles = [one.handle for one in sent]
        self._received_weights = back
        combined = reference.combine(ys, handles, back, apply_weights=do_expand)[rank]
        self.rows = handles[rank].num_expanded_tokens if do_expand else handles[rank].num_recv_tokens
        self._expected = _outputs(
            sent[rank].recv_x, sent[rank].recv_topk_idx, back[rank], combined.combined_x, combined.combined_topk_weights
        )

    def given(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`x`, `topk_idx`, `topk_weights` on `device`."""
        x, topk_idx, weights = (tensor.to(device) for tensor in self._given)
        return x, topk_idx, weights

    def dispatch(self, buffer: Buffer, num_sms: int, **options: Any) -> tuple[Any, Any, Any, EPHandle, EventOverlap]:
        """Collective."""
        return buffer.dispatch(*self.given(buffer.device), num_sms=num_sms, do_expand=self.do_expand, **options)

    def combine(self, buffer: Buffer, sent: Sequence[Any], num_sms: int, zero_copy: bool = False) -> Outputs:
        """Collective.

        Args:
            sent: what `dispatch` returned.
            zero_copy: the expert writes to the buffer's own memory.
        """
        recv_x, recv_topk_idx, weights, handle, _ = sent
        y = recv_x * self._factor
        if zero_copy:
            y = buffer.combine_input(handle).fill_(cases.POISON).copy_(y)
        combined = buffer.combine(y, handle, weights, num_sms=num_sms, apply_weights=self.do_expand)
        return _outputs(recv_x, recv_topk_idx, weights, *combined[:2])

    def run(self, buffer: Buffer, num_sms: int, zero_copy: bool = False, **options: Any) -> Outputs:
        """Dispatch, expert, combine. Collective."""
        return self.combine(buffer, self.dispatch(buffer, num_sms, **options), num_sms, zero_copy)

    def gradient(self, rank: int, grads: list[torch.Tensor]) -> torch.Tensor:
        """`[T, H]`, of the tokens of `rank` where those of all ranks' sums are `grads`, from an expanded exchange."""
        arrived = reference.dispatch(grads, None, handles=self.handles, do_expand=True)
        rows: list[Any] = []
        for peer, (one, weights) in enumerate(zip(arrived, self._received_weights, strict=True)):
            assert isinstance(one.recv_x, torch.Tensor)
            rows.append((one.recv_x.float() * weights[:, None]).to(one.recv_x.dtype) * _factor(peer))
        return reference.combine(rows, self.handles)[rank].combined_x

    def check_sums(self, sums: torch.Tensor, said: str) -> None:
        """Raise unless these are the tokens' sums, and zero past the last token."""
        tokens = len(self._given[0])
        assert torch.equal(self._expected["combined_x"], sums[:tokens].cpu()), f"{said}: combined_x differs"
        assert not sums[tokens:].any(), f"{said}: tokens that select nothing"

    def check(self, got: Outputs, said: str = "") -> None:
        """Raise unless these are the reference's bits; rows past the last one are not looked at."""
        assert got.keys() == self._expected.keys(), f"{said}: {list(got)} instead of {list(self._expected)}"
        for name, want in self._expected.items():
            have = got[name][: self.rows] if name.startswith("recv") else got[name]
            assert torch.equal(want, have.cpu()), f"{said}: {name} differs"


def small_shape(num_ranks: int) -> Shape:
    """The same for many checks, so that few kernels have to be compiled."""
    return Shape(num_ranks, 40, 520, 4, 4 * num_ranks + 1)


def large_shape(num_ranks: int, tokens: int) -> Shape:
    """That of DeepSeek-V3."""
    return Shape(num_ranks, tokens, 7168, 8, 256)


def _factor(rank: int) -> float:
    return 2.0 ** (rank % 4)


def _outputs(
    recv_x: Any,
    recv_topk_idx: torch.Tensor | None,
    recv_topk_weights: torch.Tensor | None,
    combined_x: torch.Tensor,
    combined_topk_weights: torch.Tensor | None,
) -> Outputs:
    named = {
        "recv_x": recv_x,
        "recv_topk_idx": recv_topk_idx,
        "recv_topk_weights": recv_topk_weights,
        "combined_x": combined_x,
        "combined_topk_weights": combined_topk_weights,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _poison(device: torch.device) -> None:
    """Fill what the allocator hands out next, so that outputs which nobody writes are seen."""
    spans = [torch.empty(size, dtype=torch.uint8, device=device).fill_(0xA5) for size in (1 << 12, 1 << 16, 1 << 20)]
    del spans


def _dawdle(draw: random.Random, device: torch.device) -> None:
    """Now and then come late, each rank at other times: on the host, or on the device alone."""
    chance = draw.random()
    if chance < 0.1:
        time.sleep(draw.random() * 2e-3)
    elif chance < 0.3 and device.type == "cuda":
        torch.cuda._sleep(draw.randrange(1 << 20))


def check_rounds(ranks: Ranks, do_expand: bool, rounds: int) -> str:
    """Back to back: other inputs each time, ranks that come late, poisoned memory, all outputs of all rounds compared."""
    shape = small_shape(ranks.num_ranks)
    distinct = [Exchange(shape, ranks.rank, seed, do_expand) for seed in range(min(rounds, _DISTINCT))]
    order = random.Random(rounds)
    numbers = [order.randrange(len(distinct)) for _ in range(rounds)]
    late = random.Random(ranks.rank)
    for place in ranks.places:
        with ranks.open(place, shape) as buffer:
            for step, number in enumerate(numbers):
                _poison(place.device)
                _dawdle(late, place.device)
                sms = _SMS[place.device.type][step % 3]
                got = distinct[number].run(buffer, sms, zero_copy=step % 2 == 1, do_cpu_sync=step % 5 != 4)
                distinct[number].check(got, f"{place}, round {step}")
    return f"{rounds} rounds of {len(distinct)} inputs on {_list(ranks.places)}"


def check_alive(ranks: Ranks, do_expand: bool) -> str:
    """Results and handles of several dispatches alive at once, combined in reverse, and dispatched again from the handle."""
    shape = small_shape(ranks.num_ranks)
    several = [Exchange(shape, ranks.rank, 100 + seed, do_expand) for seed in range(6)]
    for place in ranks.places:
        with ranks.open(place, shape, num_slots=3) as buffer:
            sent = [one.dispatch(buffer, 4) for one in several]
            for number in reversed(range(len(several))):
                one, result = several[number], sent[number]
                one.check(one.combine(buffer, result, 4), f"{place}, dispatch {number}")
                x, _, weights = one.given(buffer.device)
                again = buffer.dispatch(x, topk_weights=weights, handle=result[3], num_sms=4, do_expand=do_expand)
                one.check(one.combine(buffer, again, 4), f"{place}, dispatch {number} from its handle")
    return f"{len(several)} dispatches in 3 slots on {_list(ranks.places)}"


def check_two_buffers(ranks: Ranks) -> str:
    """Two buffers of one group, used in turn."""
    shapes = Shape(ranks.num_ranks, 16, 128, 2, 2 * ranks.num_ranks), Shape(ranks.num_ranks, 9, 264, 5, 40)
    for place in ranks.places:
        with ranks.open(place, shapes[0]) as first, ranks.open(place, shapes[1]) as second:
            for seed in range(8):
                pair = [Exchange(shape, ranks.rank, 200 + seed, False) for shape in shapes]
                sent = [one.dispatch(buffer, 4) for one, buffer in zip(pair, (first, second), strict=True)]
                for one, buffer, result in zip(pair, (first, second), sent, strict=True):
                    one.check(one.combine(buffer, result, 4), f"{place}, seed {seed}")
    return f"8 rounds on {_list(ranks.places)}"


def check_gradients(ranks: Ranks, steps: int) -> str:
    """Sums and the gradients of tokens, through dispatch, expert and combine, against the reference; those of weights, whose
    sums over a row depend on the device, between two backends of one.
    """
    shape = small_shape(ranks.num_ranks)
    for seed in range(steps):
        one = Exchange(shape, ranks.rank, 700 + seed, True)
        draw = torch.Generator().manual_seed(seed)
        grads = [torch.randn(len(h.topk_idx), shape.hidden, generator=draw).bfloat16() for h in one.handles]
        wanted, of_weights = one.gradient(ranks.rank, grads), []
        for place in ranks.places:
            with ranks.open(place, shape) as buffer:
                x, topk_idx, weights = one.given(place.device)
                x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
                received = autograd.dispatch(buffer, x, topk_idx, weights)
                sums = autograd.combine(buffer, received.x * _factor(ranks.rank), received, received.topk_weights)
                sums.backward(grads[ranks.rank].to(place.device))
            one.check_sums(sums.detach(), f"{place}, step {seed}")
            assert x.grad is not None and weights.grad is not None
            assert torch.equal(wanted, x.grad.cpu()), f"{place}, step {seed}: x.grad differs"
            of_weights.append(weights.grad)
        first, last = of_weights[0], of_weights[-1]
        assert first.device != last.device or torch.equal(first, last), f"step {seed}: weights.grad differs"
    return f"{steps} steps on {_list(ranks.places)}"


def _list(places: Sequence[Place]) -> str:
    return " and ".join(f"{place} ({place.device.type})" for place in places)


# ---------------------------------------------------------------- large, and only between two backends


def check_large(ranks: Ranks, shape: Shape, payload: str) -> str:
    """Shapes of real models, too large for the reference: both backends, both layouts, the same bits."""
    if len(ranks.places) < 2:
        raise Skipped("there is no second backend to compare with")
    ours, theirs = (_large(ranks, place, shape, payload) for place in ranks.places[:2])
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.cpu(), theirs[name].cpu()), f"{name} differs"
    return f"{shape.tokens} tokens x {shape.hidden} {payload}, top-{shape.topk} of {shape.experts}"


def _large(ranks: Ranks, place: Place, shape: Shape, payload: str) -> Outputs:
    draw = torch.Generator(ranks.places[0].device).manual_seed(ranks.rank)
    x = torch.randn(shape.tokens, shape.hidden, device=draw.device, generator=draw).bfloat16()
    scores = torch.rand(shape.tokens, shape.experts, device=draw.device, generator=draw)
    topk_idx = scores.topk(shape.topk, dim=1).indices.to(place.device)
    weights = scores.topk(shape.topk, dim=1).values.to(place.device)
    rows: Any = tuple(part.to(place.device) for part in per_token_cast_to_fp8(x)) if payload == "fp8" else None
    kept: Outputs = {}
    with ranks.open(place, shape, expand_factor=2.0) as buffer:
        for layout, do_expand in _LAYOUTS.items():
            recv, idx, back, handle, _ = buffer.dispatch(
                x.to(place.device) if rows is None else rows, topk_idx, weights, do_expand=do_expand
            )
            data, scales = recv if isinstance(recv, tuple) else (recv, None)
            y = data.to(torch.bfloat16) * _factor(ranks.rank)
            out = buffer.combine(y, handle, back, apply_weights=do_expand)
            bits = data.view(torch.uint8) if data.itemsize == 1 else data
            named = {**_outputs(bits, idx, back, *out[:2]), **({} if scales is None else {"recv_scales": scales})}
            kept |= {f"{layout}, {name}": tensor.clone() for name, tensor in named.items()}
            del recv, data, scales, bits, named
    return kept


# ---------------------------------------------------------------- what only kernels do


def check_queued(ranks: Ranks, rounds: int) -> str:
    """Collectives queued without a word from the device, checked afterwards."""
    place = ranks.kernels()
    shape = small_shape(ranks.num_ranks)
    distinct = [Exchange(shape, ranks.rank, 300 + seed, seed % 2 == 1) for seed in range(20)]
    with ranks.open(place, shape) as buffer:
        kept = []
        for step in range(rounds):
            outputs = distinct[step % 20].run(buffer, 4, do_cpu_sync=False)
            kept.append({name: tensor.clone() for name, tensor in outputs.items()})
        for step, outputs in enumerate(kept):
            distinct[step % 20].check(outputs, f"round {step}")
            tail = outputs.get("recv_topk_idx", torch.full((0,), -1))[distinct[step % 20].rows :]
            assert bool((tail == -1).all()), f"round {step}: tail of recv_topk_idx"
    return f"{rounds} rounds, both layouts in turn"


def check_streams(ranks: Ranks, rounds: int) -> str:
    """Collectives that follow an event, and leave the compute stream to the caller."""
    place = ranks.kernels()
    shape = small_shape(ranks.num_ranks)
    distinct = [Exchange(shape, ranks.rank, 400 + seed, seed % 2 == 1) for seed in range(10)]
    options: dict[str, Any] = {"async_with_compute_stream": True, "allocate_on_comm_stream": True, "num_sms": 8}
    with ranks.open(place, shape) as buffer:
        for step in range(rounds):
            one = distinct[step % 10]
            x, topk_idx, weights = one.given(place.device)
            ready = torch.cuda.current_stream().record_event()
            torch.cuda._sleep(200_000)  # what the collective must not wait for
            recv_x, idx, back, handle, event = buffer.dispatch(
                x,
                topk_idx,
                weights,
                previous_event=ready,
                do_expand=one.do_expand,
                do_cpu_sync=step % 3 == 0,
                **options,
            )
            del x, topk_idx, weights  # the event keeps what is still read
            with event:
                _poison(place.device)
            assert isinstance(recv_x, torch.Tensor)
            y = recv_x * _factor(ranks.rank)
            combined_x, combined_weights, event = buffer.combine(
                y, handle, back, apply_weights=one.do_expand, **options
            )
            del y
            event.current_stream_wait()
            one.check(_outputs(recv_x, idx, back, combined_x, combined_weights), f"round {step}")
    return f"{rounds} rounds"


def check_graph(ranks: Ranks, do_expand: bool, replays: int) -> str:
    """Dispatch, expert and combine captured once, replayed with other inputs each time."""
    place = ranks.kernels()
    shape = small_shape(ranks.num_ranks)
    distinct = [Exchange(shape, ranks.rank, 500 + seed, do_expand) for seed in range(min(replays, _DISTINCT))]
    x = torch.zeros(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=place.device)
    topk_idx = torch.full((shape.tokens, shape.topk), -1, dtype=torch.int64, device=place.device)
    weights = torch.zeros(shape.tokens, shape.topk, device=place.device)
    with ranks.open(place, shape) as buffer:

        def step() -> torch.Tensor:
            recv_x, _, back, handle, _ = buffer.dispatch(
                x, topk_idx, weights, do_cpu_sync=False, do_expand=do_expand, num_sms=8
            )
            assert isinstance(recv_x, torch.Tensor)
            y = recv_x * _factor(ranks.rank)
            return buffer.combine(y, handle, back, num_sms=8, apply_weights=do_expand)[0]

        for _ in range(3):
            step()
        buffer.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            out = step()
        late = random.Random(ranks.rank)
        for number in range(replays):
            one = distinct[number % len(distinct)]
            given = one.given(place.device)
            tokens = len(given[0])
            for memory, values, rest in zip((x, topk_idx, weights), given, (0, -1, 0), strict=True):
                memory.fill_(rest)[:tokens] = values
            _dawdle(late, place.device)
            graph.replay()
            one.check_sums(out, f"replay {number}")
        torch.cuda.synchronize()
    return f"{replays} replays"


# ---------------------------------------------------------------- a rank that does not come


def check_absent(ranks: Ranks, phase: str, timeout_s: float) -> str:
    """One rank stays away from a dispatch, or from a combine: all others raise and name it; after `reset` all goes on."""
    if ranks.num_ranks < 2:
        raise Skipped("one rank has no peers")
    shape = small_shape(ranks.num_ranks)
    absent = ranks.num_ranks - 1 if phase == "dispatch" else 0
    one = Exchange(shape, ranks.rank, 600, False)
    said = ""
    for place in ranks.places:
        with ranks.open(place, shape, timeout_s) as buffer:
            one.check(one.run(buffer, 4), f"{place}, before")
            sent = one.dispatch(buffer, 4) if phase == "combine" else None
            together(ranks, functools.partial(_without, ranks, buffer, one, sent, absent, phase))
            buffer.reset()
            for step in range(3):
                one.check(one.run(buffer, 4), f"{place}, {step} after reset")
        said = f"rank {absent} of {ranks.num_ranks} away for {timeout_s:g} s on {_list(ranks.places)}"
    return said


def _without(ranks: Ranks, buffer: Buffer, one: Exchange, sent: Any, absent: int, phase: str) -> None:
    if ranks.rank == absent:
        return
    try:
        if sent is None:
            one.run(buffer, 4)
        else:
            one.combine(buffer, sent, 4)
            buffer.barrier()  # a combine does not wait for the device
    except PeerTimeoutError as error:
        assert error.rank == ranks.rank and error.peers == [absent], f"{error} (rank {absent} stayed away)"
        # Over NCCL a combine itself waits on the device only: the barrier behind it finds out.
        assert phase in error.phase or "barrier" in error.phase, f"{error} (in {phase})"
        return
    raise AssertionError(f"rank {absent} stayed away from {phase}, and nothing was raised")


# ---------------------------------------------------------------- running checks


def together(ranks: Ranks, call: Callable[[], str | None]) -> str | None:
    """What `call` returns here, once it has returned on every rank. Collective.

    Raises:
        Skipped: it was on every rank.
        AssertionError: on every rank, if it raised on any; it names the ranks and quotes the likeliest cause.
    """
    said, error, skipped = None, "", None
    try:
        said = call()
    except Skipped as reason:
        skipped = reason
    except Exception as problem:
        error = ("1" if isinstance(problem, PeerTimeoutError) else "0") + traceback.format_exc()
    errors = {rank: text for rank, text in enumerate(ranks.gather(error)) if text}
    if errors:
        first = min(errors, key=lambda rank: (errors[rank][0], rank))  # who missed a peer is not the cause
        raise AssertionError(f"on ranks {list(errors)}; rank {first}:\n{errors[first][1:]}")
    if skipped is not None:
        raise skipped
    return said


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """End this process, after saying where it stands, if it is still in here after `limit_s`."""
    ended = threading.Timer(limit_s, _end, (limit_s,))
    ended.daemon = True
    ended.start()
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True)  # where Python itself does not move any more
    try:
        yield
    finally:
        ended.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end(limit_s: float) -> None:
    said = [f"still there after {limit_s:g} s"]
    for frame in sys._current_frames().values():
        said += ["thread:", *traceback.format_stack(frame)]
    print("\n".join(said), file=sys.stderr, flush=True)
    os._exit(1)


class Report:
    """Runs checks, says on the first rank how each went, and remembers which failed.

    Attributes:
        failed: names of checks.
    """

    def __init__(self, ranks: Ranks, limit_s: float) -> None:
        self._ranks, self._limit_s = ranks, limit_s
        self.failed: list[str] = []
        self._start = time.monotonic()

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Collective. A process that takes longer than the limit says where it stands and ends."""
        start = time.monotonic()
        with within(self._limit_s):
            try:
                word, said = "ok", together(self._ranks, check)
            except Skipped as reason:
                word, said = "skip", str(reason)
            except AssertionError as error:
                word, said = "FAILED", str(error)
                self.failed.append(name)
            seconds = max(self._ranks.gather(time.monotonic() - start))
        self._print(f"{word:6} {name:32} {seconds:6.1f} s  {said}")

    def finish(self) -> int:
        """Prints the last line; the exit status."""
        seconds = time.monotonic() - self._start
        self._print(f"{'FAILED: ' + '; '.join(self.failed) if self.failed else 'PASS'} in {seconds:.0f} s")
        return 1 if self.failed else 0

    def _print(self, text: str) -> None:
        if self._ranks.rank == 0:
            print(text, flush=True)


def all_checks(ranks: Ranks, options: argparse.Namespace) -> dict[str, Callable[[], str]]:
    """By name, in order."""
    checks: dict[str, Callable[[], str]] = {}
    checks["compile"] = lambda: check_compiled(ranks, options.cases, options.tuning, list(chosen), options.tokens)
    for layout, expand in _LAYOUTS.items():
        checks[f"cases, {layout}"] = functools.partial(check_cases, ranks, expand, options.cases)
    for layout, expand in _LAYOUTS.items():
        checks[f"rounds, {layout}"] = functools.partial(check_rounds, ranks, expand, options.rounds)
    for layout, expand in _LAYOUTS.items():
        checks[f"handles alive, {layout}"] = functools.partial(check_alive, ranks, expand)
    checks["two buffers"] = functools.partial(check_two_buffers, ranks)
    checks["gradients"] = functools.partial(check_gradients, ranks, 6)
    for payload in ("bf16", "fp8"):
        shape = large_shape(ranks.num_ranks, options.tokens)
        checks[f"V3 shape, {payload}"] = functools.partial(check_large, ranks, shape, payload)
    checks["queued without sync"] = functools.partial(check_queued, ranks, min(options.rounds, 200))
    checks["streams and events"] = functools.partial(check_streams, ranks, min(options.rounds, 60))
    for layout, expand in _LAYOUTS.items():
        checks[f"graph, {layout}"] = functools.partial(check_graph, ranks, expand, min(options.rounds, 200))
    for phase in ("dispatch", "combine"):
        checks[f"absent rank, {phase}"] = functools.partial(check_absent, ranks, phase, options.absent)
    wanted, unwanted = options.only or [""], options.skip or []
    chosen = {
        name: check
        for name, check in checks.items()
        if any(part in name for part in wanted) and not any(part in name for part in unwanted)
    }
    return chosen


def _places(backend: str | None) -> list[Place]:
    """Where to run: the backend named, by default the kernels where there are GPUs; and the collective backend."""
    local, cpu = int(os.environ.get("LOCAL_RANK", "0")), torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = there >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.device("cuda", local % there) if there and (own or os.environ.get(_OVERLAP) == "1") else None
    collective = Place("collective", cuda if cuda is not None and own else cpu)
    if cuda is not None:
        torch.cuda.set_device(cuda)
    if backend == "collective" or (backend is None and cuda is None):
        return [collective]
    if cuda is None:
        raise ValueError(f"--backend nvlink: {there} CUDA devices for this host's ranks, a device each is needed")
    return [Place("nvlink", cuda), collective]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m tile_ep.selftest_processes", description=str(__doc__).split("\n\n")[0]
    )
    parser.add_argument("--backend", choices=("nvlink", "collective"), help="by default nvlink where there are GPUs")
    parser.add_argument("--cases", type=int, default=24, help="of each layout, 0 for all")
    parser.add_argument("--rounds", type=int, default=300, help="back-to-back rounds of each layout")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of a rank, where two backends are compared at V3 shape"
    )
    parser.add_argument("--only", action="append", help="run just the checks whose name contains this; repeatable")
    parser.add_argument("--skip", action="append", help="leave out the checks whose name contains this; repeatable")
    parser.add_argument("--tuning", choices=TUNINGS, default="pull", help="variant of the kernels")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a buffer waits for a peer")
    parser.add_argument("--absent", type=float, default=6.0, help="seconds that a buffer waits for the absent rank")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that one check may take")
    return parser


def _use_loopback_interface() -> None:
    """Keep gloo off the host name, which need not resolve: all ranks are on this host."""
    here = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if here is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", here)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if "RANK" not in os.environ:
        print(
            "start it under torchrun, a process for each rank: torchrun --nproc-per-node N -m tile_ep.selftest_processes"
        )
        return 2
    if not __debug__:
        print("run it without -O: the checks are assertions")
        return 2
    os.environ.pop("TILE_EP_BACKEND", None)  # every buffer here says which backend it wants
    try:
        places = _places(options.backend)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    use_tuning(options.tuning)
    _use_loopback_interface()
    with within(options.limit):
        ranks = _start(places, options.timeout)
    report = Report(ranks, options.limit)
    for name, check in all_checks(ranks, options).items():
        report.run(name, check)
    status = report.finish()
    with within(options.limit):
        ranks.meet()
        dist.destroy_process_group()
    return status


def _start(places: list[Place], timeout_s: float) -> Ranks:
    """Join the others. Collective."""
    nccl = places[-1].device.type == "cuda"
    dist.init_process_group("nccl" if nccl else "gloo", timeout=timedelta(seconds=3 * timeout_s + 120))
    ranks = Ranks(places, timeout_s)
    ranks.meet()
    if ranks.rank == 0:
        where = torch.cuda.get_device_name() if places[0].device.type == "cuda" else "CPUs"
        group = "NCCL" if nccl else "gloo"
        print(
            f"{ranks.num_ranks} processes on {where}, {group}, torch {torch.__version__}: {_list(places)}", flush=True
        )
    return ranks


if __name__ == "__main__":
    sys.exit(main())
