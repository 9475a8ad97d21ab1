"""`python -m tile_ep.selftest --gpu`: everything the kernels promise, on one GPU, against the reference.

All ranks share the GPU (`tile_ep.loopback(..., device="cuda")`), so one is enough. Every check draws fresh inputs, and
compares with `torch.equal`. Prints a line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch

from tile_ep import reference
from tile_ep.buffer import Buffer
from tile_ep.errors import PeerTimeoutError, StaleHandleError
from tile_ep.kernels.tuning import HOPPER
from tile_ep.selftest_layer import check_layer
from tile_ep.worlds.loopback import Loopback, loopback

_WORKERS = 12  # processes that compile and run cases side by side


def timed(check: Callable[[], str]) -> tuple[bool, str, float]:
    """Whether a check passed, what it says or why not, and seconds."""
    start = time.monotonic()
    try:
        return True, check(), time.monotonic() - start
    except Exception:
        return False, traceback.format_exc(), time.monotonic() - start


class Checks:
    """Says how each check went, and remembers whether all passed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._start = time.monotonic()

    def report(self, name: str, passed: bool, said: str, seconds: float) -> None:
        """The outcome of one check."""
        if not passed:
            self.failed.append(name)
        print(f"{'ok' if passed else 'FAILED':6} {name:28} {seconds:6.1f} s  {said}", flush=True)

    def summary(self) -> int:
        """Prints the last line; the exit status."""
        seconds = time.monotonic() - self._start
        print(f"{'FAILED: ' + ', '.join(self.failed) if self.failed else 'PASS'} in {seconds:.0f} s")
        return 1 if self.failed else 0


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tile_ep.selftest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu", action="store_true", help="run on the current CUDA device (needed)")
    parser.add_argument("--rounds", type=int, default=3000, help="back-to-back rounds of the long run")
    parser.add_argument("--cases", type=int, default=80, help="how many of the shared list of cases, 0 for all")
    parser.add_argument("--only", help="run just the checks whose name contains this")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave out compute-sanitizer")
    options = parser.parse_args(arguments)
    if not options.gpu:
        parser.error("say --gpu; on CPUs, `make test` runs the same kernels in the simulator")
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    checks = Checks()
    rounds = options.rounds
    # Long ones have the GPU to themselves. Before that they run once each beside the others, which compiles their kernels.
    alone: dict[str, Callable[..., str]] = {
        "8 ranks, V3 shape": functools.partial(check_rounds, 20, (8, 64, 7168, 8, 256), 16),
        "2 ranks, long run": functools.partial(check_rounds, rounds, (2, 40, 512, 4, 8), 4),
        "2 ranks, blocks count shares": functools.partial(check_rounds, rounds // 3, (2, 40, 512, 4, 8), 4, 0),
        "4 ranks, long run": functools.partial(check_rounds, rounds // 3, (4, 24, 1000, 6, 30), 5),
        "8 ranks, long run": functools.partial(check_rounds, rounds // 3, (8, 16, 256, 8, 64), 16),
        "rows of models": functools.partial(check_models, 10),
        "queued without sync": functools.partial(check_queued, 200),
        "streams and events": functools.partial(check_streams, 50),
        "graph": functools.partial(check_graph, 100),
        "host cost of a launch": functools.partial(check_launch_cost, 500),
    }
    beside: dict[str, Callable[..., str]] = {
        "cases": functools.partial(check_cases, options.cases),
        "handles and slots": check_handles_and_slots,
        "absent rank": check_absent_rank,
        "bad indices": check_bad_indices,
        "one process a rank": check_processes,
        "expert layer": check_layer,
    }
    if not options.no_sanitizer:
        for tool in ("memcheck", "racecheck"):
            beside[f"compute-sanitizer {tool}"] = functools.partial(check_sanitizer, tool)
    alone, beside = (
        {name: check for name, check in some.items() if options.only is None or options.only in name}
        for some in (alone, beside)
    )
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as processes:
        for check in alone.values():
            processes.submit(check.func, 1, *check.args[1:])  # type: ignore[attr-defined]
        pending = {processes.submit(timed, check): name for name, check in beside.items()}
        for done in as_completed(pending):
            checks.report(pending[done], *done.result())
    for name, check in alone.items():
        checks.report(name, *timed(check))
    return checks.summary()


# ---------------------------------------------------------------- the shared list of cases


def run_case(identity: str) -> str | None:
    """One case of the shared list on the GPU; what is wrong, or `None`."""
    from tile_ep import cases

    case = next(case for case in cases.GRID if str(case) == identity)
    try:
        inputs = cases.make_inputs(case)
        tuning = case.tuned(HOPPER)
        with loopback(case.num_ranks, "cuda", timeout_s=60.0, tuning=tuning, **case.buffer_arguments()) as ranks:
            outputs = ranks.run(lambda rank, buffer: cases.run_rank(buffer, case, inputs[rank]))
        cases.assert_same(case, cases.run_reference(case), [_to_cpu(output) for output in outputs])
    except Exception:
        return traceback.format_exc()
    return None


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: _to_cpu(part) for name, part in value.items()}
    return type(value)(map(_to_cpu, value)) if isinstance(value, tuple | list) else value


def check_cases(number: int) -> str:
    """Cases of the shared list, in several processes: most of the time goes into compiling."""
    from tile_ep import cases

    every = [str(case) for case in cases.GRID if case.num_ranks <= 8]
    wanted = every[:: max(1, len(every) // number)] if number else every
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_WORKERS, mp_context=context) as pool:
        futures = {pool.submit(run_case, identity): identity for identity in wanted}
        wrong = {futures[future]: error for future in as_completed(futures) if (error := future.result())}
    if wrong:
        raise AssertionError("\n\n".join(f"{identity}\n{error}" for identity, error in wrong.items()))
    return f"{len(wanted)} of {len(every)} cases equal the reference"


# ---------------------------------------------------------------- runs of our own


class Inputs:
    """Fresh inputs of all ranks, on the CPU, with what the reference makes of them."""

    def __init__(self, shape: tuple[int, int, int, int, int], seed: int) -> None:
        num_ranks, most, hidden, num_topk, num_experts = shape
        random = torch.Generator().manual_seed(seed)
        tokens = [int(torch.randint(0, most + 1, (), generator=random)) for _ in range(num_ranks)]
        skew = torch.rand(num_experts, generator=random) * (seed % 3)
        self.x = [torch.randn(t, hidden, generator=random).bfloat16() for t in tokens]
        self.topk_idx = [
            (torch.rand(t, num_experts, generator=random) + skew).topk(num_topk, 1).indices for t in tokens
        ]
        for idx in self.topk_idx:
            idx[torch.rand(idx.shape, generator=random) < 0.1] = -1
        self.weights = [torch.rand(t, num_topk, generator=random) for t in tokens]
        self.dispatched = reference.dispatch(
            self.x, self.topk_idx, self.weights, num_experts=num_experts, num_max_tokens_per_rank=most
        )
        handles = [output.handle for output in self.dispatched]
        received: list[Any] = [output.recv_x for output in self.dispatched]
        weights: list[Any] = [output.recv_topk_weights for output in self.dispatched]
        self.combined = reference.combine(received, handles, weights)

    def exchange(self, rank: int, buffer: Buffer, num_sms: int, **options: Any) -> tuple[Any, ...]:
        """Dispatch and combine on the GPU, the rows sent back as they came."""
        x, idx, weights = (part[rank].cuda() for part in (self.x, self.topk_idx, self.weights))
        recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(x, idx, weights, num_sms=num_sms, **options)
        assert isinstance(recv_x, torch.Tensor)
        y, y_weights, _ = buffer.combine(recv_x, handle, recv_weights, num_sms=num_sms)
        return recv_x, recv_idx, recv_weights, y, y_weights

    def compare(self, rank: int, outputs: tuple[Any, ...]) -> None:
        """Raise unless these are the reference's bytes."""
        want, back = self.dispatched[rank], self.combined[rank]
        expected: tuple[Any, ...] = (
            want.recv_x,
            want.recv_topk_idx,
            want.recv_topk_weights,
            back.combined_x,
            back.combined_topk_weights,
        )
        names = "recv_x", "recv_topk_idx", "recv_topk_weights", "combined_x", "combined_topk_weights"
        rows = want.handle.num_recv_tokens
        for position, (name, a, b) in enumerate(zip(names, expected, outputs, strict=True)):
            got = (b[:rows] if position < 3 else b).cpu()
            assert torch.equal(a, got), f"rank {rank}: {name} differs"


def check_rounds(rounds: int, shape: tuple[int, int, int, int, int], num_sms: int, few: int = HOPPER.few) -> str:
    """Back-to-back rounds: fresh inputs, poisoned slots and outputs, everything compared. `few`: as for `Tuning`."""
    with _ranks(shape, tuning=replace(HOPPER, few=few)) as ranks:
        distinct = [Inputs(shape, seed) for seed in range(min(rounds, 64))]
        order = torch.randint(0, len(distinct), (rounds,), generator=torch.Generator().manual_seed(rounds)).tolist()

        def many(rank: int, buffer: Buffer) -> None:
            for number in order:
                _poison()
                distinct[number].compare(rank, distinct[number].exchange(rank, buffer, num_sms))

        ranks.run(many)
    return f"{rounds} rounds of {len(distinct)} inputs"


def check_models(rounds: int) -> str:
    """Rows as wide as those of models: whole chunks of a block's memory, and chunks that differ."""
    hiddens = 2048, 2880, 3072, 5120, 16384
    for hidden in hiddens:
        check_rounds(rounds, (4, 24, hidden, 8, 64), 16)
    return f"{rounds} rounds each of hidden {', '.join(map(str, hiddens))}"


def check_queued(rounds: int) -> str:
    """Hundreds of collectives queued with no host synchronisation, checked afterwards."""
    shape = 4, 32, 512, 4, 16
    with _ranks(shape) as ranks:
        distinct = [Inputs(shape, seed) for seed in range(20)]

        def many(rank: int, buffer: Buffer) -> None:
            kept = [
                tuple(part.clone() for part in distinct[n % 20].exchange(rank, buffer, 4, do_cpu_sync=False))
                for n in range(rounds)
            ]
            for n, outputs in enumerate(kept):
                distinct[n % 20].compare(rank, outputs)
                tail = outputs[1][distinct[n % 20].dispatched[rank].handle.num_recv_tokens :]
                assert (tail == -1).all(), "tail of recv_topk_idx"

        ranks.run(many)
    return f"{rounds} rounds"


def check_streams(rounds: int) -> str:
    """Collectives that follow an event and leave the compute stream to the caller."""
    shape = 2, 32, 2048, 4, 16
    with _ranks(shape) as ranks:
        distinct = [Inputs(shape, seed) for seed in range(10)]

        def overlapped(rank: int, buffer: Buffer) -> None:
            options: dict[str, Any] = {"async_with_compute_stream": True, "allocate_on_comm_stream": True, "num_sms": 4}
            for number in range(rounds):
                inputs = distinct[number % 10]
                x, idx, weights = (part[rank].cuda() for part in (inputs.x, inputs.topk_idx, inputs.weights))
                ready = torch.cuda.current_stream().record_event()
                torch.cuda._sleep(200_000)  # what the collective must not wait for
                recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                    x, idx, weights, previous_event=ready, do_cpu_sync=number % 2 == 0, **options
                )
                del x, idx, weights  # the event keeps what is still read
                with event:
                    _poison()
                assert isinstance(recv_x, torch.Tensor)
                y, y_weights, event = buffer.combine(recv_x, handle, recv_weights, **options)
                event.current_stream_wait()
                inputs.compare(rank, (recv_x, recv_idx, recv_weights, y, y_weights))

        ranks.run(overlapped)
    return f"{rounds} rounds"


def check_launch_cost(number: int) -> str:
    """What a launch costs the host, once the kernel is compiled. Said, not judged."""
    from tile_ep.kernels.launcher import compiled_kernels

    said = []
    with _ranks((8, 64, 7168, 8, 256)) as ranks:
        inputs = Inputs((8, 64, 7168, 8, 256), 0)
        ranks.run(lambda rank, buffer: inputs.compare(rank, inputs.exchange(rank, buffer, 16)))
    for kernel in [kernel for kernel in compiled_kernels() if kernel.spec.num_ranks == 8][:2]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            kernel.launch_on_scratch()
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        said.append(f"{type(kernel.spec).__name__.removesuffix('Spec').lower()} {1e6 * took / number:.1f} us")
    return ", ".join(said)


def check_handles_and_slots() -> str:
    """Several results and handles alive at once: none is overwritten; a stale combine input is refused."""
    shape = (2, 24, 256, 3, 8)
    with _ranks(shape, num_slots=3) as ranks:
        distinct = [Inputs(shape, seed) for seed in range(6)]

        def several(rank: int, buffer: Buffer) -> None:
            results: list[Any] = []
            for inputs in distinct:
                x, idx, weights = (part[rank].cuda() for part in (inputs.x, inputs.topk_idx, inputs.weights))
                results.append(buffer.dispatch(x, idx, weights, num_sms=4))
            for inputs, (recv_x, recv_idx, recv_weights, handle, _) in reversed(
                list(zip(distinct, results, strict=True))
            ):
                rows = buffer.combine_input(handle)
                rows.copy_(recv_x)
                back = buffer.combine(rows, handle, recv_weights, num_sms=4)
                inputs.compare(rank, (recv_x, recv_idx, recv_weights, back[0], back[1]))
                again = buffer.dispatch(inputs.x[rank].cuda(), handle=handle, num_sms=4)
                assert torch.equal(again[0], recv_x) and torch.equal(again[1], recv_idx), "cached dispatch"  # type: ignore[arg-type]
            first, second = results[0][3], results[1][3]
            old = buffer.combine_input(first)
            buffer.combine_input(second)
            try:
                buffer.combine(old, first)
            except StaleHandleError:
                return
            raise AssertionError("a stale combine input was accepted")

        ranks.run(several)
    return f"{len(distinct)} dispatches alive in 3 slots"


def check_graph(replays: int) -> str:
    """Dispatch, expert and combine captured once, replayed with changing inputs."""
    shape = 4, 32, 512, 4, 16
    num_ranks, most, hidden, num_topk, num_experts = shape
    with _ranks(shape) as ranks:
        distinct = [Inputs((num_ranks, most, hidden, num_topk, num_experts), seed) for seed in range(replays)]

        def captured(rank: int, buffer: Buffer) -> None:
            x = torch.zeros(most, hidden, dtype=torch.bfloat16, device="cuda")
            idx = torch.full((most, num_topk), -1, dtype=torch.int64, device="cuda")

            def step() -> torch.Tensor:
                recv_x, _, _, handle, _ = buffer.dispatch(x, idx, do_cpu_sync=False, num_sms=4)
                assert isinstance(recv_x, torch.Tensor)
                return buffer.combine(recv_x * 2, handle, num_sms=4)[0]

            for _ in range(3):
                step()
            torch.cuda.synchronize()
            buffer.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                out = step()
            for inputs in distinct:
                tokens = inputs.x[rank].shape[0]
                buffer.barrier()
                x.zero_()[:tokens] = inputs.x[rank].cuda()
                idx.fill_(-1)[:tokens] = inputs.topk_idx[rank].cuda()
                torch.cuda.current_stream().synchronize()
                buffer.barrier()
                graph.replay()
                torch.cuda.current_stream().synchronize()
                # Twice each row: exact in bf16, and so is the sum of twice the terms, twice the sum.
                expected = (inputs.combined[rank].combined_x.float() * 2).bfloat16()
                assert torch.equal(out[:tokens].cpu(), expected), "replayed output differs"
                assert not out[tokens:].any(), "padding tokens select nothing"

        ranks.run(captured)
    return f"{replays} replays"


def check_absent_rank() -> str:
    """A rank that never comes: the others raise and name it, CUDA goes on, and after `reset` so does the buffer."""
    shape = (4, 16, 256, 2, 8)
    said: list[str] = []
    with _ranks(shape, timeout_s=8.0) as ranks:
        inputs = Inputs(shape, 1)
        ranks.run(lambda rank, buffer: inputs.compare(rank, inputs.exchange(rank, buffer, 4)))

        def without_two(rank: int, buffer: Buffer) -> None:
            if rank == 2:
                return
            try:
                inputs.exchange(rank, buffer, 4)
            except PeerTimeoutError as error:
                assert error.peers == [2] and error.rank == rank and "dispatch" in error.phase, str(error)
                said.append(str(error))
                return
            raise AssertionError("no timeout")

        ranks.run(without_two)
        assert torch.equal(torch.arange(4, device="cuda").cpu(), torch.arange(4)), "CUDA does not go on"
        ranks.run(lambda rank, buffer: buffer.reset())
        ranks.run(lambda rank, buffer: inputs.compare(rank, inputs.exchange(rank, buffer, 4)))

        for rank in (0, 1, 3):  # the combine is queued behind a dispatch that will give up
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs.exchange(rank, ranks[rank], 4, do_cpu_sync=False)
        torch.cuda.synchronize()
        for rank in (0, 1, 3):
            try:
                ranks[rank].barrier()
            except PeerTimeoutError:
                continue
            raise AssertionError("no timeout of what was queued")
        ranks.run(lambda rank, buffer: buffer.reset())
        ranks.run(lambda rank, buffer: inputs.compare(rank, inputs.exchange(rank, buffer, 4)))
    return said[0]


def check_bad_indices() -> str:
    """Entries out of range select nothing, are counted, and are reported at the next host synchronisation."""
    from tile_ep.errors import RoutingError

    with _ranks((2, 8, 64, 2, 4)) as ranks:

        def bad(rank: int, buffer: Buffer) -> str:
            x = torch.randn(8, 64, device="cuda").bfloat16()
            idx = torch.zeros(8, 2, dtype=torch.int64, device="cuda")
            idx[0, 0], idx[1, 0], idx[2, 1] = 4, -7, 1 << 40
            try:
                buffer.dispatch(x, idx, num_sms=2)
            except RoutingError as error:
                assert error.num_bad == 3, str(error)
                good = buffer.dispatch(x, idx.clamp(0, 3), num_sms=2)
                assert good[3].num_recv_tokens == (16 if rank == 0 else 4), good[3].num_recv_tokens
                return str(error)
            raise AssertionError("no RoutingError")

        return ranks.run(bad)[0]


def process_rank(rank: int, store: str) -> None:
    """One of two processes that share the GPU, over torch symmetric memory."""
    import torch.distributed as dist

    shape = 2, 24, 512, 3, 8
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    with Buffer(None, *shape[1:], backend="nvlink", device="cuda:0", timeout_s=60.0) as buffer:
        assert buffer.backend_name == "nvlink"
        for seed in range(20):
            inputs = Inputs(shape, seed)
            inputs.compare(rank, inputs.exchange(rank, buffer, 8))
        buffer.barrier()
    dist.destroy_process_group()


def check_processes() -> str:
    """Two processes, memory from torch symmetric memory; they take turns on the GPU."""
    import os
    import tempfile

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process_rank, (f"{folder}/store",), nprocs=2)  # type: ignore[no-untyped-call]
    return "2 processes, 20 rounds"


def check_sanitizer(tool: str) -> str:
    """A small exchange under compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "not installed, not run"
    code = (
        "from tile_ep.selftest import check_rounds;"
        "shapes = (2, 6, 200, 3, 5), (2, 5, 7, 3, 5);"
        "print(*(check_rounds(2, shape, 2, few) for shape in shapes for few in (0, 1024)))"
    )
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0:
        raise AssertionError("\n".join(lines[-40:]))
    return next(line for line in reversed(lines) if "SUMMARY" in line)


def _ranks(shape: tuple[int, int, int, int, int], **options: Any) -> Loopback:
    num_ranks, most, hidden, num_topk, num_experts = shape
    return loopback(
        num_ranks,
        "cuda",
        num_max_tokens_per_rank=most,
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        **{"timeout_s": 30.0, **options},
    )


def _poison() -> None:
    """Fill what the caching allocator hands out next, so that unwritten outputs are seen."""
    spans = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xA5) for size in (1 << 12, 1 << 16, 1 << 20)]
    del spans


if __name__ == "__main__":
    sys.exit(main())
