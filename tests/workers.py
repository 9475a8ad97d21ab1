"""Persistent pools of gloo processes: spawned once per world size, fed with functions, killed when one hangs.

A function runs on every rank as `function(rank, *args)` with the default process group initialised. It must be
importable by name, so it lives at the top level of a test module.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "tile_ep"])

MAX_PROCESSES = 28
"""Across all pools of a session; the pool that was idle longest makes room."""


@dataclass
class Outcome:
    """What a rank's call did: returned `value`, or raised an exception of these `kinds` (its class first)."""

    value: Any = None
    kinds: list[str] = field(default_factory=list)
    message: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""

    @property
    def error(self) -> str | None:
        """Name of the exception's class, `None` if there was none."""
        return self.kinds[0] if self.kinds else None


class WorkerError(AssertionError):
    """A rank raised, died or did not answer in time."""


def _attributes(error: BaseException) -> dict[str, Any]:
    kept = {}
    for name, value in vars(error).items():
        try:
            pickle.dumps(value)
        except Exception:
            value = repr(value)
        kept[name] = value
    return kept


def _call(rank: int, function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps(Outcome(value=function(rank, *args)))
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return pickle.dumps(Outcome(None, kinds, str(error), _attributes(error), traceback.format_exc()))


def _serve(rank: int, num_ranks: int, port: int, channel: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    while True:
        try:
            function, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        channel.send_bytes(_call(rank, function, args))


class Pool:
    """`num_ranks` processes that form one default process group."""

    def __init__(self, num_ranks: int) -> None:
        import torch.distributed as dist

        self.num_ranks = num_ranks
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._channels: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, num_ranks, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        per_rank: Sequence[Sequence[Any]] | None = None,
        timeout: float = 60,
    ) -> list[Outcome]:
        """Run `function(rank, *args)` on every rank and say what each did.

        Args:
            per_rank: arguments of each rank, instead of `args`.
            timeout: seconds for all ranks together.

        Raises:
            WorkerError: a rank died or did not answer; the pool is then closed.
        """
        for rank, channel in enumerate(self._channels):
            channel.send_bytes(pickle.dumps((function, args if per_rank is None else per_rank[rank])))
        deadline = time.monotonic() + timeout
        answers = []
        for rank, channel in enumerate(self._channels):
            try:
                if not channel.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout} s")
                answers.append(pickle.loads(channel.recv_bytes()))
            except (EOFError, OSError) as error:
                self.close()
                raise WorkerError(f"rank {rank} of {self.num_ranks}: {error or 'process died'}") from error
        return answers

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        per_rank: Sequence[Sequence[Any]] | None = None,
        timeout: float = 60,
    ) -> list[Any]:
        """As `outcomes`, but every rank must return.

        Raises:
            WorkerError: with the traceback of the rank that most likely failed first.
        """
        answers = self.outcomes(function, *args, per_rank=per_rank, timeout=timeout)
        failed = [rank for rank, answer in enumerate(answers) if answer.error]
        if failed:  # a rank that failed by itself says more than those that waited for it
            first = min(failed, key=lambda rank: answers[rank].error == "PeerTimeoutError")
            raise WorkerError(f"ranks {failed} of {self.num_ranks} raised; rank {first}:\n{answers[first].traceback}")
        return [answer.value for answer in answers]

    @property
    def alive(self) -> bool:
        return bool(self._channels) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes, by force where they do not go."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.join(0.5 if self._channels else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._channels, self._processes = [], []


class Pools:
    """The pools of a session, by world size. A broken pool is replaced on its next use."""

    def __init__(self) -> None:
        self._pools: OrderedDict[int, Pool] = OrderedDict()

    def __call__(self, num_ranks: int) -> Pool:
        pool = self._pools.pop(num_ranks, None)
        if pool is not None and not pool.alive:
            pool.close()
            pool = None
        if pool is None:
            while self._pools and sum(self._pools) + num_ranks > MAX_PROCESSES:
                self._pools.popitem(last=False)[1].close()
            pool = Pool(num_ranks)
        self._pools[num_ranks] = pool
        return pool

    def __enter__(self) -> Pools:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close()
