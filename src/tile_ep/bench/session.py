"""One run of the bench: ceilings, then every section that was asked for."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from tile_ep.bench.ceilings import Ceilings, measure_ceilings
from tile_ep.bench.clocks import warm_up
from tile_ep.bench.exchange import Exchange
from tile_ep.bench.machine import Machine
from tile_ep.bench.measure import Figure, measure
from tile_ep.bench.overlap import Hidden, measure_overlap
from tile_ep.bench.peers import System, all_peers
from tile_ep.bench.ranks import CpuProcessRanks, CudaProcessRanks, LoopbackRanks, Ranks, SimulatedRanks
from tile_ep.bench.small import SmallBatch, measure_small
from tile_ep.bench.trace import write_trace
from tile_ep.bench.workload import FIGURES, RANK_LAYOUT, Shape, Workload

SWEEPS = ("tokens", "sms", "skew", "ranks")
_ALONE_SMS = 8
_SIMULATED_SMS = 8
_GPU_COPY_BYTES = 1 << 30
_CPU_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Points:
    """Where the sweeps measure."""

    tokens: Sequence[int]
    sms: Sequence[int]
    skew: Sequence[float]
    ranks: Sequence[int]
    overlap: Sequence[int]
    small: Sequence[int]


ALL_POINTS = Points(
    tokens=[2**n for n in range(15)],
    sms=[4, 8, 16, 24, 32, 64],
    skew=[0.0, 0.5, 1.0, 1.5],
    ranks=[1, 2, 4, 8],
    overlap=[8, 16, 24, 32, 64],
    small=[1, 2, 4, 8, 16, 32, 64, 128],
)
QUICK_POINTS = Points(
    tokens=[16, 512, 4096], sms=[8, 16, 64], skew=[0.0, 1.0], ranks=[2, 8], overlap=[8, 16], small=[1, 16, 64]
)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        backend: `"cuda-loopback"`, `"sim"`, or, one process a rank, `"auto"`, `"nvlink"` or `"collective"`.
        shape: of everything that a sweep does not vary.
        sms: of every collective, a rank; the sweeps use the first.
        figures: of `FIGURES`, at `shape`; none leaves out the peers there, too.
        sweeps: of `SWEEPS`.
        peers: names of modules of `peers`.
        alone, overlap, small: sections.
        few_ranks: where SMs have to be left over.
        points: of the sweeps.
        repeat: timed rounds of each figure.
        trace: where to write a timeline.
    """

    backend: str
    shape: Shape
    sms: Sequence[int]
    figures: Sequence[str] = FIGURES
    sweeps: Sequence[str] = SWEEPS
    peers: Sequence[str] = ()
    alone: bool = True
    overlap: bool = True
    small: bool = True
    few_ranks: int = 2
    points: Points = ALL_POINTS
    repeat: int = 30
    trace: Path | None = None


@dataclass
class Results:
    """What a run found.

    Attributes:
        figures, hidden, small: measurements.
        skipped: what was not measured, and why.
        failed: what should have been measured and raised.
    """

    machine: Machine
    world: str
    ceilings: Ceilings | None = None
    figures: list[Figure] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    small: list[SmallBatch] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Of every check that failed."""
        figures = [f"{figure.section}: {figure.system}, {figure.name}: {figure.wrong}" for figure in self.figures]
        small = [f"small: {one.shape.tokens} tokens, {one.combine}: {one.wrong}" for one in self.small]
        return [said for said in (*figures, *small) if not said.endswith(": ")]


Say = Callable[[str], None]
Keep = Callable[[Results], None]


def make_ranks(backend: str, num_ranks: int) -> Ranks:
    """The world of a backend."""
    if backend == "cuda-loopback":
        return LoopbackRanks(num_ranks)
    if backend == "sim":
        return SimulatedRanks(num_ranks)
    cuda = "nccl" in str(dist.get_backend())
    return CudaProcessRanks(backend) if cuda else CpuProcessRanks(backend)


class Session:
    """Runs the sections one after the other.

    Args:
        say: told what begins.
        keep: given what there is so far after each part, so that a run that is cut short leaves that.
    """

    def __init__(self, settings: Settings, machine: Machine, say: Say, keep: Keep) -> None:
        self.settings, self._say, self._keep = settings, say, keep
        self.ranks = make_ranks(settings.backend, settings.shape.ranks)
        self.results = Results(machine, self.ranks.name)
        self._alone_in_process = len(self.ranks.here) == self.ranks.num_ranks

    def run(self) -> Results:
        """All sections. Collective."""
        settings, results = self.settings, self.results
        warm_up(self.ranks.device)
        results.machine.describe(self.ranks.device)
        num_bytes = _GPU_COPY_BYTES if self.ranks.on_device else _CPU_COPY_BYTES
        results.ceilings = measure_ceilings(self.ranks, num_bytes, max(5, settings.repeat))
        if settings.figures:
            for num_sms in settings.sms:
                self._ours("base", settings.shape, num_sms, settings.figures)
            self._peers("base", settings.shape)
        if settings.alone:
            self._alone()
        for sweep in settings.sweeps:
            getattr(self, f"_sweep_{sweep}")()
        if settings.overlap:
            self._overlap()
        if settings.small:
            self._small()
        if settings.trace is not None:
            self._trace(settings.trace)
        num_processes = 1 if self._alone_in_process else self.ranks.num_ranks
        results.machine.finish(self.ranks.device, num_processes)
        return results

    # ------------------------------------------------------------ sections

    def _alone(self) -> None:
        """One rank with tokens among ranks without: what its own blocks can move."""
        shape = replace(self.settings.shape, alone=True)
        if shape.ranks > 1:
            self._ours("alone", shape, min(_ALONE_SMS, self._most_sms(shape.ranks)), ("dispatch", "combine, zero-copy"))

    def _sweep_tokens(self) -> None:
        for tokens in self.settings.points.tokens:
            shape = replace(self.settings.shape, tokens=tokens)
            self._ours("tokens", shape, self.settings.sms[0], RANK_LAYOUT)
            self._peers("tokens", shape)

    def _sweep_sms(self) -> None:
        ranks = self.settings.shape.ranks
        for few in sorted({ranks, min(ranks, self.settings.few_ranks)} if self._alone_in_process else {ranks}):
            for num_sms in self.settings.points.sms:
                if num_sms <= self._most_sms(few):
                    shape = replace(self.settings.shape, ranks=few)
                    self._ours("sms", shape, num_sms, RANK_LAYOUT)

    def _sweep_skew(self) -> None:
        for skew in self.settings.points.skew:
            shape = replace(self.settings.shape, skew=skew)
            self._ours("skew", shape, self.settings.sms[0], RANK_LAYOUT)
            self._peers("skew", shape)

    def _sweep_ranks(self) -> None:
        if not self._alone_in_process:
            self.results.skipped["sweep over ranks"] = "every process is a rank; start it with other numbers of them"
            return
        for number in self.settings.points.ranks:
            if number <= self.settings.shape.experts and self.settings.sms[0] <= self._most_sms(number):
                shape = replace(self.settings.shape, ranks=number)
                self._ours("ranks", shape, self.settings.sms[0], RANK_LAYOUT)
                self._peers("ranks", shape)

    def _overlap(self) -> None:
        if not self.ranks.on_device:
            self.results.skipped["overlap"] = "needs CUDA"
            return
        shape = self.settings.shape
        if self._alone_in_process:
            shape = replace(shape, ranks=min(shape.ranks, self.settings.few_ranks))
        ranks = self._ranks_of(shape)
        for num_sms in self.settings.points.overlap:
            if num_sms <= self._most_sms(shape.ranks):
                with self._section(f"overlap, {num_sms} SMs"):
                    workload = self._workload(shape, ranks)
                    self.results.hidden += measure_overlap(ranks, workload, num_sms, self.settings.repeat)

    def _small(self) -> None:
        if not isinstance(self.ranks, LoopbackRanks):
            self.results.skipped["small batches in a graph"] = "captures all ranks in one graph: needs cuda-loopback"
            return
        batches = self.settings.points.small
        shape = replace(self.settings.shape, tokens=max(batches))
        with self._section("small batches"):
            num_sms, repeat = self.settings.sms[0], self.settings.repeat
            for one in measure_small(self.ranks, shape, batches, num_sms, num_sets=4, repeat=repeat):
                self.results.small.append(one)
                self._keep(self.results)

    def _trace(self, path: Path) -> None:
        shape = self.settings.shape
        if self._alone_in_process:
            shape = replace(shape, ranks=min(shape.ranks, self.settings.few_ranks))
        with self._section("trace"):
            ranks = self._ranks_of(shape)
            write_trace(path, ranks, self._workload(shape, ranks), self.settings.sms[0])

    # ------------------------------------------------------------ parts of sections

    def _ours(self, section: str, shape: Shape, num_sms: int, names: Sequence[str]) -> None:
        ranks = self._ranks_of(shape)
        with self._section(f"{section}: {_words(shape)}, {num_sms} SMs"):
            workload = self._workload(shape, ranks)
            self._measure(section, Exchange(ranks, workload, num_sms, names), ranks, workload)

    def _peers(self, section: str, shape: Shape) -> None:
        ranks = self._ranks_of(shape)
        for name, peer in all_peers().items():
            if name not in self.settings.peers:
                continue
            reason = peer.available(ranks)
            if reason is not None:
                self.results.skipped[peer.NAME] = reason
                continue
            with self._section(f"{section}: {_words(shape)}, {peer.NAME}"):
                workload = self._workload(shape, ranks)
                self._measure(section, peer.make(ranks, workload, self.settings.sms[0]), ranks, workload)

    def _measure(self, section: str, system: System, ranks: Ranks, workload: Workload) -> None:
        assert self.results.ceilings is not None
        for operation in system.operations():
            figure = measure(
                section,
                system.name,
                operation,
                ranks,
                workload,
                self.results.ceilings,
                system.num_sms,
                self.settings.repeat,
            )
            self.results.figures.append(figure)

    def _workload(self, shape: Shape, ranks: Ranks) -> Workload:
        """More sets of inputs where they are small."""
        num_bytes = shape.tokens * shape.row_bytes * len(ranks.here)
        return Workload(shape, ranks.here, ranks.device, 2 if num_bytes > 100 << 20 else 4)

    def _ranks_of(self, shape: Shape) -> Ranks:
        if shape.ranks == self.ranks.num_ranks:
            return self.ranks
        return make_ranks(self.settings.backend, shape.ranks)

    def _most_sms(self, num_ranks: int) -> int:
        if isinstance(self.ranks, SimulatedRanks):
            return _SIMULATED_SMS
        if not self.ranks.on_device:
            return 1 << 30
        sms = torch.cuda.get_device_properties(self.ranks.device).multi_processor_count
        return sms // (num_ranks if self.ranks.one_device else 1)

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        """Where all ranks live here, a part that fails does not take the others with it."""
        self._say(name)
        try:
            yield
        except Exception as error:
            if not self._alone_in_process:
                raise
            self.results.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(traceback.format_exc())
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self._keep(self.results)


def _words(shape: Shape) -> str:
    skew = f", skew {shape.skew:g}" if shape.skew else ""
    return f"{shape.ranks} x {shape.tokens} tokens{skew}"


def run(settings: Settings, machine: Machine, say: Say, keep: Keep) -> Results:
    """Collective."""
    return Session(settings, machine, say, keep).run()


def check(settings: Settings) -> None:
    """Raises ValueError where the settings contradict each other."""
    shape = settings.shape
    if shape.experts < shape.ranks:
        raise ValueError(f"{shape.experts} experts for {shape.ranks} ranks; every rank needs one")
    if shape.topk > shape.experts:
        raise ValueError(f"top-{shape.topk} of {shape.experts} experts")
    if settings.backend == "sim" and max(settings.sms) > _SIMULATED_SMS:
        raise ValueError(f"--sms {max(settings.sms)}: at most {_SIMULATED_SMS} in the simulator")
