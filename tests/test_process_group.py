"""What a process must have in order to exchange over peer memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tile_ep.worlds import process_group

GROUP: Any = None


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    "reached, added_to, reason",
    [
        ({0, 2}, {0, 2}, None),
        ({0}, {0, 2}, "device 1 cannot access the memory of device 2"),
        ({0, 2}, {2}, "device 1 cannot add to the memory of device 0 atomically, as it could over NVLink"),
    ],
)
def test_peers_are_reached_and_added_to(
    reached: set[int], added_to: set[int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: here == 1 and other in reached)
    monkeypatch.setattr(process_group, "_adds_natively", lambda here, other: here == 1 and other in added_to)
    assert process_group.unavailable_reason(GROUP) == reason


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device ordinals become the driver's, and what it does not answer is a no."""

    class Driver:
        def __init__(self, status: int) -> None:
            self.status = status

        def cuDeviceGet(self, to: Any, number: int) -> int:
            to._obj.value = 10 + number
            return 0

        def cuDeviceGetP2PAttribute(self, to: Any, attribute: int, device: Any, peer: Any) -> int:
            assert attribute == 3
            to._obj.value = (device.value, peer.value) == (11, 10)
            return self.status

    monkeypatch.setattr(process_group.ctypes, "CDLL", lambda name: Driver(0))
    assert process_group._adds_natively(1, 0)
    assert not process_group._adds_natively(1, 2)
    monkeypatch.setattr(process_group.ctypes, "CDLL", lambda name: Driver(1))
    assert not process_group._adds_natively(1, 0)
