"""What a measurement ran on, and who else was there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

_PACKAGES = ("tilelang", "triton", "deep_ep", "flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass
class Machine:
    """Facts of this process's machine.

    Attributes:
        facts: by name.
        others: processes that used the GPU while this one did not hold it yet, and extra ones at the end.
    """

    facts: dict[str, Any]
    others: list[str] = field(default_factory=list)

    @classmethod
    def look(cls) -> Machine:
        """To be called before this process uses a GPU: whoever does so by then is somebody else."""
        return cls({}, others=gpu_processes())

    def describe(self, device: torch.device) -> None:
        """Fill in the facts, as they are now."""
        self.facts = {
            "host": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        }
        if device.type != "cuda":
            self.facts["cpus"] = os.cpu_count()
            return
        properties = torch.cuda.get_device_properties(device)
        self.facts |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", 0),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "clocks": query("gpu", "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw"),
        }

    def finish(self, device: torch.device, num_processes: int) -> None:
        """Fill in the facts again, and see who uses the GPU at the end.

        Args:
            num_processes: ours.
        """
        self.describe(device)
        if device.type == "cuda":
            new = [process for process in gpu_processes() if process not in self.others]
            self.others += new[num_processes:]


def gpu_processes() -> list[str]:
    """A line for each process that computes on a GPU, as far as the driver tells."""
    return query("compute-apps", "pid,process_name,used_memory")


def query(what: str, fields: str) -> list[str]:
    """Lines of `nvidia-smi`; none where there is no such program or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{what}={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
