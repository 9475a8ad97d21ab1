"""A timeline of a few collectives, for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from tile_ep.bench.exchange import Exchange
from tile_ep.bench.overlap import Gemm
from tile_ep.bench.ranks import Ranks
from tile_ep.bench.workload import Workload

_ROUNDS = 3


def write_trace(path: Path, ranks: Ranks, workload: Workload, num_sms: int) -> None:
    """Dispatch and combine on all ranks; on CUDA beside a matrix product on the last rank's stream. Collective.

    The file of the first process is written. Names of calls are there where they are made by this thread, which in the
    simulator they are not.
    """
    exchange = Exchange(ranks, workload, num_sms)
    cuda = ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with exchange.opened() as buffers:
        gemm = Gemm(ranks.device) if cuda else None

        def step(rank: int) -> Any:
            with record_function(f"rank {rank}: dispatch"):
                x, idx = workload.x[0][rank], workload.topk_idx[0][rank]
                options: dict[str, Any] = {"num_sms": num_sms, "async_with_compute_stream": True}
                recv_x, _, _, handle, sent = buffers[rank].dispatch(x, idx, do_cpu_sync=False, **options)
            if gemm is not None and rank == ranks.here[-1]:
                with record_function("GEMM"):
                    gemm()
            sent.current_stream_wait()
            with record_function(f"rank {rank}: combine"):
                out, _, back = buffers[rank].combine(recv_x, handle, **options)
            back.current_stream_wait()
            return out

        ranks.each(step)
        with profile(activities=activities) as profiler:
            for number in range(_ROUNDS):
                with record_function(f"round {number}"):
                    ranks.round([step])
            ranks.synchronize()
    if 0 in ranks.here:
        profiler.export_chrome_trace(str(path))
