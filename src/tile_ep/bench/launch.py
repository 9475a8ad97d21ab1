"""Starts a run where its ranks live: in this process, under torchrun, or in processes of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tile_ep.bench.machine import Machine
from tile_ep.bench.report import write_json
from tile_ep.bench.session import Keep, Results, Say, Settings, check, run

_TIMEOUT = timedelta(seconds=600)


def under_torchrun() -> bool:
    """Whether this process is one rank of a group that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def execute(settings: Settings, say: Say, json_file: Path | None = None) -> tuple[Settings, Results] | None:
    """Run; the settings as they turned out, and the results; `None` on all ranks but the first one.

    Args:
        say: told what begins.
        json_file: what there is so far is written there after each part.

    Raises:
        ValueError: the settings contradict each other.
    """
    machine = Machine.look()
    if under_torchrun():
        with _group(settings) as ranks:
            settings = replace(settings, shape=replace(settings.shape, ranks=ranks))
            check(settings)
            first = dist.get_rank() == 0
            keep = _writer(settings, json_file if first else None)
            results = run(settings, machine, say if first else _say_nothing, keep)
            return (settings, results) if first else None
    check(settings)
    if settings.backend == "collective":
        return settings, _in_processes(settings, json_file)
    return settings, run(settings, machine, say, _writer(settings, json_file))


def _writer(settings: Settings, json_file: Path | None) -> Keep:
    return lambda results: None if json_file is None else write_json(json_file, settings, results)


@contextlib.contextmanager
def _group(settings: Settings) -> Iterator[int]:
    """The default group: NCCL where every process can have a GPU, else gloo. Yields its size."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > local
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _say_nothing(said: str) -> None:
    """Of all ranks but the first."""


def _in_processes(settings: Settings, json_file: Path | None) -> Results:
    """A gloo process for each rank on CPUs."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tile-ep-") as folder:
        processes = [
            context.Process(
                target=_process, args=(rank, Path(folder), settings, json_file if rank == 0 else None), daemon=True
            )
            for rank in range(settings.shape.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        outcome = Path(folder) / "results"
        if not outcome.exists():
            raise RuntimeError(f"exit codes of the ranks: {[process.exitcode for process in processes]}")
        results: Results = pickle.loads(outcome.read_bytes())
        return results


def _process(rank: int, folder: Path, settings: Settings, json_file: Path | None) -> None:
    torch.set_num_threads(1)
    here = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if here is not None:  # the name of the host need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", here)
    dist.init_process_group("gloo", (folder / "store").as_uri(), _TIMEOUT, world_size=settings.shape.ranks, rank=rank)
    try:
        results = run(settings, Machine.look(), _say_nothing, _writer(settings, json_file))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (folder / "results").write_bytes(pickle.dumps(results))
