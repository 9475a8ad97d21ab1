"""What all worlds on CUDA devices share: streams, events, memory views and launches."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tile_ep.backends.base import StreamOptions
from tile_ep.errors import CaptureError
from tile_ep.event import EventOverlap
from tile_ep.kernels.launcher import CudaKernel, KernelSpec, cuda_kernel, is_compiled
from tile_ep.kernels.tuning import HOPPER

_HIGHEST_PRIORITY = -5  # CUDA clamps it to what the device offers


class _DeviceMemory:
    """A span of device memory as torch adopts it: torch keeps this object for as long as any tensor over it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class CudaDevice:
    """One rank's CUDA device: the private high-priority stream and everything that goes through it.

    Subclasses say where the regions are: they set `peers` (uint64 `[R]` on the device) and `_base`.
    """

    tuning = HOPPER

    def __init__(self, rank: int, num_ranks: int, device: torch.device, ranks_on_device: int) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.max_blocks, self.ranks_on_device = num_sms // ranks_on_device, ranks_on_device
        self._stream = torch.cuda.Stream(device, priority=_HIGHEST_PRIORITY)
        self._outstanding: deque[torch.cuda.Event] = deque()
        self._released: list[torch.cuda.Event] = []
        self._index = self._stream.device_index
        self._base = 0
        self.peers = torch.empty(0)

    @property
    def base(self) -> int:
        """Address of this rank's region."""
        return self._base

    @property
    def _current(self) -> torch.cuda.Stream:
        """The caller's stream. Asked for by index: given a device, torch takes several times as long."""
        return torch.cuda.current_stream(self._index)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """`torch.cuda.stream` of the communication stream, in a fifth of the time where its device is the current one."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.stream(self._stream):
                yield
            return
        current = self._current
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(current)

    def zero(self, offset: int, num_bytes: int) -> None:
        """Zero a part of this rank's region, and wait for it."""
        self._adopt(_DeviceMemory(self._base + offset, num_bytes)).zero_()
        torch.cuda.synchronize(self.device)

    def _adopt(self, memory: _DeviceMemory) -> torch.Tensor:
        return torch.as_tensor(memory, device=self.device)

    def lease(self, offset: int, num_bytes: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A part of this rank's region as uint8, and a reference that dies with the last tensor over it.

        When it dies, work that still reads the memory may be queued on the stream of whoever drops it: the next
        collective waits for that work.
        """
        memory = _DeviceMemory(self._base + offset, max(num_bytes, 1))
        weakref.finalize(memory, self._remember_readers).atexit = False
        return self._adopt(memory)[:num_bytes], weakref.ref(memory)

    def _remember_readers(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._released.append(self._current.record_event())

    def host_words(self, number: int) -> torch.Tensor:
        """int64 zeros in pinned memory."""
        return torch.zeros(number, dtype=torch.int64, pin_memory=True)

    def begin(self, streams: StreamOptions) -> None:
        """The communication stream waits for the event, or for the current stream; and for readers of freed slots."""
        given = streams.previous_event
        event = given.event if isinstance(given, EventOverlap) else given
        if event is not None:
            self._stream.wait_event(event)
        if event is None or streams.inputs_are_new:
            self._stream.wait_stream(self._current)
        while self._released and not torch.cuda.is_current_stream_capturing():
            self._stream.wait_event(self._released.pop())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, on_comm_stream: bool) -> torch.Tensor:
        """Uninitialised device memory, owned by the communication stream or by the current one."""
        if not on_comm_stream:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self.after(lambda: torch.empty(shape, dtype=dtype, device=self.device))

    def launch(self, spec: KernelSpec, num_blocks: int, arguments: Mapping[str, int | torch.Tensor | None]) -> None:
        """Enqueue a kernel on the communication stream.

        Raises:
            CaptureError: it would have to be compiled during graph capture.
        """
        del num_blocks  # the kernels read it from their arguments
        kernel = self.prepare(spec)
        addresses = {name: _address(value) for name, value in arguments.items()}
        with self._on_stream():
            kernel({"peers": self.peers, **addresses})

    def prepare(self, spec: KernelSpec) -> CudaKernel:
        """The compiled kernel of `spec`.

        Raises:
            CaptureError: it would have to be compiled during graph capture.
        """
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.prepare(spec)
        if not is_compiled(spec) and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a kernel would be compiled during CUDA graph capture. Run the same calls once before it, "
                "also with the same num_sms and async_with_compute_stream"
            )
        return cuda_kernel(spec)

    def after(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What torch operations on the communication stream make."""
        with self._on_stream():
            memory = make()
        if not torch.cuda.is_current_stream_capturing():
            # Its reader is the current stream: a later collective must not be given it before that has read.
            memory.record_stream(self._current)
        return memory

    def words(self, offset: int, number: int) -> list[int]:
        """64-bit words of this rank's region. Waits for the current stream."""
        words: list[int] = self._adopt(_DeviceMemory(self._base + offset, 8 * number)).view(torch.int64).tolist()
        return words

    def end(self, asynchronous: bool, temporaries: tuple[torch.Tensor, ...]) -> EventOverlap:
        """An event after the collective, for which the current stream waits unless `asynchronous`."""
        event = self._stream.record_event()
        if not torch.cuda.is_current_stream_capturing():
            self._outstanding.append(event)
        if asynchronous:
            return EventOverlap(event, temporaries)
        self._current.wait_event(event)
        return EventOverlap()

    def bound_run_ahead(self, depth: int) -> None:
        """Block the host until at most `depth` collectives are outstanding; 0 never blocks."""
        if depth == 0 or torch.cuda.is_current_stream_capturing():
            self._outstanding.clear()
            return
        while len(self._outstanding) >= depth:
            self._outstanding.popleft().synchronize()

    def pause(self) -> None:
        """Let the other threads of this process have the interpreter."""
        time.sleep(0)

    def synchronize(self) -> None:
        """Wait for the current and the communication stream."""
        self._current.synchronize()
        self._stream.synchronize()
        self._outstanding.clear()


def _address(value: int | torch.Tensor | None) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value or 0
