"""Running kernels in the simulator."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tile_ep.errors import ArgumentError, TileEPError
from tile_ep.sim.compile import Parameter, SimKernel, load_engine

SCHEDULES = (
    *("uniform", "favour rank", "favour block", "starve rank", "starve block", "starve warp", "round robin"),
    "priorities",
)
"""Ways to choose who runs next."""


@dataclass(frozen=True)
class Launch:
    """A kernel of one rank.

    Attributes:
        rank: its number, for reports.
        num_blocks: of the grid.
        args: by parameter name: integers, floats, addresses. Names that the kernel does not have are ignored.
        inbox: address and size of memory that peers fill while it runs. When it ends, what their launches up to the same
            number among their rank's have stored there must have landed.
    """

    rank: int
    kernel: SimKernel
    num_blocks: int
    args: Mapping[str, int | float]
    inbox: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class MemoryRegion:
    """Memory that device-layer operations may touch. The caller keeps it alive."""

    address: int
    num_bytes: int
    name: str


@dataclass(frozen=True)
class SimOptions:
    """How to simulate.

    Attributes:
        max_steps: threads are resumed at most this often; more is a `SimStepLimit`.
        schedule: one of `SCHEDULES`; `None`: the seed chooses.
        stale_loads: weak loads may return what a location held before a change that the thread has not acquired.
        poison_shared: shared memory starts as 0xA5 bytes, else as zeros.
        phase_names: names for the phases of `ep_wait_tag` in reports.
    """

    max_steps: int = 200_000_000
    schedule: str | None = None
    stale_loads: bool = True
    poison_shared: bool = True
    phase_names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpiredWait:
    """A wait of `ep_wait_tag` that gave up."""

    rank: int
    block: int
    thread: int
    phase: int
    peer: int
    epoch: int


@dataclass(frozen=True)
class SimReport:
    """What happened.

    Attributes:
        style: what the seed chose, in words.
        steps: times a thread was resumed.
        operations: operations of the device layer.
        landed: stores that landed.
        fetched_bytes: by bulk loads, so that what is fetched twice shows.
        simulated_ns: time on the simulated clock.
        wall_s: time it took.
        trace: digest of the order in which threads ran and stores landed.
        expired: waits that gave up.
        stalled: who waited for what when time first had to leap ahead, empty if it never had to.
    """

    seed: int
    style: str
    steps: int
    operations: int
    landed: int
    fetched_bytes: int
    simulated_ns: int
    wall_s: float
    trace: int
    expired: tuple[ExpiredWait, ...]
    stalled: str


class SimError(TileEPError, RuntimeError):
    """The simulated program is wrong. The same seed, kernels and memory fail in the same way.

    Attributes:
        seed: of the simulation.
        report: what happened up to the error.
    """

    def __init__(self, message: str, report: SimReport) -> None:
        self.seed, self.report = report.seed, report
        super().__init__(f"{message}\n(seed {report.seed}: {report.style})")


class SimDeadlock(SimError):
    """Nothing is under way and no thread can go on. Says what each waits for."""


class SimMemoryFault(SimError):
    """An access outside the memory it may touch, or badly aligned."""


class SimMisuse(SimError):
    """A primitive is used against its rules: a collective, a barrier, the copy engine."""


class SimLateStore(SimError):
    """A launch ends while its inbox is still being written."""


class SimStepLimit(SimError):
    """No end within the step limit."""


_ERRORS: dict[int, type[SimError]] = {
    1: SimDeadlock,
    2: SimMemoryFault,
    3: SimMisuse,
    4: SimStepLimit,
    5: SimError,
    6: SimLateStore,
}


class _Launch(ctypes.Structure):
    _fields_ = [
        ("rank", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("static_shared", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_uint64)),
        ("inbox", ctypes.c_uint64),
        ("inbox_bytes", ctypes.c_uint64),
    ]


class _Region(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("name", ctypes.c_char_p)]


class _Settings(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("max_steps", ctypes.c_uint64),
        ("schedule", ctypes.c_int32),
        ("stale_loads", ctypes.c_int32),
        ("poison_shared", ctypes.c_int32),
    ]


class _Expired(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("rank", "block", "thread", "phase", "peer")] + [
        ("epoch", ctypes.c_uint64)
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int32),
        ("num_expired", ctypes.c_uint32),
        *(
            (name, ctypes.c_uint64)
            for name in ("steps", "operations", "landed", "fetched_bytes", "simulated_ns", "trace")
        ),
        ("style", ctypes.c_char * 512),
        ("message", ctypes.c_char * 16384),
        ("stalled", ctypes.c_char * 16384),
        ("expired", _Expired * 256),
    ]


_ENGINE_LOCK = threading.Lock()  # the engine runs one simulation at a time


def simulate(
    launches: Sequence[Launch],
    *,
    seed: int,
    regions: Sequence[MemoryRegion],
    options: SimOptions = SimOptions(),
) -> SimReport:
    """Run all launches together until every thread has ended and every store has landed.

    Args:
        launches: those of one rank run one after the other, in this order, as on a stream; a rank may be absent.
        seed: chooses the schedule, the delays and everything else that hardware leaves open.
        regions: memory that the device layer may touch. Those that overlap count as one.

    Raises:
        SimError: the program is wrong; the message says how, and the seed.
        ArgumentError: a launch does not fit its kernel.
    """
    if not launches:
        raise ArgumentError("launches", "none", "at least one")
    if options.schedule is not None and options.schedule not in SCHEDULES:
        raise ArgumentError("schedule", options.schedule, f"one of {', '.join(SCHEDULES)}")
    words = [_words(launch) for launch in launches]
    native_launches = (_Launch * len(launches))()
    for native, launch, packed in zip(native_launches, launches, words, strict=True):
        kernel = launch.kernel
        native.rank, native.num_blocks, native.num_threads = launch.rank, launch.num_blocks, kernel.num_threads
        native.static_shared, native.dynamic_shared = kernel.static_shared_bytes, kernel.dynamic_shared_bytes
        native.entry, native.arguments = kernel.entry, packed
        native.inbox, native.inbox_bytes = launch.inbox
    native_regions = (_Region * len(regions))()
    for region, wanted in zip(native_regions, regions, strict=True):
        region.address, region.bytes, region.name = wanted.address, wanted.num_bytes, wanted.name.encode()
    settings = _Settings(
        seed & (2**64 - 1),
        options.max_steps,
        -1 if options.schedule is None else SCHEDULES.index(options.schedule),
        options.stale_loads,
        options.poison_shared,
    )
    result = _Result()
    engine = load_engine()
    with _ENGINE_LOCK:
        start = time.perf_counter()
        engine.tile_ep_sim_run(
            native_launches, len(launches), native_regions, len(regions), ctypes.byref(settings), ctypes.byref(result)
        )
        wall_s = time.perf_counter() - start
    report = _report(seed, result, wall_s, options.phase_names)
    if result.code:
        raise _ERRORS[result.code](_explain(result.message.decode(errors="replace"), launches, options), report)
    return report


def _words(launch: Launch) -> ctypes.Array[ctypes.c_uint64]:
    """The arguments in the order of the device function, a 64-bit word each."""
    if launch.num_blocks < 1:
        raise ArgumentError("num_blocks", launch.num_blocks, "at least 1")
    parameters = launch.kernel.parameters
    missing = [parameter.name for parameter in parameters if parameter.name not in launch.args]
    if missing:
        raise ArgumentError("args", f"none for {', '.join(missing)}", f"all that kernel {launch.kernel.name} takes")
    words = (_word(parameter, launch.args[parameter.name]) for parameter in parameters)
    return (ctypes.c_uint64 * max(1, len(parameters)))(*words)


def _word(parameter: Parameter, value: float) -> int:
    packing = {"float": "<fxxxx", "double": "<d"}.get(parameter.ctype.removeprefix("const "))
    if packing is not None:
        return int.from_bytes(struct.pack(packing, value), "little")
    if not isinstance(value, int):
        raise ArgumentError(parameter.name, repr(value), f"an integer for a {parameter.ctype}")
    return value & (2**64 - 1)


def _name_phases(text: str, names: Mapping[int, str]) -> str:
    def name(match: re.Match[str]) -> str:
        number = int(match.group(1))
        return f"phase '{names[number]}'" if number in names else match.group(0)

    return re.sub(r"phase (\d+)(?= waiting)", name, text)


def _explain(message: str, launches: Sequence[Launch], options: SimOptions) -> str:
    text = _name_phases(message.rstrip(), options.phase_names)
    if " at line " in text:
        sources = dict.fromkeys(str(launch.kernel.source_path) for launch in launches)
        text += "\nlines of " + ", ".join(sources)
    return text


def _report(seed: int, result: _Result, wall_s: float, names: Mapping[int, str]) -> SimReport:
    expired = tuple(
        ExpiredWait(e.rank, e.block, e.thread, e.phase, e.peer, e.epoch) for e in result.expired[: result.num_expired]
    )
    return SimReport(
        seed=seed,
        style=result.style.decode(),
        steps=result.steps,
        operations=result.operations,
        landed=result.landed,
        fetched_bytes=result.fetched_bytes,
        simulated_ns=result.simulated_ns,
        wall_s=wall_s,
        trace=result.trace,
        expired=expired,
        stalled=_name_phases(result.stalled.decode(errors="replace"), names),
    )
