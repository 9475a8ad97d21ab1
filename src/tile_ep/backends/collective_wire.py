"""Bytes between ranks over a private gloo or NCCL communicator: agreement on entry, bounded waits, who is missing."""

from __future__ import annotations

import re
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from tile_ep.errors import DisagreementError, PeerTimeoutError

CALLS = ("dispatch", "cached dispatch", "combine", "barrier", "agreement check")
_DTYPES = tuple(sorted(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)))

_AGREED = (
    "call",
    "num_experts",
    "num_topk",
    "num_max_tokens_per_rank",
    "expert_alignment",
    "bytes of data per row",
    "dtype of data",
    "bytes of scales per row",
    "dtype of scales",
    "topk_weights given",
    "do_expand",
    "do_cpu_sync",
    "number of the dispatch that made the handle",
)
"""The entry words, in order. A rank sends them to all others before anything whose size depends on them."""


def _decode(name: str, word: int) -> object:
    """An entry word as a person reads it."""
    if name == "call":
        return CALLS[word]
    if name.startswith("dtype"):
        return _DTYPES[word - 1] if word else None
    if name in ("topk_weights given", "do_expand", "do_cpu_sync"):
        return bool(word)
    return word


def dtype_code(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else 1 + _DTYPES.index(str(tensor.dtype).removeprefix("torch."))


def row_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[1] * tensor.element_size()


# ---------------------------------------------------------------- bytes between ranks, with bounded waits

_NOTE_AFTER_S = 1.0  # a rank that has waited this long leaves a note in the store
_GRACE_S = 2.0  # how long a rank that gives up waits for the notes of others
_LOST = re.compile(r"tim(ed|e) ?out|connect|socket|broken pipe|reset by peer|closed", re.IGNORECASE)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception of `torch.distributed` says that a peer is late or gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def _close(communicators: list[Any], device: torch.device) -> None:
    while communicators:
        comm = communicators.pop()
        if device.type == "cuda":
            comm.abort()  # rather than wait for peers


class Wire:
    """All-to-alls on a private communicator.

    When a wait expires, the ranks that are missing are found through the store: whoever waits for long
    leaves the number of its collective there. Nothing is written as long as everybody is on time.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.num_ranks, self.device, self.timeout_s = rank, num_ranks, device, timeout_s
        self.epoch = 0
        self._root, self._generation = store, 0
        self._open: list[Any] = []  # the communicator, while there is one
        # Also at interpreter exit: its threads must have ended before Python goes down.
        weakref.finalize(self, _close, self._open, device)
        self._connect()

    def _connect(self) -> None:
        self._store = PrefixStore(str(self._generation), self._root)
        started = time.monotonic()
        try:
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                # Waits are bounded here; NCCL's own watchdog would take the process down.
                options._timeout = timedelta(seconds=2 * self.timeout_s + 60)
                comm: Any = dist.ProcessGroupNCCL(self._store, self.rank, self.num_ranks, options)
            else:
                timeout = timedelta(seconds=self.timeout_s)
                comm = dist.ProcessGroupGloo(self._store, self.rank, self.num_ranks, timeout)
        except RuntimeError as error:
            raise self._lost("connect", error, started) from error
        self._open.append(comm)

    def reconnect(self) -> None:
        """A fresh communicator. Collective: every rank calls it equally often."""
        self.close()
        self._generation += 1
        self.epoch = 0
        self._connect()

    def close(self) -> None:
        """Drop the communicator. Local."""
        _close(self._open, self.device)

    def enter(self, values: dict[str, int], rows: torch.Tensor) -> list[list[int]]:
        """Begin a collective: check that all ranks make the same call, and exchange `rows`.

        Args:
            values: entry words by their name in `_AGREED`; 0 where the call has none.
            rows: `[L]` int64 on the device, `L` the same on all ranks.

        Returns:
            `rows` of every rank, as `[R][L]`.

        Raises:
            DisagreementError: on every rank.
        """
        words = torch.tensor([values.get(name, 0) for name in _AGREED], dtype=torch.int64, device=self.device)
        table = self.share(torch.cat([words, rows]), f"enter {CALLS[values['call']]}")
        for column, name in enumerate(_AGREED):
            said = [row[column] for row in table]
            if len(set(said)) > 1:
                raise DisagreementError(name, [_decode(name, word) for word in said])
        return [row[len(_AGREED) :] for row in table]

    def share(self, words: torch.Tensor, phase: str) -> list[list[int]]:
        """`words` (`[L]` int64) of every rank, on the host."""
        self.epoch += 1
        received = self.exchange(words.expand(self.num_ranks, -1).contiguous(), None, None, phase)
        return self.to_host(received, phase)

    def exchange(
        self,
        rows: torch.Tensor,
        sent: list[int] | None,
        received: list[int] | None,
        phase: str,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send `rows` (`[sum(sent), W]`, ordered by destination); returns what arrives, ordered by source.

        Args:
            sent: rows for each rank; `None` for one each.
            received: rows from each rank; `None` for one each.
            out: `[sum(received), W]` to receive into.
        """
        if out is None:
            shape = (self.num_ranks if received is None else sum(received), *rows.shape[1:])
            out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        started = time.monotonic()
        try:
            self._finish(self._open[0].alltoall_base(out, rows, received or [], sent or []))
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise self._lost(phase, error, started) from error
        return out

    def _finish(self, work: dist.Work) -> None:
        if self.device.type == "cuda":
            work.wait()  # orders the streams; the host waits in to_host
            return
        try:
            work.wait(timedelta(seconds=_NOTE_AFTER_S))
        except RuntimeError:
            self._note()
            work.wait()  # raises again if the work failed, rather than being merely late

    def to_host(self, words: torch.Tensor, phase: str) -> list[list[int]]:
        if self.device.type == "cuda":
            started, noted = time.monotonic(), False
            event = torch.cuda.Event()
            event.record()
            while not event.query():
                waited = time.monotonic() - started
                if waited > _NOTE_AFTER_S and not noted:
                    self._note()
                    noted = True
                if waited > self.timeout_s:
                    error = self._lost(phase, None, started)
                    self.close()
                    raise error
                time.sleep(min(waited, 1e-4))
        table: list[list[int]] = words.tolist()
        return table

    def _note(self) -> None:
        with suppress(RuntimeError):  # the store's host may be the rank that was lost
            self._store.set(f"waiting/{self.rank}", str(self.epoch))

    def _is_waiting(self, rank: int) -> bool:
        key = f"waiting/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self.epoch

    def _lost(self, phase: str, cause: RuntimeError | None, started: float) -> PeerTimeoutError:
        waited = time.monotonic() - started
        self._note()
        missing = [rank for rank in range(self.num_ranks) if rank != self.rank]
        deadline = time.monotonic() + min(_GRACE_S, self.timeout_s)
        try:
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._is_waiting(rank)]
                time.sleep(0.02)
        except RuntimeError:
            missing = []
        return PeerTimeoutError(self.rank, phase, missing, self.epoch, round(waited, 2))
