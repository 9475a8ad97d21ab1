"""The exchange's primitives as TileLang calls; their leaves are in `primitives.cuh` and `device.cuh`.

Addresses are `uint64` expressions in this rank's address space, whoever owns the memory behind them. Whatever
another block or rank also touches is reached through these calls and never through a `T.Tensor`: the compiler
may cache, reorder or widen ordinary accesses, and the simulator models only these.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import tilelang.language as T

Expr = Any
"""A TIR expression or a Python number."""

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # a block barrier would land inside divergent loops
    "tl.disable_warp_specialized": True,
    "tl.disable_tma_lower": True,
    "tl.disable_loop_unswitching": True,  # splits loops on the thread index and tears warp collectives apart
    "tl.if_stmt_binding_inline_replayable_binds": False,  # would compute a value again at every use
    "tl.disable_data_race_check": True,
    "tl.disable_buffer_init_check": True,  # shared rows are written by the copy engine, which the check cannot see
    "tl.disable_safe_memory_legalize": True,  # off in the checked mode
}

_SUFFIX = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "float32": "f32"}
_UNSIGNED = {"int8": "uint8", "int16": "uint16", "int32": "uint32", "int64": "uint64"}


def leaves() -> str:
    """CUDA text of every leaf, for `T.import_source`."""
    here = resources.files("tile_ep.kernels")
    return "\n".join(here.joinpath(name).read_text() for name in ("device.cuh", "primitives.cuh"))


def u64(value: Expr) -> Expr:
    """`value` as an unsigned 64-bit expression."""
    return T.cast(value, "uint64")


def at(base: Expr, index: Expr, stride: int) -> Expr:
    """Address of element `index` of an array of `stride`-byte elements. No access, hence no bound."""
    return base + u64(index) * T.uint64(stride)


def get(address: Expr, dtype: str) -> Expr:
    """Weak load of one element."""
    unsigned = _UNSIGNED.get(dtype, dtype)
    value = T.call_extern(unsigned, f"ep_get_{_SUFFIX[unsigned]}", address)
    return value if unsigned == dtype else T.cast(value, dtype)


def put(address: Expr, value: Expr, dtype: str) -> Expr:
    """Weak store of one element."""
    unsigned = _UNSIGNED.get(dtype, dtype)
    return T.call_extern("handle", f"ep_put_{_SUFFIX[unsigned]}", address, T.cast(value, dtype))


def get_into(local: Expr, address: Expr, num_bytes: int) -> Expr:
    """2, 4 or 16 bytes, aligned to their number, into a local array of any type."""
    return T.call_extern("handle", f"ep_get_{num_bytes}", T.address_of(local), address)


def put_from(address: Expr, local: Expr, num_bytes: int) -> Expr:
    """2, 4 or 16 bytes, aligned to their number, out of a local array of any type."""
    return T.call_extern("handle", f"ep_put_{num_bytes}", address, T.address_of(local))


def copy_warp(address: Expr, source: Expr, num_bytes: Expr) -> Expr:
    """Copy by a converged warp: any size, any alignment, not a byte more. Both a put and a get."""
    return T.call_extern("handle", "ep_copy_warp", address, source, u64(num_bytes))


def copy_warp_words(address: Expr, source: Expr, num_bytes: Expr) -> Expr:
    """`copy_warp` of much at once, while the warp has nothing else to do: 4-byte words between multiples of 16."""
    return T.call_extern("handle", "ep_copy_warp_words", address, source, u64(num_bytes))


def zero_warp(address: Expr, num_bytes: Expr) -> Expr:
    """Zero bytes, by a converged warp."""
    return T.call_extern("handle", "ep_zero_warp", address, u64(num_bytes))


def index(value: Expr, number: int) -> Expr:
    """`value`, any int64, as an index below `number`; else -1. It is looked at once: an expression that named
    a load twice would load twice, and TileLang takes what was loaded for non-negative.
    """
    return T.call_extern("int32", "ep_index", value, number)


def multiply(a: Expr, b: Expr) -> Expr:
    """fp32 product, rounded, never fused with an addition."""
    return T.call_extern("float32", "__fmul_rn", a, b)


def store_release(address: Expr, word: Expr) -> Expr:
    """64-bit store, after everything this thread did or saw, for every rank."""
    return T.call_extern("handle", "ep_store_release_sys", address, word)


def store_relaxed(address: Expr, word: Expr) -> Expr:
    """64-bit store for every rank, of a word that says everything itself."""
    return T.call_extern("handle", "ep_store_relaxed_sys", address, word)


def add_release(address: Expr, value: Expr) -> Expr:
    """Add to a 64-bit word, after everything this thread did or saw, for every rank."""
    return T.call_extern("handle", "ep_add_release_sys", address, value)


def peek(address: Expr) -> Expr:
    """A word that says everything itself, as it is now: 64-bit load, in no order with anything else."""
    return T.call_extern("uint64", "ep_load_relaxed_sys", address)


def has_come(word: Expr, epoch: Expr) -> Expr:
    """Whether a tagged word is of `epoch`, or of a later one."""
    return T.call_extern("int32", "ep_has_come", word, epoch)


def tagged(epoch: Expr, value: Expr) -> Expr:
    """The word `(epoch << 32) | value`: a value that says which collective it belongs to."""
    return (epoch << T.uint64(32)) | u64(value)


def said(value: Expr) -> Expr:
    """A word for the host: `value` in its lower half, and never zero."""
    return T.uint64(1 << 63) | u64(value)


def wait_tag(address: Expr, tag: Expr, status: Expr, phase: int, peer: Expr, epoch: Expr, timeout_ns: Expr) -> Expr:
    """Wait until the upper half of the word at `address` has come to `tag`; the lower half, or -1 after `timeout_ns`.

    The expiry is recorded in `status`, a word per peer, with the epoch of the collective. An acquire: what the writer did
    before its release may be read afterwards.
    """
    return T.call_extern("int64", "ep_wait_tag", address, tag, status, phase, peer, epoch, timeout_ns)


def has_failed(s: Any, c: Any) -> Expr:
    """Not 0 once a wait of this rank has given up: until a reset its kernels must do nothing."""
    return get(c.own + T.uint64(s.control.failed), "int32")


@T.macro
def clear_flags(s: Any, c: Any) -> None:
    """A block's flags, by its first thread; a block barrier follows. 0: a wait gave up; 1: the kernel's own; 2: an earlier
    collective gave up, so this one must do nothing. And the counters that the next collective will take from are zero.
    """
    if c.tid == 0:
        c.flags[0] = 0
        c.flags[1] = 0
        c.flags[2] = has_failed(s, c)
        if c.block == 0:
            put(counter(c.own, s.control.taken, c.epoch + T.uint64(1)), 0, "uint32")
            put(counter(c.own, s.control.staged, c.epoch + T.uint64(1)), 0, "uint32")


def counter(own: Expr, counters: int, epoch: Expr) -> Expr:
    """Address of the counter of a collective: they alternate, so that each is zeroed while nobody counts with it."""
    return own + T.uint64(counters) + (epoch & T.uint64(1)) * T.uint64(4)


def number_of(own: Expr, tally_words: int, rank: Expr) -> Expr:
    """Collectives of a kind that this rank has been through, by its own tally word. The same in all blocks of the next one,
    whichever of them have left: it goes up with the last of them.
    """
    return peek(at(own + T.uint64(tally_words), rank, 8)) >> T.uint64(32)


@T.macro
def leave_block(s: Any, c: Any, tally_words: int) -> None:
    """A block tells every peer, by all of its threads, that it is through with what the tally word counts: all that its threads
    did is before, for every rank. It waits for no other block: the parts of all of them make one.
    """
    i = T.alloc_var("int32")
    part = T.alloc_var("uint64")
    T.sync_threads()
    part = T.uint64(1)
    if c.block == 0:
        part = T.uint64((1 << 32) + 1) - u64(c.num_blocks)
    i = c.tid
    while i < s.num_ranks:
        add_release(at(c.peers[i] + T.uint64(tally_words), c.rank, 8), part)
        i = i + s.threads


@T.macro
def wait_word(s: Any, c: Any, address: Any, tag: Any, phase: int, peer: Any, got: Any) -> None:
    """`wait_tag` into `got[0]`. One that gives up leaves word for its block, and for the collectives that follow."""
    got[0] = wait_tag(address, tag, c.status, phase, peer, c.epoch, c.timeout_ns)
    if got[0] < T.int64(0):
        c.flags[0] = 1
        put(c.own + T.uint64(s.control.failed), 1, "uint32")


@T.macro
def wait_for_all(s: Any, c: Any, tally_words: int, number: Any, phase: int) -> None:
    """By all threads of a block: every peer is through with `number` of what the tally words count."""
    i = T.alloc_var("int32")
    got = T.alloc_local((1,), "int64")
    i = c.tid
    while i < s.num_ranks:
        wait_word(s, c, at(c.own + T.uint64(tally_words), i, 8), number, phase, i, got)
        i = i + s.threads
    T.sync_threads()


def arrive_last(counter: Expr, num_blocks: Expr) -> Expr:
    """Arrival of a block, by one thread after a block barrier. 1 in the block that completes the grid.

    Orders within this device; what peers shall see is fenced by whoever wrote it, before the block barrier.
    """
    return T.call_extern("int32", "ep_arrive_last", counter, T.cast(num_blocks, "uint32"))


@T.macro
def arrive_block(c: Any, counter: Any) -> None:
    """A block's arrival, by all of its threads: `c.flags[1]` is 1 in the block that completes the grid, for all of them."""
    T.sync_threads()
    if c.tid == 0:
        c.flags[1] = arrive_last(counter, c.num_blocks)
    T.sync_threads()


def add_relaxed(address: Expr, value: Expr) -> Expr:
    """Add to a 32-bit counter of this rank, unordered; its value before."""
    return T.cast(T.call_extern("uint32", "ep_atomic_add_relaxed_gpu", address, T.cast(value, "uint32")), "int32")


def fence() -> Expr:
    """Orders what this thread did or saw before what it does next, for every rank."""
    return T.call_extern("handle", "ep_fence_sys")


def barrier_init(barrier: Expr, arrivals: int) -> Expr:
    """One thread initialises a shared-memory barrier; `barrier_init_fence` and a block barrier follow."""
    return T.call_extern("handle", "ep_barrier_init", T.address_of(barrier), arrivals)


def barrier_init_fence() -> Expr:
    """Makes initialised barriers visible to the copy engine."""
    return T.call_extern("handle", "ep_mbarrier_init_fence")


def barrier_wait(barrier: Expr, parity: Expr) -> Expr:
    """Wait for the phase of a shared-memory barrier to end. What was fetched on it may be read afterwards."""
    return T.call_extern("handle", "ep_mbarrier_wait", T.address_of(barrier), T.cast(parity, "int32"))


def fetch(shared: Expr, address: Expr, num_bytes: Expr, barrier: Expr) -> Expr:
    """One thread: bulk load into shared memory, completing on `barrier`. Addresses and size are multiples of 16."""
    return T.call_extern("handle", "ep_fetch", T.address_of(shared), address, num_bytes, T.address_of(barrier))


def push(address: Expr, shared: Expr, num_bytes: Expr) -> Expr:
    """One thread: bulk store from shared memory, in its current group. Addresses and size are multiples of 16."""
    return T.call_extern("handle", "ep_push", address, T.address_of(shared), num_bytes)


def push_streamed(address: Expr, shared: Expr, num_bytes: Expr) -> Expr:
    """`push` of what is not read again soon."""
    return T.call_extern("handle", "ep_push_streamed", address, T.address_of(shared), num_bytes)


def push_commit() -> Expr:
    """Close this thread's group of pushes."""
    return T.call_extern("handle", "ep_bulk_commit")


def push_wait_read(groups: int) -> Expr:
    """Wait until at most `groups` of this thread's latest groups still read shared memory."""
    return T.call_extern("handle", f"ep_bulk_wait_read<{groups}>")


def push_wait_all() -> Expr:
    """Wait until all of this thread's pushes have been written."""
    return T.call_extern("handle", "ep_bulk_wait_all")


def fence_async_shared() -> Expr:
    """Orders this thread's accesses of shared memory before later ones of the copy engine."""
    return T.call_extern("handle", "ep_fence_async_shared")


def fence_async_global() -> Expr:
    """The same for global memory: after rows were stored one way, before they are copied the other."""
    return T.call_extern("handle", "ep_fence_async_global")


def first_lane(mask: Expr) -> Expr:
    """The lowest lane of a non-empty `mask`."""
    return T.__ffs(T.cast(mask, "int32")) - 1


def lanes_below(mask: Expr, lane: Expr) -> Expr:
    """How many lanes of `mask` are below `lane`."""
    below = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
    return T.cast(T.popcount(mask & below), "int32")


def lanes_above(mask: Expr, lane: Expr) -> Expr:
    """The lanes of `mask` above `lane`, as a mask. Two shifts: one by 32 is undefined."""
    return (mask >> T.cast(lane, "uint32")) >> T.uint32(1)
