"""Fixtures: process pools, and one runner per backend for the bit-for-bit module.

The runners ask three things of `cases.py`:

* `case.num_ranks`, and `case.buffer_arguments()`: the keyword arguments of its `Buffer`;
* `cases.make_inputs(case)`: the inputs of every rank, a sequence by rank, on the CPU;
* `cases.run_rank(buffer, case, inputs)`: one rank's calls with one rank's inputs, which it moves to
  `buffer.device`; returns tensors (or containers of them) by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import torch
from workers import Pools


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Process pools by world size."""
    with Pools() as opened:
        yield opened


class Runner(Protocol):
    """Runs a case on one backend."""

    name: str

    def supports(self, case: Any) -> str | None:
        """Why this backend cannot run `case`, `None` if it can."""
        ...

    def run(self, case: Any) -> list[dict[str, Any]]:
        """What `cases.run_rank` returns on every rank, on the CPU."""
        ...


def to_cpu(value: Any) -> Any:
    """`value` with every tensor inside it on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple | list):
        return type(value)(to_cpu(item) for item in value)
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    return value


def run_in_process(rank: int, case: Any, inputs: Any) -> dict[str, Any]:
    """One rank of the collective backend; runs in a worker."""
    from tile_ep import Buffer, cases

    with Buffer(**case.buffer_arguments(), backend="collective", timeout_s=60) as buffer:
        result: dict[str, Any] = cases.run_rank(buffer, case, inputs)
        return result


class CollectiveRunner:
    """One gloo process per rank."""

    name = "collective"

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def supports(self, case: Any) -> str | None:
        return None if case.num_ranks <= 16 else "at most 16 processes"

    def run(self, case: Any) -> list[dict[str, Any]]:
        from tile_ep import cases

        inputs = cases.make_inputs(case)
        return self._pools(case.num_ranks).run(
            run_in_process, per_rank=[(case, inputs[r]) for r in range(case.num_ranks)]
        )


class LoopbackRunner:
    """All ranks in this process, on the kernels: simulated (`"sim"`), or on one GPU (`"cuda"`)."""

    def __init__(self, device: str) -> None:
        self.name = self._device = device

    def supports(self, case: Any) -> str | None:
        return None if case.num_ranks <= 8 else "at most 8 ranks in one process"

    def run(self, case: Any) -> list[dict[str, Any]]:
        import tile_ep
        from tile_ep import cases
        from tile_ep.kernels.tuning import HOPPER, SIMULATOR

        inputs = cases.make_inputs(case)
        tuning = case.tuned(HOPPER if self._device == "cuda" else SIMULATOR)
        with tile_ep.loopback(case.num_ranks, device=self._device, tuning=tuning, **case.buffer_arguments()) as ranks:
            return [to_cpu(out) for out in ranks.run(lambda rank, buffer: cases.run_rank(buffer, case, inputs[rank]))]


@pytest.fixture(params=["collective", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest, pools: Pools) -> Runner:
    """A runner of each backend that this machine has."""
    if request.param == "collective":
        return CollectiveRunner(pools)
    if importlib.util.find_spec("tilelang") is None:
        pytest.skip("needs tilelang (pip install tilelang)")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "sim" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    if request.param == "sim" and not hasattr(importlib.import_module("tile_ep.sim"), "simulate"):
        pytest.skip("needs the simulator")
    return LoopbackRunner(request.param)
