"""Small kernels, each of which leans on one thing that the simulator models. `mode` arguments break them at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tilelang
import tilelang.language as T
from tilelang import tvm

from tile_ep.kernels import primitives as ep
from tile_ep.sim import SimKernel, compile_source, launch_info

FULL = 0xFFFFFFFF
POISON = 0xA5A5A5A5
PHASE = 7


@functools.cache
def compiled(build: Callable[..., Any], *args: int) -> SimKernel:
    """`build(*args)`, lowered without a GPU and compiled for the simulator."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target, tvm.transform.PassContext(config=ep.PASS_CONFIGS):
        artifact = tilelang.lower(build(*args), target=target)
    info = launch_info(artifact)
    return compile_source(artifact.kernel_source, info.num_threads, info.dynamic_shared_bytes)


def warp_intrinsics() -> Any:
    """Every collective on a value per lane; results of lane `i` in row `i` of `out`, int32 [32, 10]."""

    @T.prim_func
    def kernel(value: T.Tensor((32,), "int32"), source: T.Tensor((32,), "int32"), out: T.Tensor((32, 10), "int32")):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            lane = T.get_thread_binding()
            v = T.alloc_var("int32")
            v = value[lane]
            out[lane, 0] = T.shfl_sync(v, source[lane])
            out[lane, 1] = T.shfl_up(v, 3)
            out[lane, 2] = T.shfl_down(v, 5)
            out[lane, 3] = T.shfl_xor(v, 9)
            out[lane, 4] = T.cast(T.match_any_sync(v), "int32")
            out[lane, 5] = T.cast(T.ballot_sync(v > 2), "int32")
            out[lane, 6] = T.any_sync(v == 5)
            out[lane, 7] = T.all_sync(v >= 0)
            out[lane, 8] = T.call_extern("int32", "__shfl_sync", T.uint32(FULL), v, source[lane], 8)
            out[lane, 9] = T.call_extern("int32", "__shfl_down_sync", T.uint32(FULL), v, 3, 8)

    return kernel


def partial_masks() -> Any:
    """Halves of a warp diverge, each has collectives of its own; out[lane] is the sum of its half's lanes."""

    @T.prim_func
    def kernel(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            lane = T.get_thread_binding()
            total = T.alloc_var("int32")
            half = T.alloc_var("uint32")
            total = 0
            half = T.if_then_else(lane < 16, T.uint32(0xFFFF), T.uint32(0xFFFF0000))
            for i in T.serial(16):
                if lane < 16:
                    total = total + T.call_extern("int32", "__shfl_sync", half, lane, i)
                else:
                    total = total + T.call_extern("int32", "__shfl_sync", half, lane, 16 + i)
            out[lane] = total

    return kernel


def conversions(dtype: str) -> Any:
    """fp32 to `dtype` and back."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), narrow: T.Tensor((n,), dtype), wide: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            lane = T.get_thread_binding()
            i = T.alloc_var("int32")
            i = lane
            while i < n:
                narrow[i] = T.cast(x[i], dtype)
                wide[i] = T.cast(narrow[i], "float32")
                i = i + 32

    return kernel


def copies() -> Any:
    """`ep_copy_warp` of each of `most + 1` sizes, for each pair of alignments; a destination of `stride` bytes each."""

    @T.prim_func
    def kernel(to: T.int64, source: T.int64, most: T.int32, stride: T.int32):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            for case in T.serial((most + 1) * 256):
                ep.copy_warp(
                    ep.at(ep.u64(to), T.int64(case) * stride + 16 + case % 16, 1),
                    ep.at(ep.u64(source), case // 16 % 16, 1),
                    case // 256,
                )

    return kernel


MESSAGE_MODES = {
    "release": 0,
    "fence, weak flag": 1,
    "weak flag": 2,
    "no barrier": 3,
    "flag first": 4,
    "weak wait": 5,
    "block barrier": 6,
    "other warp": 7,
}


def message() -> Any:
    """Rank 0 writes a word per lane to rank 1 and then a flag; rank 1 waits for the flag and copies the words to `out`.

    Lane 0 of the other warp of rank 0 sets the flag in "block barrier" and, with nothing in between, in "other warp".
    """

    @T.prim_func
    def kernel(data: T.int64, flag: T.int64, out: T.int64, status: T.int64, rank: T.int32, mode: T.int32):
        with T.Kernel(1, threads=64):
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            word = T.alloc_var("uint64")
            word = T.uint64(0)
            if rank == 0:
                if T.And(mode == 4, tid == 0):
                    ep.store_release(ep.u64(flag), ep.tagged(T.uint64(1), 0))
                if tid < 32:
                    ep.put(ep.at(ep.u64(data), tid, 4), tid + 1000, "int32")
                if T.And(mode == 1, tid < 32):
                    ep.fence()
                if T.And(mode != 3, T.And(mode != 6, tid < 32)):
                    T.sync_warp()
                if T.And(T.Or(mode == 0, mode == 5), tid == 0):
                    ep.store_release(ep.u64(flag), ep.tagged(T.uint64(1), 0))
                if T.And(T.Or(mode == 1, mode == 2), tid == 0):
                    ep.put(ep.u64(flag), ep.tagged(T.uint64(1), 0), "uint64")
                if T.And(mode == 3, tid == 0):
                    ep.store_release(ep.u64(flag), ep.tagged(T.uint64(1), 0))
                if mode == 6:
                    T.sync_threads()
                if T.And(T.Or(mode == 6, mode == 7), tid == 32):
                    ep.store_release(ep.u64(flag), ep.tagged(T.uint64(1), 0))
            if T.And(rank == 1, tid < 32):
                if T.And(tid == 0, mode != 5):
                    ep.wait_tag(ep.u64(flag), T.uint64(1), ep.u64(status), PHASE, 0, T.uint64(1), T.uint64(10**12))
                if T.And(tid == 0, mode == 5):
                    while word == T.uint64(0):
                        word = ep.get(ep.u64(flag), "uint64")
                        T.call_extern("handle", "ep_pause")
                T.sync_warp()
                ep.put(ep.at(ep.u64(out), tid, 4), ep.get(ep.at(ep.u64(data), tid, 4), "int32"), "int32")

    return kernel


def wait_only() -> Any:
    """Every rank tells `peer` that it is there and waits for `peer`; out[0] is what the wait gave."""

    @T.prim_func
    def kernel(mine: T.int64, theirs: T.int64, status: T.int64, out: T.int64, peer: T.int32, timeout_ns: T.int64):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            if tid == 0:
                ep.store_release(ep.u64(theirs), ep.tagged(T.uint64(3), 42))
                got = ep.wait_tag(
                    ep.u64(mine), T.uint64(3), ep.u64(status), PHASE, peer, T.uint64(3), ep.u64(timeout_ns)
                )
                ep.put(ep.u64(out), got, "int64")

    return kernel


BLOCK_MODES = {"barrier": 0, "no barrier": 1}


def neighbours() -> Any:
    """Each thread of a block writes a word and reads that of a thread of another warp."""

    @T.prim_func
    def kernel(words: T.int64, out: T.int64, mode: T.int32):
        with T.Kernel(1, threads=96):
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            ep.put(ep.at(ep.u64(words), tid, 4), tid + 1, "int32")
            if mode == 0:
                T.sync_threads()
            ep.put(ep.at(ep.u64(out), tid, 4), ep.get(ep.at(ep.u64(words), (tid + 40) % 96, 4), "int32"), "int32")

    return kernel


def warp_neighbours() -> Any:
    """Lanes write a word each; after a barrier of the first eight lanes, these read each other's words, the rest read those
    of lanes that they share no barrier with.
    """

    @T.prim_func
    def kernel(words: T.int64, out: T.int64):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            lane = T.get_thread_binding()
            ep.put(ep.at(ep.u64(words), lane, 4), lane + 1, "int32")
            if lane < 8:
                T.call_extern("handle", "__syncwarp", T.uint32(0xFF))
            ep.put(ep.at(ep.u64(out), lane, 4), ep.get(ep.at(ep.u64(words), lane ^ 7, 4), "int32"), "int32")

    return kernel


GRID_MODES = {"fence": 0, "device scope only": 1}


def grid_arrival() -> Any:
    """Every block of rank 0 writes a word to rank 1 and one to its own scratch, then arrives; the last one sums the scratch
    and sends the flag. Rank 1 copies the words to `out`.
    """

    @T.prim_func
    def kernel(
        data: T.int64, flag: T.int64, scratch: T.int64, counter: T.int64, out: T.int64, status: T.int64,
        rank: T.int32, mode: T.int32, num_blocks: T.int32, expected: T.int32,
    ):  # fmt: skip
        with T.Kernel(num_blocks, threads=32) as block:
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            last = T.alloc_shared((1,), "int32", scope="shared")
            total = T.alloc_var("int32")
            if rank == 0:
                ep.put(ep.at(ep.u64(data), block * 32 + tid, 4), block * 32 + tid + 1, "int32")
                if mode == 0:
                    ep.fence()
                ep.put(ep.at(ep.u64(scratch), block * 32 + tid, 4), 1, "int32")
                T.sync_threads()
                if tid == 0:
                    last[0] = ep.arrive_last(ep.u64(counter), num_blocks)
                T.sync_threads()
                if T.And(last[0] == 1, tid == 0):
                    total = 0
                    for i in T.serial(num_blocks * 32):
                        total = total + ep.get(ep.at(ep.u64(scratch), i, 4), "int32")
                    ep.store_release(ep.u64(flag), ep.tagged(T.uint64(1), total))
            if rank == 1:
                if tid == 0:
                    got = ep.wait_tag(
                        ep.u64(flag), T.uint64(1), ep.u64(status), PHASE, 0, T.uint64(1), T.uint64(10**12)
                    )
                    ep.put(ep.at(ep.u64(out), expected, 4), T.cast(got, "int32"), "int32")
                T.sync_threads()
                for b in T.serial(expected // 32):
                    ep.put(
                        ep.at(ep.u64(out), b * 32 + tid, 4),
                        ep.get(ep.at(ep.u64(data), b * 32 + tid, 4), "int32"), "int32",
                    )  # fmt: skip

    return kernel


def counter() -> Any:
    """Every thread of every rank and block adds one."""

    @T.prim_func
    def kernel(total: T.int64, num_blocks: T.int32):
        with T.Kernel(num_blocks, threads=64):
            T.import_source(ep.leaves())
            ep.add_relaxed(ep.u64(total), 1)

    return kernel


PUSH_MODES = {
    "right": 0,
    "no wait_all": 1,
    "no wait_read": 2,
    "no fence towards the copy engine": 3,
    "no commit": 4,
    "never waits": 5,
}


def pushes(num_chunks: int = 6) -> Any:
    """Lane 0 of rank 0 writes chunks of 64 bytes to shared memory, alternating between two, and pushes each to rank 1; then a
    flag. Rank 1 copies the chunks to `out`.
    """

    @T.prim_func
    def kernel(data: T.int64, flag: T.int64, out: T.int64, status: T.int64, rank: T.int32, mode: T.int32):
        with T.Kernel(1, threads=32):
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            stage = T.alloc_shared((2, 16), "int32", scope="shared.dyn")
            if T.And(rank == 0, tid == 0):
                for chunk in T.serial(num_chunks):
                    if mode != 2:
                        ep.push_wait_read(1)
                    for i in T.serial(16):
                        stage[chunk % 2, i] = chunk * 16 + i + 1
                    if mode != 3:
                        ep.fence_async_shared()
                    ep.push(ep.at(ep.u64(data), chunk * 16, 4), stage[chunk % 2, 0], 64)
                    if mode != 4:
                        ep.push_commit()
                if mode == 1:
                    ep.push_wait_read(0)
                if T.And(mode != 1, mode != 5):
                    ep.push_wait_all()
                ep.store_release(ep.u64(flag), ep.tagged(T.uint64(1), 0))
            if rank == 1:
                if tid == 0:
                    ep.wait_tag(ep.u64(flag), T.uint64(1), ep.u64(status), PHASE, 0, T.uint64(1), T.uint64(10**12))
                T.sync_warp()
                for chunk in T.serial(num_chunks):
                    if tid < 16:
                        ep.put(
                            ep.at(ep.u64(out), chunk * 16 + tid, 4),
                            ep.get(ep.at(ep.u64(data), chunk * 16 + tid, 4), "int32"), "int32",
                        )  # fmt: skip

    return kernel


FETCH_MODES = {
    "right": 0,
    "wrong parity": 1,
    "no init": 2,
    "no init fence": 3,
    "too few bytes": 4,
    "no wait": 5,
    "early refetch": 6,
    "no init barrier": 7,
    "overwrites the barrier": 8,
}


def fetches(num_chunks: int = 4) -> Any:
    """Lane 0 fetches chunks of 128 bytes into one piece of shared memory; all lanes copy each to `out`."""

    @T.prim_func
    def kernel(source: T.int64, out: T.int64, mode: T.int32):
        with T.Kernel(1, threads=64):
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            stage = T.alloc_shared((32,), "int32", scope="shared.dyn")
            bar = T.alloc_shared((2,), "uint64", scope="shared")
            flip = T.alloc_var("int32")
            flip = T.if_then_else(mode == 1, 1, 0)
            if T.And(tid == 0, mode != 2):
                ep.barrier_init(bar[0], 1)
                if mode != 3:
                    ep.barrier_init_fence()
            if mode != 7:
                T.sync_threads()
            for chunk in T.serial(num_chunks):
                if T.And(tid == 0, mode != 4):
                    ep.fetch(stage[0], ep.at(ep.u64(source), chunk * 32, 4), 128, bar[0])
                if T.And(tid == 0, mode == 4):
                    T.call_extern(
                        "handle", "ep_mbarrier_arrive_expect",
                        T.call_extern("uint32", "ep_shared_address", T.address_of(bar[0])), T.uint32(128),
                    )  # fmt: skip
                if T.And(tid == 0, mode == 8):
                    bar[0] = T.uint64(0)
                if mode != 5:
                    ep.barrier_wait(bar[0], (chunk + flip) % 2)
                if tid < 32:
                    ep.put(ep.at(ep.u64(out), chunk * 32 + tid, 4), stage[tid], "int32")
                if mode != 6:
                    T.sync_threads()

    return kernel


STUCK_MODES = {"half a warp": 0, "half a block": 1, "mixed collectives": 2, "foreign mask": 3, "spins": 4, "none": 5}


def stuck() -> Any:
    """Collectives that not everybody reaches."""

    @T.prim_func
    def kernel(word: T.int64, mode: T.int32):
        with T.Kernel(1, threads=64):
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            got = T.alloc_var("int32")
            got = 0
            if T.And(mode == 0, tid < 16):
                T.sync_warp()
            if T.And(mode == 0, T.And(tid >= 16, tid < 32)):
                T.call_extern("handle", "__syncwarp", T.uint32(0xFFFF0000))
                T.sync_threads()
            if T.And(mode == 1, tid < 32):
                T.sync_threads()
            if T.And(mode == 1, tid >= 32):
                while ep.get(ep.u64(word), "int32") == 0:
                    T.call_extern("handle", "ep_pause")
            if T.And(mode == 2, tid < 16):
                got = T.call_extern("int32", "__shfl_sync", T.uint32(FULL), got, 0)
            if T.And(mode == 2, T.And(tid >= 16, tid < 32)):
                T.sync_warp()
            if T.And(mode == 3, tid == 5):
                T.call_extern("handle", "__syncwarp", T.uint32(1))
            if T.And(mode == 4, tid == 0):
                while ep.get(ep.u64(word), "int32") == 0:
                    got = got + 1

    return kernel


ACCESS_MODES = {"inside": 0, "past the end": 1, "misaligned": 2, "bulk": 3, "wild": 4, "deep": 5, "divides": 6}


_BAD_LEAVES = """
EP_DEVICE int dig(int n) { volatile char hole[4096]; hole[0] = 1; return n == 0 ? hole[0] : dig(n - 1) + hole[0]; }
EP_DEVICE int divide(int a, int b) { return a / b; }
"""


def accesses() -> Any:
    """One access that may be wrong."""

    @T.prim_func
    def kernel(words: T.int64, num_words: T.int32, mode: T.int32, wild: T.Tensor((1,), "int32"), zero: T.int32):
        with T.Kernel(1, threads=64):
            T.import_source(ep.leaves() + _BAD_LEAVES)
            tid = T.get_thread_binding()
            stage = T.alloc_shared((32,), "int32", scope="shared.dyn")
            if tid == 37:
                if mode == 0:
                    ep.put(ep.at(ep.u64(words), num_words - 1, 4), 1, "int32")
                if mode == 1:
                    ep.put(ep.at(ep.u64(words), num_words + 1, 4), 1, "int32")
                if mode == 2:
                    ep.put(ep.u64(words) + T.uint64(2), 1, "int32")
                if mode == 3:
                    ep.push(ep.at(ep.u64(words), num_words - 2, 4), stage[0], 16)
                    ep.push_commit()
                    ep.push_wait_all()
                if mode == 4:
                    wild[0] = 1
                if mode == 5:
                    ep.put(ep.u64(words), T.call_extern("int32", "dig", num_words * 100), "int32")
                if mode == 6:
                    ep.put(ep.u64(words), T.call_extern("int32", "divide", num_words, zero), "int32")

    return kernel


def increment() -> Any:
    """Every thread adds one to its word, with a plain load and store."""

    @T.prim_func
    def kernel(words: T.int64, num_blocks: T.int32):
        with T.Kernel(num_blocks, threads=64) as block:
            T.import_source(ep.leaves())
            at = ep.at(ep.u64(words), block * 64 + T.get_thread_binding(), 4)
            ep.put(at, ep.get(at, "int32") + 1, "int32")

    return kernel


def crowd(num_warps: int, rounds: int) -> Any:
    """Warp and block barriers, many times."""

    @T.prim_func
    def kernel(out: T.int64, rank: T.int32, num_blocks: T.int32):
        with T.Kernel(num_blocks, threads=32 * num_warps) as block:
            T.import_source(ep.leaves())
            tid = T.get_thread_binding()
            total = T.alloc_var("int32")
            total = 0
            for _ in T.serial(rounds):
                total = total + T.shfl_xor(tid, 1)
                T.sync_threads()
            ep.put(ep.at(ep.u64(out), (rank * num_blocks + block) * (32 * num_warps) + tid, 4), total, "int32")

    return kernel
