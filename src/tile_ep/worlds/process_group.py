"""One rank a process, one process a GPU: regions from torch symmetric memory."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from tile_ep.worlds.cuda import CudaDevice

_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class ProcessGroupWorld(CudaDevice):
    """Ranks are the processes of a group on one host, whose GPUs reach each other's memory.

    Several ranks may share a GPU where `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1` allows it, which is for tests.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        torch.cuda.set_device(device)
        devices = _gather(group, str(torch.cuda.get_device_properties(device).uuid))
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device, devices.count(devices[group.rank()]))
        self._memory: Any = None

    def allocate(self, num_bytes: int) -> None:
        """Allocate and rendezvous, in one order on all ranks. Collective."""
        import torch.distributed._symmetric_memory as symmetric

        region = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        region.zero_()
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(region, self._group)
        self._memory = region, handle
        self._base = region.data_ptr()
        addresses = [int(address) for address in handle.buffer_ptrs]
        self.peers = torch.tensor(addresses, dtype=torch.int64).to(self.device).view(torch.uint64)
        self.gather(None)

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        return _gather(self._group, value)

    def destroy(self) -> None:
        """Drop the region."""
        self._memory = None


def _gather(group: dist.ProcessGroup, value: object) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def unavailable_reason(group: dist.ProcessGroup) -> str | None:
    """Why this process cannot exchange over peer memory, or `None`. Local, without side effects."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"compute capability {major}.{minor}, needs 9.0 or later"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size(group)))
    if local != dist.get_world_size(group):
        return f"the group spans several hosts ({socket.gethostname()} holds {local} of its ranks)"
    if torch.cuda.device_count() < dist.get_world_size(group) and os.environ.get(_OVERLAP) != "1":
        return f"{torch.cuda.device_count()} visible CUDA devices for {dist.get_world_size(group)} ranks"
    here = torch.cuda.current_device()
    for other in range(torch.cuda.device_count()):
        if other == here:
            continue
        if not torch.cuda.can_device_access_peer(here, other):
            return f"device {here} cannot access the memory of device {other}"
        if not _adds_natively(here, other):
            return f"device {here} cannot add to the memory of device {other} atomically, as it could over NVLink"
    return None


_NATIVE_ATOMIC = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver API


def _adds_natively(device: int, peer: int) -> bool:
    """Whether atomic operations of a device on a peer's memory are atomic."""
    driver = ctypes.CDLL("libcuda.so.1")
    ordinals = ctypes.c_int(), ctypes.c_int()
    supported = ctypes.c_int()
    for ordinal, number in zip(ordinals, (device, peer), strict=True):
        if driver.cuDeviceGet(ctypes.byref(ordinal), number) != 0:
            return False
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(supported), _NATIVE_ATOMIC, *ordinals)
    return bool(status == 0 and supported.value)
