"""What the hardware allows in this run: plain copies and fills, and copies to a peer where there are any."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tile_ep.bench.clocks import Spread
from tile_ep.bench.ranks import CudaProcessRanks, Ranks
from tile_ep.bench.workload import Bytes

_GATE_CYCLES = 1_000_000
_WARM_UP = 2


@dataclass(frozen=True)
class Ceilings:
    """Rates in bytes per ms, on the slowest device.

    Attributes:
        num_bytes: of the copied tensor.
        copy: read and written by a copy within the device.
        fill: written by a fill.
        peer: in one direction, from rank 0 to rank 1 while all others rest; 0 where there are no peers.
        peer_both: leaving each device while all send to the next one, hence arriving as fast; 0 likewise.
    """

    num_bytes: int
    copy: float
    fill: float
    peer: float = 0.0
    peer_both: float = 0.0

    def ideal_ms(self, count: Bytes) -> float:
        """The longer of memory at the speed of a copy, and links at the speed of copies in both directions."""
        wire = count.wire / self.peer_both if self.peer_both else 0.0
        return max(count.memory / self.copy, wire)


def measure_ceilings(ranks: Ranks, num_bytes: int, repeat: int) -> Ceilings:
    """Collective.

    Args:
        num_bytes: of the tensor that is copied.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    time_of = _device_ms if ranks.on_device else _host_ms
    copy = 2 * num_bytes / time_of(functools.partial(target.copy_, source), repeat).median
    fill = num_bytes / time_of(functools.partial(target.fill_, 1), repeat).median
    del source, target
    peer, both = 0.0, 0.0
    if isinstance(ranks, CudaProcessRanks) and ranks.num_ranks > 1:
        peer, both = _peer_copies(ranks, num_bytes, repeat)
    copy, fill, both = (min(values) for values in zip(*ranks.gather((copy, fill, both)), strict=True))
    return Ceilings(num_bytes, copy, fill, max(ranks.gather(peer)), both)


def _device_ms(call: Callable[[], object], repeat: int) -> Spread:
    times = []
    for _ in range(_WARM_UP + repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_GATE_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return Spread.of(times[_WARM_UP:])


def _host_ms(call: Callable[[], object], repeat: int) -> Spread:
    times = []
    for _ in range(_WARM_UP + repeat):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return Spread.of(times[_WARM_UP:])


def _peer_copies(ranks: CudaProcessRanks, num_bytes: int, repeat: int) -> tuple[float, float]:
    """Rank 0's rate to rank 1 alone (0 elsewhere), and this rank's rate to the next while all send."""
    import torch.distributed._symmetric_memory as symmetric

    region = symmetric.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
    group = dist.group.WORLD
    assert group is not None
    handle = symmetric.rendezvous(region, group)
    remote = handle.get_buffer((ranks.rank + 1) % ranks.num_ranks, (num_bytes,), torch.uint8)
    local = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
    ranks.synchronize()
    alone = num_bytes / _device_ms(lambda: remote.copy_(local), repeat).median if ranks.rank == 0 else 0.0
    times = []
    for _ in range(_WARM_UP + repeat):
        times.append(ranks.round([lambda _: remote.copy_(local)]).ms)
    ranks.synchronize()
    return alone, num_bytes / Spread.of(times[_WARM_UP:]).median
