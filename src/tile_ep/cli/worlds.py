"""Where the ranks of a replay live: a process each, or all in this one."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tile_ep.buffer import Buffer
from tile_ep.cli.rank import RankResult, RankTask, run_rank
from tile_ep.errors import BackendUnavailableError, PeerTimeoutError, TileEPError
from tile_ep.trace import Trace

Outcome = tuple[RankResult, torch.Tensor]
Tick = Callable[[], None]

_START_S = 120.0  # for a worker to import PyTorch on a busy machine
_GRACE_S = 2.0  # for the others to say what they saw once one has failed


class BackendName(str, Enum):
    """What moves the rows."""

    collective = "collective"
    sim = "sim"
    cuda_loopback = "cuda-loopback"


class WorkerError(TileEPError, RuntimeError):
    """A rank of a replay failed.

    Attributes:
        rank: the first one that did.
        details: its traceback, empty where it left none.
    """

    def __init__(self, rank: int, said: str, details: str = "") -> None:
        self.rank, self.details = rank, details
        super().__init__(f"rank {rank} {said}")


def run_ranks(backend: BackendName, shards: list[Trace], task: RankTask, tick: Tick) -> list[Outcome]:
    """`run_rank` on every rank of a new world; results by rank.

    Args:
        shards: each rank's tokens.
        tick: called from any thread, one at a time or not.

    Raises:
        WorkerError: a process failed, died or fell silent; all others have been ended.
        TileEPError: an exchange in this process failed.
    """
    if backend is BackendName.collective:
        return _in_processes(shards, task, tick)
    return _in_this_process(backend, shards, task, tick)


# ---------------------------------------------------------------- one process


def _in_this_process(backend: BackendName, shards: list[Trace], task: RankTask, tick: Tick) -> list[Outcome]:
    if backend is BackendName.cuda_loopback and not torch.cuda.is_available():
        raise BackendUnavailableError(
            "--backend cuda-loopback: PyTorch sees no CUDA device here. Use --backend sim, which runs the same kernels"
        )
    from tile_ep.worlds.loopback import loopback

    with loopback(
        task.num_ranks,
        device="sim" if backend is BackendName.sim else "cuda",
        num_max_tokens_per_rank=task.num_max_tokens_per_rank,
        hidden=task.hidden,
        num_topk=task.num_topk,
        num_experts=task.num_experts,
        dtype=task.payload.row_dtype,
        expand_factor=task.expand_factor,
        timeout_s=task.timeout_s,
    ) as ranks:
        return ranks.run(lambda rank, buffer: run_rank(buffer, shards[rank], task, tick))


# ---------------------------------------------------------------- a process each


def _in_processes(shards: list[Trace], task: RankTask, tick: Tick) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tile-ep-") as name:
        folder = Path(name)
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank, shard in enumerate(shards):
                shard.save(_shard_path(folder, rank))
                reader, writer = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_worker, args=(rank, folder, task, writer), name=f"rank {rank}", daemon=True
                )
                process.start()
                writer.close()  # so that the end of the process is the end of the pipe
                processes.append(process)
                pipes.append(reader)
            results = _listen(processes, pipes, task, tick)
            for process in processes:
                process.join(task.timeout_s)
            return [(result, torch.load(_output_path(folder, result.rank))) for result in results]
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()


def _listen(processes: list[BaseProcess], pipes: list[Connection], task: RankTask, tick: Tick) -> list[RankResult]:
    """Follow all workers until each has a result.

    Raises:
        WorkerError: one failed. What caused it wins over what other ranks saw of it.
    """
    results: dict[int, RankResult] = {}
    failures: list[_Failure] = []
    talking = dict(zip(pipes, range(len(pipes)), strict=True))
    silence_s = _START_S + 2 * task.timeout_s
    deadline = time.monotonic() + silence_s
    while talking:
        ready = multiprocessing.connection.wait(list(talking), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = talking[pipe]
            try:
                message: Any = pipe.recv()
            except (EOFError, OSError):
                del talking[pipe]
                if rank not in results and all(failure.rank != rank for failure in failures):
                    processes[rank].join(_GRACE_S)
                    failures.append(_Failure(rank, _death(processes[rank].exitcode), "", False))
            else:
                if isinstance(message, _Failure):
                    failures.append(message)
                elif isinstance(message, RankResult):
                    results[rank] = message
                else:
                    tick()
        if not failures:
            deadline = time.monotonic() + silence_s
        elif any(not failure.is_echo for failure in failures):
            break
        else:  # a rank missed another one, which has yet to say why
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        first = min(failures, key=lambda failure: failure.is_echo)
        raise WorkerError(first.rank, first.said, first.details)
    if len(results) < len(processes):
        silent = [rank for rank in range(len(processes)) if rank not in results]
        raise WorkerError(silent[0], f"fell silent for {silence_s:.0f} s, as did all of {silent}")
    return [results[rank] for rank in range(len(processes))]


class _Failure:
    """What a worker says when it fails.

    Attributes:
        said: continues "rank 3 ...".
        is_echo: it was another rank that did not do its part.
    """

    def __init__(self, rank: int, said: str, details: str, is_echo: bool) -> None:
        self.rank, self.said, self.details, self.is_echo = rank, said, details, is_echo


def _death(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe without a result"
    if exitcode < 0:
        return f"was killed by signal {-exitcode}" + (" (out of memory?)" if exitcode == -9 else "")
    return f"exited with code {exitcode} without a result"


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


# ---------------------------------------------------------------- in a worker


def _worker(rank: int, folder: Path, task: RankTask, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is interrupted, and ends its workers
    try:
        result, output = _process_rank(rank, folder, task, lambda: pipe.send(None))
        torch.save(output, _output_path(folder, rank))
        pipe.send(result)
    except Exception as error:
        said = f"failed: {error}" if isinstance(error, TileEPError) else f"failed: {type(error).__name__}: {error}"
        pipe.send(_Failure(rank, said, traceback.format_exc(), isinstance(error, PeerTimeoutError)))
    pipe.close()


def _process_rank(rank: int, folder: Path, task: RankTask, tick: Tick) -> Outcome:
    import torch.distributed as dist

    torch.set_num_threads(1)
    _use_loopback_interface()
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=task.num_ranks,
        timeout=timedelta(seconds=_START_S + task.timeout_s),
    )
    try:
        with Buffer(
            num_max_tokens_per_rank=task.num_max_tokens_per_rank,
            hidden=task.hidden,
            num_topk=task.num_topk,
            num_experts=task.num_experts,
            dtype=task.payload.row_dtype,
            expand_factor=task.expand_factor,
            backend="collective",
            timeout_s=task.timeout_s,
        ) as buffer:
            outcome = run_rank(buffer, Trace.read(_shard_path(folder, rank)), task, tick)
            buffer.barrier()  # no rank leaves while another one still reads from it
            return outcome
    finally:
        dist.destroy_process_group()


def _use_loopback_interface() -> None:
    """Keep gloo off the host name, which need not resolve: all ranks are on this machine."""
    names = [name for _, name in socket.if_nameindex()]
    here = next((name for name in ("lo", "lo0") if name in names), None)
    if here is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", here)


def _shard_path(folder: Path, rank: int) -> Path:
    return folder / f"tokens_{rank}.safetensors"


def _output_path(folder: Path, rank: int) -> Path:
    return folder / f"output_{rank}.pt"
