"""The end of a buffer: destroyed twice, never, after its process group, at interpreter exit, or with a dying peer.

Each case is a process of its own (or several), which must end by itself and in time.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
import tile_ep
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
def make(**more):
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 4, "num_topk": 1, "num_experts": size, "timeout_s": 8}
    return tile_ep.Buffer(**{**sizes, **more})
def use(buffer):
    x, idx = torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    recv_x, _, _, handle, _ = buffer.dispatch(x, idx)
    assert len(recv_x) == (2 * size if rank == 0 else 0)
    assert torch.equal(buffer.combine(recv_x, handle)[0], x)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=8))
"""

SCRIPTS = {
    "destroyed twice": """
        buffer = make(); use(buffer)
        buffer.destroy(); buffer.destroy()
        dist.destroy_process_group()
        buffer.destroy()
    """,
    "never destroyed": """
        buffer = make(); use(buffer)
        dist.destroy_process_group()
    """,
    "nothing destroyed": """
        buffer = make(); use(buffer)
    """,
    "process group destroyed first": """
        buffer = make(); use(buffer)
        dist.destroy_process_group()
        use(buffer)  # the buffer has a communicator of its own
        buffer.destroy()
    """,
    "destroyed at interpreter exit": """
        import atexit
        buffer = make(); use(buffer)
        atexit.register(buffer.destroy)
        dist.destroy_process_group()
    """,
    "destroyed by the garbage collector at exit": """
        class Holder:
            def __init__(self, buffer): self.buffer = buffer; self.me = self
            def __del__(self): self.buffer.destroy()
        holder = Holder(make()); use(holder.buffer)
    """,
    "dropped, not destroyed": """
        import gc
        for _ in range(20):
            buffer = make(); use(buffer)
        del buffer; gc.collect()
        tasks = len(__import__("os").listdir("/proc/self/task"))
        assert tasks < 40, tasks
    """,
    "exits with an exception": """
        buffer = make(); use(buffer)
        raise SystemExit(0)
    """,
    "context manager": """
        with make() as buffer:
            use(buffer)
        try:
            use(buffer)
        except tile_ep.DestroyedError:
            pass
        else:
            raise AssertionError("used after destroy")
    """,
    "destroyed in a thread": """
        buffer = make(); use(buffer)
        thread = threading.Thread(target=buffer.destroy); thread.start(); thread.join()
        buffer.destroy()
    """,
    "others go on": """
        first, second = make(), make()
        use(first); use(second)
        first.destroy()
        use(second)
        second.destroy()
    """,
    "only some ranks destroy": """
        buffer = make(); use(buffer)
        if rank == 0: buffer.destroy()
    """,
}


def start(script: str, size: int, folder: Path) -> list[subprocess.Popen[str]]:
    code = PRELUDE + textwrap.dedent(script)
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(size), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each process."""
    answers = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            answers.append((process.returncode, output, errors))
        return answers
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("name", SCRIPTS)
def test_ends_by_itself(name: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    for code, _, errors in finish(start(SCRIPTS[name], 2, tmp_path), 30):
        assert code == 0, errors
        assert "Error" not in errors and "terminate" not in errors, errors
    if Path("/dev/shm").exists():
        assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "tile" in path.name}


DYING_PEER = """
    import os, time
    buffer = make(timeout_s=6); use(buffer)
    if rank == 1:
        os._exit(0)
    started = time.monotonic()
    try:
        use(buffer)
    except tile_ep.PeerTimeoutError as error:
        print(error.rank, error.peers, time.monotonic() - started < 8)
    buffer.destroy()
"""


def test_a_process_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    answers = finish(start(DYING_PEER, 3, tmp_path), 40)
    assert answers[0][:2] == (0, "0 [1] True\n"), answers[0]
    assert answers[2][:2] == (0, "2 [1] True\n"), answers[2]


EXIT_DURING_TIMEOUT = """
    import time
    buffer = make(timeout_s=2); use(buffer)
    if rank == 0:
        try:
            buffer.barrier()
        except tile_ep.PeerTimeoutError as error:
            print(error.peers)
        # no destroy: the process must still end
    else:
        time.sleep(5)
"""


def test_a_process_ends_after_a_timeout(tmp_path: Path) -> None:
    answers = finish(start(EXIT_DURING_TIMEOUT, 2, tmp_path), 30)
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert answers[0][1] == "[1]\n"
