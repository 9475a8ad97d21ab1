"""The simulator itself: what each modelled thing does, and that breaking it shows.

A fault that depends on the schedule must show within `FEW` seeds; the right program must pass `MANY`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tilelang")
if shutil.which("g++") is None:
    pytest.skip("the simulator needs g++", allow_module_level=True)

import sim_kernels as sk

from tile_ep import sim
from tile_ep.errors import ArgumentError, BackendUnavailableError
from tile_ep.sim import compile as sim_compile

FEW, MANY = 40, 300


class Memory:
    """Named arrays that device-layer operations may touch."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @property
    def regions(self) -> list[sim.MemoryRegion]:
        return [sim.MemoryRegion(array.ctypes.data, array.nbytes, name) for name, array in self.arrays.items()]

    def addresses(self) -> dict[str, int]:
        return {name: int(array.ctypes.data) for name, array in self.arrays.items()}


def words(number: int, fill: int = 0) -> np.ndarray:
    """int32 words, 16-byte aligned."""
    raw = np.empty(4 * number + 16, dtype=np.uint8)
    start = -raw.ctypes.data % 16
    array = raw[start : start + 4 * number].view(np.int32)
    array[:] = fill
    return array


def run(
    kernel: sim.SimKernel,
    memory: Memory,
    ranks: Mapping[int, Mapping[str, int]],
    seed: int = 0,
    num_blocks: int = 1,
    options: sim.SimOptions | None = None,
) -> sim.SimReport:
    """One launch a rank, the same kernel, all memory visible to all."""
    launches = [
        sim.Launch(rank, kernel, num_blocks, {**memory.addresses(), "rank": rank, "num_blocks": num_blocks, **args})
        for rank, args in ranks.items()
    ]
    return sim.simulate(launches, seed=seed, regions=memory.regions, options=options or sim.SimOptions())


# ---------------------------------------------------------------- the language


def test_warp_intrinsics_match_a_python_model() -> None:
    generator = np.random.default_rng(1)
    for trial in range(20):
        memory = Memory(value=words(32), source=words(32), out=words(320, -1))
        memory["value"][:] = value = generator.integers(0, 6, 32)
        memory["source"][:] = source = generator.integers(0, 32, 32)
        run(sk.compiled(sk.warp_intrinsics), memory, {0: {}}, seed=trial)
        lanes = np.arange(32)
        expected = np.empty((32, 10), dtype=np.int64)
        expected[:, 0] = value[source]
        expected[:, 1] = np.where(lanes >= 3, value[lanes - 3], value)
        expected[:, 2] = np.where(lanes < 27, value[(lanes + 5) % 32], value)
        expected[:, 3] = value[lanes ^ 9]
        expected[:, 4] = [sum(1 << j for j in range(32) if value[j] == value[i]) for i in range(32)]
        expected[:, 5] = sum(1 << j for j in range(32) if value[j] > 2)
        expected[:, 6] = (value == 5).any()
        expected[:, 7] = (value >= 0).all()
        expected[:, 8] = value[lanes // 8 * 8 + source % 8]
        expected[:, 9] = np.where(lanes % 8 < 5, value[(lanes + 3) % 32], value)
        assert np.array_equal(memory["out"].reshape(32, 10), expected.astype(np.uint32).view(np.int32))


def test_parts_of_a_warp_diverge() -> None:
    for seed in range(20):
        memory = Memory(out=words(32))
        run(sk.compiled(sk.partial_masks), memory, {0: {}}, seed=seed)
        assert memory["out"].tolist() == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversions_are_those_of_torch(dtype: str) -> None:
    kind = getattr(torch, dtype)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(kind).float()  # each value of the narrow type
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32, generator=generator).view(torch.float32)
    halfway = (every.view(torch.int32).long() + (0x8000 if dtype == "bfloat16" else 0x1000)).clamp(max=2**31 - 1)
    x = torch.cat([every, noise, halfway.int().view(torch.float32), torch.tensor([65519.99, 65520.0, 1e-8, 5e-8])])
    narrow, wide = torch.zeros_like(x, dtype=kind), torch.zeros_like(x)
    addresses = {"x": x.data_ptr(), "narrow": narrow.data_ptr(), "wide": wide.data_ptr(), "n": x.numel()}
    sim.simulate([sim.Launch(0, sk.compiled(sk.conversions, dtype), 1, addresses)], seed=0, regions=[])
    numbers = ~x.isnan()
    assert torch.equal(narrow[numbers].view(torch.int16), x[numbers].to(kind).view(torch.int16))
    assert narrow[~numbers].isnan().all()
    assert torch.equal(wide[numbers].view(torch.int32), narrow[numbers].float().view(torch.int32))


def test_copy_of_every_size_and_alignment() -> None:
    most, stride = 80, 128
    source = np.random.default_rng(0).integers(0, 256, 96 + 16, dtype=np.uint8)
    to = np.full((most + 1) * 256 * stride, 0xA5, dtype=np.uint8)
    memory = Memory(source=np.copy(source), to=np.copy(to))
    skew = [-array.ctypes.data % 16 for array in (memory["source"], memory["to"])]
    assert skew == [0, 0], "numpy aligns to 16 bytes"
    run(sk.compiled(sk.copies), memory, {0: {"most": most, "stride": stride}}, seed=3)
    for case in range((most + 1) * 256):
        start = case * stride + 16 + case % 16
        to[start : start + case // 256] = source[case // 16 % 16 :][: case // 256]
    assert np.array_equal(memory["to"], to)
    assert np.array_equal(memory["source"], source)


# ---------------------------------------------------------------- ordering of memory


def message(mode: str, seed: int, **options: bool) -> bool:
    """Whether rank 1 got what rank 0 sent."""
    memory = Memory(data=words(32, sk.POISON - 2**32), flag=words(4), out=words(32), status=words(4))
    args = {"mode": sk.MESSAGE_MODES[mode]}
    run(sk.compiled(sk.message), memory, {0: args, 1: args}, seed, options=sim.SimOptions(**options))
    return memory["out"].tolist() == list(range(1000, 1032))


@pytest.mark.parametrize("mode", ["release", "fence, weak flag", "block barrier"])
def test_ordered_messages_arrive(mode: str) -> None:
    assert all(message(mode, seed) for seed in range(MANY))


@pytest.mark.parametrize("mode", ["weak flag", "no barrier", "flag first", "weak wait", "other warp"])
def test_unordered_messages_are_caught(mode: str) -> None:
    assert not all(message(mode, seed) for seed in range(FEW))


def test_a_wait_without_acquire_is_caught_by_stale_loads_alone() -> None:
    assert all(message("weak wait", seed, stale_loads=False) for seed in range(FEW))


def test_neighbours_of_a_block() -> None:
    def right(mode: str, seed: int) -> bool:
        memory = Memory(words=words(96), out=words(96))
        run(sk.compiled(sk.neighbours), memory, {0: {"mode": sk.BLOCK_MODES[mode]}}, seed)
        return memory["out"].tolist() == [(tid + 40) % 96 + 1 for tid in range(96)]

    assert all(right("barrier", seed) for seed in range(MANY))
    assert not all(right("no barrier", seed) for seed in range(FEW))


def test_a_barrier_of_some_lanes_orders_these_alone() -> None:
    wrong = np.zeros(32, dtype=bool)
    for seed in range(MANY):
        memory = Memory(words=words(32), out=words(32))
        run(sk.compiled(sk.warp_neighbours), memory, {0: {}}, seed)
        wrong |= memory["out"] != [(lane ^ 7) + 1 for lane in range(32)]
    assert not wrong[:8].any()
    assert wrong[8:].all()


def test_device_scope_does_not_reach_other_ranks() -> None:
    def right(mode: str, seed: int) -> bool:
        blocks = 3
        number = 32 * blocks
        memory = Memory(
            **{name: words(number) for name in ("data", "scratch")},
            **{name: words(4) for name in ("flag", "counter", "status")},
            out=words(number + 1),
        )
        args = {"mode": sk.GRID_MODES[mode], "expected": number}
        kernel = sk.compiled(sk.grid_arrival)
        launches = [
            sim.Launch(rank, kernel, count, {**memory.addresses(), **args, "rank": rank, "num_blocks": count})
            for rank, count in ((0, blocks), (1, 1))
        ]
        sim.simulate(launches, seed=seed, regions=memory.regions)
        assert memory["out"][number] == number  # what the rank's own blocks wrote is always seen
        assert memory["counter"][0] == 0
        return memory["out"][:number].tolist() == list(range(1, number + 1))

    assert all(right("fence", seed) for seed in range(MANY))
    assert not all(right("device scope only", seed) for seed in range(FEW))


def test_atomics_do_not_lose_counts() -> None:
    for seed in range(20):
        memory = Memory(total=words(4))
        run(sk.compiled(sk.counter), memory, {0: {}, 1: {}, 2: {}}, seed, num_blocks=2)
        assert memory["total"][0] == 3 * 2 * 64


# ---------------------------------------------------------------- what must have landed when a launch ends


def test_what_a_launch_was_sent_has_landed_at_its_end() -> None:
    def run_pushes(mode: str, seed: int) -> None:
        memory = Memory(data=words(96), flag=words(4), out=words(96), status=words(4))
        args = {**memory.addresses(), "mode": sk.PUSH_MODES[mode]}
        inbox = (memory["data"].ctypes.data, memory["data"].nbytes)
        kernel = sk.compiled(sk.pushes)
        launches = [
            sim.Launch(0, kernel, 1, {**args, "rank": 0}, inbox),  # its own stores do not count
            sim.Launch(1, kernel, 1, {**args, "rank": 1}, inbox),
        ]
        sim.simulate(launches, seed=seed, regions=memory.regions)

    for seed in range(MANY):
        run_pushes("right", seed)
    with pytest.raises(sim.SimLateStore, match=r"launch 0 of rank 1 ends .* bulk store .* by rank 0 .* 'data'"):
        for seed in range(FEW):
            run_pushes("no wait_all", seed)


def simulate_messages(modes: tuple[str, ...], inboxes: tuple[bool, ...], seed: int) -> None:
    """A launch of rank 0, which sends, for each mode; one of rank 1, which receives, for each of `inboxes`."""
    memory = Memory(data=words(32), flag=words(4), out=words(32), status=words(4))
    kernel, data = sk.compiled(sk.message), memory["data"]
    launches = [
        sim.Launch(0, kernel, 1, {**memory.addresses(), "rank": 0, "mode": sk.MESSAGE_MODES[mode]}) for mode in modes
    ]
    args = {**memory.addresses(), "rank": 1, "mode": sk.MESSAGE_MODES["release"]}
    launches += [sim.Launch(1, kernel, 1, args, (data.ctypes.data, data.nbytes) if has else (0, 0)) for has in inboxes]
    sim.simulate(launches, seed=seed, regions=memory.regions)


def test_launches_are_counted_to_know_what_must_have_landed() -> None:
    for seed in range(MANY):
        simulate_messages(("release", "release"), (True,), seed)  # the second message is not for this launch
    for inboxes in ((True,), (False, True)):  # the first one is, and is for those that follow
        with pytest.raises(
            sim.SimLateStore, match=f"launch {len(inboxes) - 1} of rank 1 ends while a store of launch 0"
        ):
            for seed in range(FEW):
                simulate_messages(("flag first",), inboxes, seed)


def wait_and_store(seed: int, come: tuple[bool, ...]) -> None:
    """Rank 0 waits, as long as the first launch of rank 1 does, and then stores to the inbox of all launches of rank 1. For
    each of these its peer has come, or has not.
    """
    memory = Memory(**{name: words(4) for name in ("inbox", "out", "status", "theirs", "absent", "present")})
    memory["present"].view(np.int64)[0] = 3 << 32
    at = memory.addresses()

    def launch(rank: int, has_come: bool, out: str, inbox: tuple[int, int]) -> sim.Launch:
        args = {**at, "mine": at["present" if has_come else "absent"], "out": at[out], "peer": 1, "timeout_ns": 1000}
        return sim.Launch(rank, sk.compiled(sk.wait_only), 1, args, inbox)

    inbox = (at["inbox"], memory["inbox"].nbytes)
    launches = [launch(0, come[0], "inbox", (0, 0)), *(launch(1, has_come, "out", inbox) for has_come in come)]
    sim.simulate(launches, seed=seed, regions=memory.regions)


def test_who_gave_up_a_wait_reads_nothing() -> None:
    with pytest.raises(sim.SimLateStore, match="a store of launch 0 by rank 0 "):
        for seed in range(FEW):
            wait_and_store(seed, (True,))
    for seed in range(MANY):
        wait_and_store(seed, (False,))
        wait_and_store(seed, (False, True))


# ---------------------------------------------------------------- the copy engine


def pushed(mode: str, seed: int) -> bool:
    memory = Memory(data=words(96), flag=words(4), out=words(96), status=words(4))
    args = {"mode": sk.PUSH_MODES[mode]}
    run(sk.compiled(sk.pushes), memory, {0: args, 1: args}, seed)
    return memory["out"].tolist() == list(range(1, 97))


def test_pushes_arrive() -> None:
    assert all(pushed("right", seed) for seed in range(MANY))


@pytest.mark.parametrize("mode", ["no wait_all", "no wait_read"])
def test_pushes_without_a_wait_are_caught(mode: str) -> None:
    assert not all(pushed(mode, seed) for seed in range(FEW))


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("no fence towards the copy engine", "no fence towards the copy engine"),
        ("no commit", "uncommitted bulk stores"),
        ("never waits", "still read shared memory"),
    ],
)
def test_misused_pushes_are_named(mode: str, text: str) -> None:
    with pytest.raises(sim.SimMisuse, match=text):
        for seed in range(FEW):
            pushed(mode, seed)


def fetched(mode: str, seed: int) -> bool:
    memory = Memory(source=words(128), out=words(128))
    memory["source"][:] = np.arange(128) + 1
    run(sk.compiled(sk.fetches), memory, {0: {"mode": sk.FETCH_MODES[mode]}}, seed)
    return memory["out"].tolist() == list(range(1, 129))


def test_fetches_arrive() -> None:
    assert all(fetched("right", seed) for seed in range(MANY))


@pytest.mark.parametrize("mode", ["no wait", "early refetch"])
def test_fetches_without_a_wait_are_caught(mode: str) -> None:
    with pytest.raises((AssertionError, sim.SimError)):
        assert all(fetched(mode, seed) for seed in range(FEW))


def test_the_wrong_parity_is_caught() -> None:
    with pytest.raises((AssertionError, sim.SimError)):
        assert fetched("wrong parity", 0)


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [
        ("no init", sim.SimMisuse, "not initialised"),
        ("no init fence", sim.SimMisuse, "initialised without a fence"),
        ("no init barrier", sim.SimMisuse, "not (synchronised with the barrier's initialisation|initialised)"),
        (
            "too few bytes",
            sim.SimDeadlock,
            "mbarrier at shared offset 0, parity 0: in phase 0, 0 arrivals and 128 bytes",
        ),
        ("overwrites the barrier", sim.SimMisuse, "overwrote the barrier"),
    ],
)
def test_misused_barriers_are_named(mode: str, error: type[sim.SimError], text: str) -> None:
    with pytest.raises(error, match=text):
        for seed in range(FEW):
            fetched(mode, seed)


# ---------------------------------------------------------------- waiting


def stick(mode: str, **options: int) -> None:
    memory = Memory(word=words(4))
    run(sk.compiled(sk.stuck), memory, {4: {"mode": sk.STUCK_MODES[mode]}}, 5, options=sim.SimOptions(**options))


def test_deadlocks_name_who_waits_for_what() -> None:
    with pytest.raises(sim.SimDeadlock) as caught:
        stick("half a warp")
    text = str(caught.value)
    assert "rank 4 block 0 warp 0 lanes 0000ffff: __syncwarp at line " in text
    assert "mask ffffffff, of which lanes ffff0000 have not come" in text
    assert "rank 4 block 0 warp 0 lanes ffff0000: __syncthreads at line " in text
    assert "seed 5" in text
    line = int(text.split("__syncthreads at line ")[1].split(",")[0])
    source = Path(text.rsplit("lines of ", 1)[1].splitlines()[0]).read_text().splitlines()
    assert "__syncthreads()" in source[line - 1]

    with pytest.raises(
        sim.SimDeadlock, match=r"warp 0 lanes ffffffff: __syncthreads at line \d+, 32 of 64 threads"
    ) as caught:
        stick("half a block")
    assert "warp 1 lanes ffffffff: pausing, no flag known" in str(caught.value)
    stick("none")


def test_mixed_collectives_are_named() -> None:
    with pytest.raises(sim.SimMisuse, match=r"__s.* at line .*, while lane .* of the same mask ffffffff is in __s"):
        stick("mixed collectives")
    with pytest.raises(sim.SimMisuse, match=r"lane 5 .*the mask 00000001 does not name the calling lane"):
        stick("foreign mask")


def test_endless_spinning_hits_the_step_limit() -> None:
    with pytest.raises(sim.SimStepLimit, match="no end after"):
        stick("spins", max_steps=20_000)


def wait(ranks: list[int], timeout_ns: int, seed: int = 0) -> tuple[Memory, sim.SimReport]:
    memory = Memory(
        **{f"flag {rank}": words(4) for rank in (0, 1)},
        **{f"status {rank}": words(4) for rank in (0, 1)},
        **{f"out {rank}": words(4) for rank in (0, 1)},
    )
    at = memory.addresses()
    args = {
        rank: {
            "mine": at[f"flag {rank}"], "theirs": at[f"flag {1 - rank}"], "status": at[f"status {rank}"],
            "out": at[f"out {rank}"], "peer": 1 - rank, "timeout_ns": timeout_ns,
        }
        for rank in ranks
    }  # fmt: skip
    options = sim.SimOptions(phase_names={sk.PHASE: "roll call"})
    return memory, run(sk.compiled(sk.wait_only), memory, args, seed, options=options)


def test_waits_end_when_the_peer_comes() -> None:
    for seed in range(50):
        memory, report = wait([0, 1], timeout_ns=10**9, seed=seed)
        assert [memory[f"out {rank}"].view(np.int64)[0] for rank in (0, 1)] == [42, 42]
        assert report.expired == () and report.simulated_ns < 10**6


def test_waits_for_an_absent_rank_expire() -> None:
    timeout_ns = 300 * 10**9
    memory, report = wait([0], timeout_ns=timeout_ns)
    assert memory["out 0"].view(np.int64)[0] == -1
    assert memory["status 0"].view(np.int64)[1] == 3 << 32 | sk.PHASE
    assert report.expired == (sim.ExpiredWait(rank=0, block=0, thread=0, phase=sk.PHASE, peer=1, epoch=3),)
    assert timeout_ns < report.simulated_ns < 3 * timeout_ns
    assert (
        "rank 0 block 0 warp 0 lanes 00000001: phase 'roll call' waiting for peer 1, epoch 3: polls 'flag 0' + 0, "
        "which holds 0x0" in report.stalled
    )


# ---------------------------------------------------------------- faults


def access(mode: str) -> Memory:
    memory = Memory(before=words(8), words=words(8))
    args = {"mode": sk.ACCESS_MODES[mode], "num_words": 8, "wild": 64, "zero": 0}
    run(sk.compiled(sk.accesses), memory, {2: args})
    return memory


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("past the end", "store of 4 bytes at 0x.*, 4 bytes past the end of the nearest region 'words' of 32 bytes"),
        ("misaligned", r"store of 4 bytes at 'words' \+ 2 is not aligned to 4"),
        ("bulk", "bulk store of 16 bytes at .* is (outside the memory it may touch|not aligned to 16)"),
        ("wild", "fault of an ordinary access at 0x40"),
        ("deep", "the simulated thread's stack overflows"),
        ("divides", "integer division by zero"),
    ],
)
def test_faults_name_the_thread_and_the_place(mode: str, text: str) -> None:
    with pytest.raises(sim.SimMemoryFault, match=rf"rank 2 block 0 warp 1 lane 5 \(thread 37\): {text}"):
        access(mode)
    assert access("inside")["words"].tolist() == [0] * 7 + [1]  # and the process goes on


# ---------------------------------------------------------------- seeds


def test_a_seed_is_a_schedule() -> None:
    def trace(seed: int) -> tuple[int, int, str]:
        memory = Memory(data=words(96), flag=words(4), out=words(96), status=words(4))
        report = run(sk.compiled(sk.pushes), memory, {0: {"mode": 0}, 1: {"mode": 0}}, seed)
        return report.trace, report.steps, report.style

    first = [trace(seed) for seed in range(50)]
    assert [trace(seed) for seed in range(50)] == first  # at other addresses
    assert len({trace for trace, _, _ in first}) == 50
    assert {style.split(",")[0].rstrip(" 0123456789") for _, _, style in first} == set(sim.SCHEDULES)


def test_the_schedule_can_be_chosen() -> None:
    memory = Memory(total=words(4))
    report = run(sk.compiled(sk.counter), memory, {0: {}}, options=sim.SimOptions(schedule="round robin"))
    assert report.style.startswith("round robin")
    with pytest.raises(ArgumentError, match="schedule"):
        run(sk.compiled(sk.counter), memory, {0: {}}, options=sim.SimOptions(schedule="fair"))


def test_launches_of_a_rank_follow_each_other() -> None:
    kernel = sk.compiled(sk.increment)
    for seed in range(MANY):
        memory = Memory(**{f"words {rank}": words(192) for rank in range(3)})
        at = memory.addresses()
        launches = [
            sim.Launch(rank, kernel, blocks, {"words": at[f"words {rank}"], "num_blocks": blocks})
            for rank, grids in ((0, (1, 3, 2)), (1, (2, 2)), (2, (3, 3, 3, 3)))
            for blocks in grids
        ]
        sim.simulate(launches, seed=seed, regions=memory.regions)
        assert memory["words 0"].tolist() == [3] * 64 + [2] * 64 + [1] * 64
        assert memory["words 1"].tolist() == [2] * 128 + [0] * 64
        assert memory["words 2"].tolist() == [4] * 192


def test_many_threads() -> None:
    ranks, blocks, warps = 8, 4, 16
    memory = Memory(out=words(ranks * blocks * warps * 32))
    report = run(sk.compiled(sk.crowd, warps, 20), memory, {rank: {} for rank in range(ranks)}, num_blocks=blocks)
    expected = 20 * (np.arange(warps * 32) ^ 1)
    assert np.array_equal(memory["out"].reshape(-1, warps * 32), np.tile(expected, (ranks * blocks, 1)))
    assert report.steps > ranks * blocks * warps * 32 * 20


# ---------------------------------------------------------------- compiling


def test_arguments_go_by_name() -> None:
    with pytest.raises(ArgumentError, match="none for num_blocks, total, expected all that kernel kernel_kernel takes"):
        sim.simulate([sim.Launch(0, sk.compiled(sk.counter), 1, {})], seed=0, regions=[])
    names = [parameter.name for parameter in sk.compiled(sk.accesses).parameters]
    assert set(names) == {"words", "num_words", "mode", "wild", "zero"}


SOURCE = """
#include <tl_templates/cuda/reduce.h>
extern "C" __global__ void tiny_kernel(float* __restrict__ out, float scale, int n);
extern "C" __global__ void __launch_bounds__(32, 1) tiny_kernel(float* __restrict__ out, float scale, int n) {
  __shared__ __align__(16) float kept[32];
  extern __shared__ __align__(1024) float given[];
  kept[threadIdx.x] = scale;
  given[threadIdx.x] = tl::warp_reduce_sum(kept[threadIdx.x]);
  if ((int)threadIdx.x < n) out[threadIdx.x] = given[threadIdx.x];
}
"""


def test_the_cache_is_used(tmp_path: Path) -> None:
    kernel = sim.compile_source(SOURCE, cache_dir=tmp_path)
    assert (kernel.num_threads, kernel.static_shared_bytes) == (32, 128)
    stamp = kernel.library_path.stat().st_mtime_ns
    again = sim.compile_source(SOURCE, dynamic_shared_bytes=128, cache_dir=tmp_path)
    assert again.library_path.stat().st_mtime_ns == stamp
    assert sim.compile_source(SOURCE + "// other", cache_dir=tmp_path).library_path != kernel.library_path
    out = np.zeros(32, dtype=np.float32)
    sim.simulate([sim.Launch(0, again, 1, {"out": out.ctypes.data, "scale": 0.5, "n": 20})], seed=0, regions=[])
    assert out.tolist() == [16.0] * 20 + [0.0] * 12


def test_what_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="one"):
        sim.compile_source("int x;", cache_dir=tmp_path)
    with pytest.raises(ArgumentError, match="shared"):
        sim.compile_source(SOURCE.replace("float kept[32]", "float kept[4][8]"), cache_dir=tmp_path)
    with pytest.raises(ArgumentError, match="num_threads"):
        sim.compile_source(SOURCE, num_threads=64, cache_dir=tmp_path)
    with pytest.raises(RuntimeError, match="does not compile"):
        sim.compile_source(SOURCE.replace("scale;", "unknown;"), cache_dir=tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    sim_compile._compiler.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match="install the package 'g\\+\\+'"):
            sim.compile_source(SOURCE, cache_dir=tmp_path)
    finally:
        monkeypatch.undo()
        sim_compile._compiler.cache_clear()


def test_the_device_layers_agree() -> None:
    """Function by function: the same names, parameters and results."""

    def functions(path: Path) -> set[str]:
        text = re.sub(r"//.*", "", path.read_text())
        found = re.findall(r"((?:template <[^>]*> )?EP_DEVICE [\w ]+? ep_\w+\([^)]*\)) \{", text)
        return {" ".join(signature.split()) for signature in found}

    package = Path(sim_compile.__file__).parent.parent
    device = functions(package / "kernels" / "device.cuh")
    assert len(device) > 15
    assert functions(package / "sim" / "include" / "sim_device.h") == device


def test_no_warnings(tmp_path: Path) -> None:
    """The engine and the stand-in headers are clean under -Wall -Wextra."""
    (tmp_path / "headers.cpp").write_text('#include "sim_device.h"\n#include "sim_waits.h"\n')
    here = Path(sim_compile.__file__).parent
    for source in (here / "engine" / "engine.cpp", tmp_path / "headers.cpp"):
        subprocess.run(
            [
                *("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"),
                *(f"-I{here / 'include'}", str(source)),
            ],
            check=True,
        )
