"""All ranks in one process: on one GPU, or on CPUs in the simulator. One thread a rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tile_ep.backends.nvlink import NvlinkBackend
from tile_ep.buffer import Buffer
from tile_ep.config import make_config, parse_device
from tile_ep.errors import ArgumentError, PeerTimeoutError
from tile_ep.kernels.launcher import KernelSpec
from tile_ep.kernels.tuning import Tuning
from tile_ep.worlds.cuda import CudaDevice

if TYPE_CHECKING:
    from tile_ep.worlds.simulated import Simulation

Result = TypeVar("Result")


class Meeting:
    """Where the ranks of one process wait for each other and leave values for each other.

    Attributes:
        lockstep: every rank has a thread of its own, so that they can wait for each other before each launch.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._values: list[Any] = [None] * num_ranks
        self._present = [False] * num_ranks
        self._timeout_s = timeout_s
        self.lockstep = False

    def __len__(self) -> int:
        return len(self._values)

    def gather(self, rank: int, value: object) -> list[Any]:
        """Every rank's value, by rank.

        Raises:
            PeerTimeoutError: a rank did not come. The meeting is usable again once all who waited have left.
        """
        self._values[rank] = value
        self._present[rank] = True
        try:
            self._barrier.wait(self._timeout_s)
            values = list(self._values)
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            missing = [other for other, came in enumerate(self._present) if not came]
            self._present[rank] = False
            if not any(self._present):
                self._barrier.reset()
            raise PeerTimeoutError(rank, "meeting of all ranks", missing, None, self._timeout_s) from None
        self._present[rank] = False
        return values


class LoopbackCudaWorld(CudaDevice):
    """A rank that shares its GPU with all its peers; its region is ordinary device memory."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device, meeting: Meeting) -> None:
        super().__init__(rank, num_ranks, device, num_ranks)
        self._meeting = meeting
        self._region = torch.empty(0)

    def allocate(self, num_bytes: int) -> None:
        """Allocate, and exchange addresses. Collective."""
        self._region = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self._base = self._region.data_ptr()
        torch.cuda.synchronize(self.device)
        addresses = self.gather(self._base)
        self.peers = torch.tensor(addresses, dtype=torch.int64).to(self.device).view(torch.uint64)

    def launch(self, spec: KernelSpec, num_blocks: int, arguments: Mapping[str, int | torch.Tensor | None]) -> None:
        """Enqueue a kernel once all ranks are about to, and go on once all have: a rank that allocates memory or loads code
        would be held up by the kernel of a rank that waits for it, since CUDA then waits for the device they share.
        """
        self.prepare(spec)
        self._meet()
        super().launch(spec, num_blocks, arguments)
        self._meet()

    def _meet(self) -> None:
        if self._meeting.lockstep:
            with contextlib.suppress(PeerTimeoutError):  # the kernels find out who is missing
                self._meeting.gather(self.rank, None)

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        return self._meeting.gather(self.rank, value)

    def destroy(self) -> None:
        """Drop the region."""
        self._region = torch.empty(0)


class Loopback(Sequence[Buffer]):
    """One `Buffer` per rank, all in this process. A collective waits for all ranks, so each rank needs a thread: `run` gives
    it one. On a GPU, collectives that do not synchronise with the host can also be enqueued for one rank after the other.

    Usable as a context manager, which destroys all buffers.

    Attributes:
        simulation: what runs the kernels where the device is `"sim"`, else `None`.
    """

    def __init__(
        self,
        buffers: list[Buffer],
        pool: ThreadPoolExecutor,
        meeting: Meeting,
        device: torch.device,
        simulation: Simulation | None,
    ) -> None:
        self.simulation = simulation
        self._buffers, self._pool, self._meeting, self._device = buffers, pool, meeting, device
        self._streams = [torch.cuda.Stream(device) for _ in buffers] if device.type == "cuda" else []

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, rank: int) -> Buffer:  # type: ignore[override]
        return self._buffers[rank]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def run(self, function: Callable[[int, Buffer], Result]) -> list[Result]:
        """`function(rank, buffer)` on one thread per rank, each with a CUDA stream of its own; results by rank.

        Raises:
            Exception: that of the lowest rank that raised, after all have returned.
        """

        def on_rank(rank: int) -> Result:
            if not self._streams:
                return function(rank, self._buffers[rank])
            stream = self._streams[rank]
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream(self._device))
                result = function(rank, self._buffers[rank])
                stream.synchronize()
                return result

        with self.lockstep():
            futures = [self._pool.submit(on_rank, rank) for rank in range(len(self))]
            outcomes = [(future.exception(), future) for future in futures]
        for error, _ in outcomes:
            if error is not None:
                raise error
        return [future.result() for _, future in outcomes]

    @contextlib.contextmanager
    def lockstep(self) -> Iterator[None]:
        """For a caller who gives every rank a thread: on a GPU they wait for each other at each launch, as in `run`."""
        self._meeting.lockstep = True
        try:
            yield
        finally:
            self._meeting.lockstep = False

    def destroy(self) -> None:
        """Destroy all buffers."""
        for buffer in self._buffers:
            buffer.destroy()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


def loopback(
    num_ranks: int,
    device: str | torch.device = "sim",
    *,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    num_experts: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_scale_bytes: int | None = None,
    expand_factor: float = 2.0,
    num_slots: int = 2,
    pipeline_depth: int = 2,
    timeout_s: float = 60.0,
    seed: int = 0,
    tuning: Tuning | None = None,
) -> Loopback:
    """A `Buffer` for each of `num_ranks` ranks that live in this process and exchange through the real kernels.

    Args:
        num_ranks: ranks `R`.
        device: `"sim"` runs the kernels' source on the CPU, deterministically from `seed`, and needs g++;
            `"cuda"` puts all ranks on one GPU, `R * num_sms` at most its SM count. A thread that enqueues several
            collectives of one rank before those of the next needs `CUDA_DEVICE_MAX_CONNECTIONS=32` in the environment when
            CUDA starts if there are more than four ranks, or some of them wait in vain; `run` does not.
        num_max_tokens_per_rank, hidden, num_topk, num_experts, dtype, max_scale_bytes, expand_factor, num_slots,
            pipeline_depth, timeout_s: as for `Buffer`.
        seed: of the simulated schedules.
        tuning: shapes of the kernels' blocks, for measuring; by default the device's.

    Returns:
        A sequence of buffers by rank; `Loopback.run` calls a function on all ranks at once.

    Raises:
        BackendUnavailableError: TileLang, g++ or the GPU is missing; the message says how to get it.

    Example::

        def exchange(rank, buffer):
            x = torch.full((4, 64), float(rank), dtype=torch.bfloat16)
            topk_idx = torch.arange(4).view(4, 1) % 2
            recv_x, *_, handle, event = buffer.dispatch(x, topk_idx)
            return buffer.combine(recv_x, handle)[0]

        with tile_ep.loopback(2, num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=2) as ranks:
            outputs = ranks.run(exchange)
    """
    if num_ranks < 1:
        raise ArgumentError("num_ranks", num_ranks, "at least 1")
    config = make_config(
        num_ranks,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        dtype=dtype,
        max_scale_bytes=max_scale_bytes,
        expand_factor=expand_factor,
        num_slots=num_slots,
        pipeline_depth=pipeline_depth,
        timeout_s=timeout_s,
    )
    meeting = Meeting(num_ranks, timeout_s)
    simulation = None
    if str(device) == "sim":
        from tile_ep.worlds.simulated import SimulatedWorld, Simulation

        where = torch.device("cpu")
        simulation = Simulation(num_ranks, seed, timeout_s)
        worlds: list[Any] = [SimulatedWorld(rank, simulation, meeting) for rank in range(num_ranks)]
    else:
        where = parse_device(device, "'sim' or a CUDA device")
        if where.type != "cuda":
            raise ArgumentError("device", device, "'sim' or a CUDA device")
        if where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        worlds = [LoopbackCudaWorld(rank, num_ranks, where, meeting) for rank in range(num_ranks)]
        if worlds[0].max_blocks < 1:
            raise ArgumentError("num_ranks", num_ranks, "at most one rank per SM")
    if tuning is not None:
        for world in worlds:
            world.tuning = tuning
    pool = ThreadPoolExecutor(num_ranks, thread_name_prefix="rank")
    backends = list(pool.map(lambda world: NvlinkBackend(world, config), worlds))
    return Loopback([Buffer.from_backend(backend, config) for backend in backends], pool, meeting, where, simulation)
