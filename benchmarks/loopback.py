"""Time dispatch and combine with all ranks on one GPU, against what a copy of as many bytes takes in the same run.

    python benchmarks/loopback.py --json loopback.json

A call is timed from a gate that opens for all ranks at once to the end of the last rank. The host has enqueued every
launch before the gate opens. Bytes are those of rows alone: each token's row read once and each received row written
once (dispatch), each received row read once and each token's row written once (combine); combine with staging moves each
received row once more in each direction. Outputs are compared before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tile_ep import Buffer
from tile_ep.worlds.loopback import loopback

GATE_CYCLES = 30_000_000  # longer than the host takes to enqueue all ranks


@dataclass(frozen=True)
class Figure:
    """One timing.

    Attributes:
        median_ms, least_ms, most_ms: of whole calls, slowest rank.
        num_bytes: rows read and rows written.
        share: of the copy ceiling of this run.
    """

    name: str
    num_sms: int
    median_ms: float
    least_ms: float
    most_ms: float
    num_bytes: int
    share: float

    def __str__(self) -> str:
        return (
            f"{self.name:26} {self.num_sms:3} SMs a rank  {self.median_ms:7.3f} ms [{self.least_ms:.3f}, {self.most_ms:.3f}]"
            f"  {self.num_bytes / self.median_ms / 1e9:6.3f} TB/s  {100 * self.share:5.1f} % of a copy"
        )


class Bench:
    """All ranks' buffers and inputs of one shape."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        ranks, tokens, hidden = options.ranks, options.tokens, options.hidden
        self.buffers = loopback(
            ranks,
            "cuda",
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=options.topk,
            num_experts=options.experts,
            pipeline_depth=0,
            expand_factor=1.2,
        )
        generator = torch.Generator("cuda").manual_seed(options.seed)
        self.x = [torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16() for _ in range(ranks)]
        scores = [torch.rand(tokens, options.experts, device="cuda", generator=generator) for _ in range(ranks)]
        self.topk_idx = [score.topk(options.topk, dim=1).indices for score in scores]
        owner = [idx // (options.experts // ranks) for idx in self.topk_idx]
        self.destinations = [sum((o == d).any(1).int() for d in range(ranks)) for o in owner]
        self.num_rows = int(sum(int(number.sum()) for number in self.destinations))  # type: ignore[call-overload]
        self.row_bytes = 2 * hidden
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.ceiling = self._copy_ceiling()

    @property
    def one_pass(self) -> int:
        """Bytes of every token's row and of every received row."""
        return (self.options.ranks * self.options.tokens + self.num_rows) * self.row_bytes

    def _copy_ceiling(self) -> float:
        """Bytes per ms, read and written, of a copy that moves as much as a dispatch."""
        source = torch.randn(self.one_pass // 4, device="cuda").bfloat16()
        target = torch.empty_like(source)
        times = []
        for _ in range(self.options.repeat):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return 2 * source.numel() * 2 / statistics.median(times)

    def time(
        self, name: str, num_sms: int, num_bytes: int, call: Callable[[int, Buffer], Any]
    ) -> tuple[Figure, list[Any]]:
        """Time `call(rank, buffer)` on all ranks at once; the figure and the last results."""
        times: list[float] = []
        results: list[Any] = []
        for _ in range(self.options.repeat + 3):
            results = []  # frees the slots of the last round
            torch.cuda.synchronize()
            torch.cuda._sleep(GATE_CYCLES)
            gate = torch.cuda.Event(enable_timing=True)
            gate.record()
            ends = []
            for rank, (buffer, stream) in enumerate(zip(self.buffers, self.streams, strict=True)):
                with torch.cuda.stream(stream):
                    stream.wait_event(gate)
                    results.append(call(rank, buffer))
                    ends.append(torch.cuda.Event(enable_timing=True))
                    ends[-1].record()
            torch.cuda.synchronize()
            times.append(max(gate.elapsed_time(end) for end in ends))
        times = times[3:]
        median = statistics.median(times)
        share = num_bytes / median / self.ceiling
        return Figure(name, num_sms, median, min(times), max(times), num_bytes, share), results

    def run(self, num_sms: int) -> list[Figure]:
        """All figures at `num_sms` blocks a rank."""
        figures = []
        options: dict[str, Any] = {"num_sms": num_sms}
        figure, sent = self.time(
            "dispatch",
            num_sms,
            self.one_pass,
            lambda rank, buffer: buffer.dispatch(self.x[rank], self.topk_idx[rank], do_cpu_sync=False, **options),
        )
        figures.append(figure)
        handles = [result[3] for result in sent]
        self._check_rows(sent)
        del sent
        figure, again = self.time(
            "dispatch, cached",
            num_sms,
            self.one_pass,
            lambda rank, buffer: buffer.dispatch(self.x[rank], handle=handles[rank], **options),
        )
        figures.append(figure)
        rows = []
        for handle, buffer, result in zip(handles, self.buffers, again, strict=True):
            rows.append(buffer.combine_input(handle))
            rows[-1].copy_(result[0])
        outside = [result[0].clone() for result in again]
        del again, result  # the last one, too, keeps its slot

        def zero_copy(rank: int, buffer: Buffer) -> Any:
            return buffer.combine(buffer.combine_input(handles[rank]), handles[rank], **options)

        # `combine_input` without a dispatch since the last combine waits for all ranks: keep that out of the timing.
        for buffer in self.buffers:
            backend = buffer._backend
            backend.combine_input = _without_waiting(backend)  # type: ignore[method-assign,union-attr]
        figure, back = self.time("combine, zero-copy", num_sms, self.one_pass, zero_copy)
        self._check_sums(back)
        figures.append(figure)
        figure, back = self.time(
            "combine, staged",
            num_sms,
            self.one_pass + 2 * self.num_rows * self.row_bytes,
            lambda rank, buffer: buffer.combine(outside[rank], handles[rank], **options),
        )
        self._check_sums(back)
        figures.append(figure)
        return figures + self._expanded(options)

    def _expanded(self, options: dict[str, Any]) -> list[Figure]:
        """The expanded layout: a row per selection; what crosses on the way back is one row per token and rank."""
        num_sms = options["num_sms"]
        selections = self.options.ranks * self.options.tokens * self.options.topk
        own = self.options.ranks * self.options.tokens
        figure, sent = self.time(
            "dispatch, expanded",
            num_sms,
            (own + selections) * self.row_bytes,
            lambda rank, buffer: buffer.dispatch(
                self.x[rank], self.topk_idx[rank], do_cpu_sync=False, do_expand=True, **options
            ),
        )
        figures = [figure]
        handles = [result[3] for result in sent]
        rows = [result[0] for result in sent]
        figure, back = self.time(
            "combine, expanded",
            num_sms,
            (selections + 2 * self.num_rows + own) * self.row_bytes,
            lambda rank, buffer: buffer.combine(rows[rank], handles[rank], **options),
        )
        for rank, (out, _, _) in enumerate(back):
            # Each rank's part is a small multiple of the token, rounded; so is the sum: bf16 rounding apart it is K times it.
            error = (out.float() - self.options.topk * self.x[rank].float()).norm() / out.float().norm()
            assert error < 5e-3, f"rank {rank}: expanded sums are off by {error}"
        return [*figures, figure]

    def _check_rows(self, sent: list[Any]) -> None:
        for rank, (recv_x, recv_idx, _, handle, _) in enumerate(sent):
            number = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            source = handle.recv_src_metadata[:number, 0].long()
            x = torch.cat(self.x)[source // self.options.tokens * self.options.tokens + source % self.options.tokens]
            assert torch.equal(recv_x[:number], x), f"rank {rank}: rows differ"
            assert (recv_idx[number:] == -1).all() and (recv_idx[:number] >= 0).any(1).all(), f"rank {rank}: indices"

    def _check_sums(self, back: list[Any]) -> None:
        for rank, (out, _, _) in enumerate(back):
            total = torch.zeros_like(self.x[rank], dtype=torch.float32)
            for peer in range(self.options.ranks):
                total += torch.where((self.destinations[rank] > peer).unsqueeze(1), self.x[rank].float(), 0)
            assert torch.equal(out, total.bfloat16()), f"rank {rank}: sums differ"


def _without_waiting(backend: Any) -> Callable[..., torch.Tensor]:
    original = type(backend).combine_input

    def combine_input(handle: Any, dtype: torch.dtype) -> torch.Tensor:
        backend._read_since_combine = True
        return original(backend, handle, dtype)  # type: ignore[no-any-return]

    return combine_input


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--hidden", type=int, default=7168, help="bf16 elements")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=int, nargs="+", default=[16, 8], help="blocks a rank")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {options.ranks} ranks x {options.tokens} tokens x "
        f"{options.hidden} bf16, top-{options.topk} of {options.experts}; {bench.num_rows} rows received; "
        f"copy {bench.ceiling / 1e9:.2f} TB/s; median of {options.repeat}"
    )
    figures = [figure for num_sms in options.sms for figure in bench.run(num_sms)]
    for figure in figures:
        print(figure)
    if options.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": bench.ceiling / 1e9}
        shape = {name: getattr(options, name) for name in ("ranks", "tokens", "hidden", "topk", "experts", "repeat")}
        facts |= {"rows": bench.num_rows, **shape}
        options.json.write_text(json.dumps({**facts, "figures": [asdict(figure) for figure in figures]}, indent=1))


if __name__ == "__main__":
    main()
