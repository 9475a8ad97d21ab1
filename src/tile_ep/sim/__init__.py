"""The kernels on a CPU: compiles generated CUDA text with g++ and runs all ranks of it, deterministically from a seed."""

from tile_ep.sim.compile import LaunchInfo, SimKernel, compile_source, launch_info
from tile_ep.sim.runner import (
    SCHEDULES,
    ExpiredWait,
    Launch,
    MemoryRegion,
    SimDeadlock,
    SimError,
    SimLateStore,
    SimMemoryFault,
    SimMisuse,
    SimOptions,
    SimReport,
    SimStepLimit,
    simulate,
)

__all__ = [
    "SCHEDULES",
    "ExpiredWait",
    "Launch",
    "LaunchInfo",
    "MemoryRegion",
    "SimDeadlock",
    "SimError",
    "SimKernel",
    "SimLateStore",
    "SimMemoryFault",
    "SimMisuse",
    "SimOptions",
    "SimReport",
    "SimStepLimit",
    "compile_source",
    "launch_info",
    "simulate",
]
