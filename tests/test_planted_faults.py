"""The simulator bites: each fault planted into the generated source is found within `SEEDS` seeds.

A fault is a change of the text that TileLang generates for the real kernels, or of their leaves. What it is found by is a
wrong byte, rows still under way when their receiver goes on, a deadlock, a misuse of a primitive or a wait that gives up;
without it all seeds pass.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

import tile_ep
from tile_ep import Buffer, reference
from tile_ep.backends.nvlink import NvlinkBackend
from tile_ep.handle import EPHandle
from tile_ep.kernels.dispatch import DispatchSpec
from tile_ep.kernels.launcher import KernelSpec, cuda_source
from tile_ep.kernels.tuning import SIMULATOR
from tile_ep.sim import Launch, SimError, SimKernel, compile_source
from tile_ep.worlds import simulated

SEEDS = 40


@dataclass(frozen=True)
class Fault:
    """A change of a kernel's text.

    Attributes:
        kernel: "dispatch", "cached dispatch" (that one alone) or "combine".
        pattern, replacement: as for `re.sub`; every match is replaced, and there must be one.
        why: what the line is for.
        pushes: in the variant of combine that pushes rows.
        few: in the dispatch of few tokens, of which every block counts all.
        tokens: of the first rank; each later one has one less.
    """

    name: str
    kernel: str
    pattern: str
    replacement: str
    why: str
    pushes: bool = False
    few: bool = False
    tokens: int = 9

    def is_in(self, spec: KernelSpec) -> bool:
        """Whether it is planted into the kernel of `spec`."""
        if not isinstance(spec, DispatchSpec):
            return self.kernel == "combine"
        return self.kernel == "dispatch" or (self.kernel == "cached dispatch" and spec.cached)


ANNOUNCED_EARLY = [
    Fault(
        "rows under way",
        "dispatch",
        r"ep_bulk_wait_all\(\);",
        "ep_bulk_wait_read<0>();",
        "what shared memory held has arrived before the done word says so",
    ),
    Fault(
        "rows under way, cached",
        "cached dispatch",
        r"ep_bulk_wait_all\(\);",
        "ep_bulk_wait_read<0>();",
        "a cached dispatch tells its peers that rows have arrived, too",
    ),
    Fault(
        "done word without release, cached",
        "cached dispatch",
        r"ep_add_release_sys\((\(\(peers.*), part\)",
        r"tile_ep_sim_add(\1, part, 0)",
        "a cached dispatch orders the rows of a block before its done word, too",
    ),
]
"""A receiver that looks late enough sees nothing wrong."""

FAULTS = [
    *ANNOUNCED_EARLY,
    Fault(
        "flag before rows", "dispatch", r"ep_bulk_wait_all\(\);", "", "rows are written before the done word says so"
    ),
    Fault(
        "done word without release",
        "dispatch",
        r"ep_add_release_sys\((\(\(peers.*), part\)",
        r"tile_ep_sim_add(\1, part, 0)",
        "what the threads of a block wrote is ordered before its done word, for peers too",
    ),
    Fault(
        "done word ahead of other warps",
        "dispatch",
        r"__syncthreads\(\);(?=\s+part\w* = )",
        "",
        "a block's part of the done word speaks for all its warps",
    ),
    Fault(
        "one block's part is all of the done word",
        "dispatch",
        r"\(uint64_t\)4294967297 - ",
        "(uint64_t)4294967296 + 0 * ",
        "a rank's rows are there when each of its blocks has said so",
    ),
    Fault(
        "one block's part is all of the read-done word",
        "combine",
        r"\(uint64_t\)4294967297 - ",
        "(uint64_t)4294967296 + 0 * ",
        "a rank's rows are read when each of the reader's blocks has said so",
    ),
    Fault(
        "read-done word ahead of other warps",
        "combine",
        r"__syncthreads\(\);(?=\s+\}\s+if \(alive == 1\) \{\s+part\w* = )",
        "",
        "a block's part of the read-done word speaks for all its warps",
    ),
    Fault(
        "no entry wait",
        "dispatch",
        r"got(\w*)\[0\] = ep_wait_tag\((.*), tag\w*, [^;]*, 1, [^;]*\);",
        r"got\1[0] = (int64_t)(ep_load_acquire_sys(\2) & 0xffffffffu);",
        "a peer's slot is written only after the peer has entered",
    ),
    Fault(
        "no wait for the counts of experts",
        "dispatch",
        r"got(\w*)\[0\] = ep_wait_tag\((.*), tag\w*, [^;]*, 2, [^;]*\);",
        r"got\1[0] = (int64_t)(ep_load_acquire_sys(\2) & 0xffffffffu);",
        "the handle's counts are those of all ranks",
    ),
    *(
        Fault(
            f"counter left as it was, {kernel}",
            kernel,
            r"ep_put_u32\(\(\(own \+ \(uint64_t\)\d+\) \+ \(\(\(epoch \+ \(uint64_t\)1\) & [^;]*;",
            "",
            "warps take the work of a collective from its beginning",
        )
        for kernel in ("dispatch", "combine")
    ),
    Fault("base off by one", "dispatch", r"(start\[\w+\] = \w+);", r"\1 + 1;", "rows of earlier ranks come first"),
    Fault(
        "stale epoch, dispatch",
        "dispatch",
        r"(epoch = .*) \+ \(uint64_t\)1\);",
        r"\1);",
        "words of the previous collective do not count",
    ),
    Fault(
        "stale epoch, combine",
        "combine",
        r"(epoch = .*) \+ \(uint64_t\)1\);",
        r"\1);",
        "words of the previous collective do not count",
    ),
    Fault(
        "chunk reused early",
        "dispatch",
        r"ep_bulk_wait_read<1>\(\);",
        "ep_bulk_wait_read<2>();",
        "a chunk is fetched into memory that stores have read",
    ),
    Fault(
        "tail bytes lost",
        "dispatch",
        r"if \(lane < tail\) ep_store<uint8_t>\(to \+ body \+ lane[^;]*;",
        "",
        "rows of any size arrive whole",
    ),
    Fault(
        "tallies before all blocks counted",
        "dispatch",
        r"flags\[1\] = ep_arrive_last\([^;]*;",
        "flags[1] = blockIdx.x == 0;",
        "the block that sends the totals is the last to count",
    ),
    Fault(
        "own slot for all",
        "dispatch",
        r"(peer_slot\[\w+\] = .*)got\[0\]",
        r"\1slot",
        "the receiver says which slot may be written",
    ),
    Fault(
        "no read-done wait",
        "combine",
        r"got(\w*)\[0\] = ep_wait_tag\([^;]*, 4, [^;]*\);",
        r"got\1[0] = 0;",
        "rows are staged over what every peer has read",
    ),
    Fault(
        "ready before staged", "combine", r"ep_bulk_wait_all\(\);", "", "rows are staged before the ready word says so"
    ),
    Fault(
        "no ready wait",
        "combine",
        r"got(\w*)\[0\] = ep_wait_tag\([^;]*, 5, [^;]*\);",
        r"got\1[0] = 0;",
        "rows are pulled after their owner has staged them",
    ),
    Fault(
        "ring slot refilled early",
        "combine",
        r"(room = .*fetched.*) < (\(?added \+ )?3",
        r"\1 < \g<2>4",
        "a ring slot is fetched into after every lane has read it",
    ),
    Fault(
        "pushed too early",
        "combine",
        r"got(\w*)\[0\] = ep_wait_tag\([^;]*, 4, [^;]*\);",
        r"got\1[0] = 0;",
        "rows are pushed over what their new owner has summed",
        pushes=True,
    ),
    Fault(
        "ready before pushed",
        "combine",
        r"ep_bulk_wait_all\(\);",
        "",
        "rows are pushed before the ready word says so",
        pushes=True,
    ),
    Fault(
        "pushed to the wrong place",
        "combine",
        r"\(step(_\d+)? \+ 1\) \* stride",
        r"step\1 * stride",
        "where a row goes was asked for one step ahead",
        pushes=True,
    ),
]


FAULTS.append(
    Fault(
        "entry counted early",
        "dispatch",
        r"ahead\[7\] = (\(\(int64_t\))",
        r"ahead[6] = \1",
        "entries are counted in order, however many groups of tokens a warp has",
        tokens=400,
    )
)
LEFT_BEHIND = Fault(
    "fetch left behind",
    "dispatch",
    r"if \(\(flags\[2\] == 0\) && \(flags\[0\] != 0\)\)",
    "if (false)",
    "a block that gives up waits for what it has fetched",
)
"""Is seen only where a wait gives up while peers are on their way."""

_BY_NAME = {fault.name: fault for fault in FAULTS}
FAULTS += [
    *(
        replace(_BY_NAME[name], name=f"{name}, few tokens", few=True)
        for name in (
            "done word without release",
            "one block's part is all of the done word",
            "no entry wait",
            "no wait for the counts of experts",
            "base off by one",
            "own slot for all",
        )
    ),
    Fault(
        "earlier warps forgotten, few tokens",
        "dispatch",
        r"rank_row = \(\(rank_row \+ (start\[\w+\])\) \+ base\[.*\]\);",
        r"rank_row = (rank_row + \1);",
        "a warp counts only its share",
        few=True,
    ),
    Fault(
        "entry of this rank only, few tokens",
        "dispatch",
        r"ep_store_release_sys\(\(\(peers\[\w+\]",
        "ep_store_release_sys(((own",
        "every peer waits for the entry of every other",
        few=True,
    ),
]


def _compiled(spec: KernelSpec, fault: Fault | None) -> SimKernel:
    source = cuda_source(spec)
    if fault is not None and fault.is_in(spec):
        source = re.sub(fault.pattern, fault.replacement, source)
    return compile_source(source, spec.threads)


def _plant(monkeypatch: pytest.MonkeyPatch, fault: Fault | None) -> dict[KernelSpec, SimKernel]:
    """Every kernel that is launched from now on has the fault; returns them, as they come."""
    kernels: dict[KernelSpec, SimKernel] = {}
    lock = threading.Lock()

    def kernel(spec: KernelSpec) -> SimKernel:
        with lock:
            if spec not in kernels:
                kernels[spec] = _compiled(spec, fault)
            return kernels[spec]

    monkeypatch.setattr(simulated, "simulated_kernel", kernel)
    return kernels


RANKS, TOPK, EXPERTS = 3, 3, 7
HANDLE_FIELDS = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


class Scenario:
    """Collectives in a row on three ranks, none of which waits for the host, and what the reference makes of them."""

    def __init__(self, seed: int, most: int = 9) -> None:
        random = torch.Generator().manual_seed(seed)
        self.seed, self.most = seed, most
        self.rounds = []
        for odd in (False, True):
            tokens = [most - rank for rank in range(RANKS)]
            if odd:  # rows of 37 bytes with scales of 3
                xs = [
                    tuple(torch.randint(0, 256, (t, n), generator=random).to(torch.uint8) for n in (37, 3))
                    for t in tokens
                ]
            else:  # rows of 208 bytes, three chunks
                xs = [torch.randn(t, 104, generator=random).bfloat16() for t in tokens]
            idxs = [torch.rand(t, EXPERTS, generator=random).topk(TOPK, 1).indices for t in tokens]
            weights = [torch.rand(t, TOPK, generator=random) for t in tokens]
            sent = reference.dispatch(
                xs, idxs, weights, num_experts=EXPERTS, num_max_tokens_per_rank=most, do_cpu_sync=False
            )
            handles = [output.handle for output in sent]
            counts = [int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) for handle in handles]
            ys = [[torch.randn(RANKS * most, 104, generator=random).bfloat16() for _ in counts] for _ in range(3)]
            if not odd:
                ys = [[output.recv_x for output in sent], *ys, [output.recv_x for output in sent]]  # type: ignore[list-item]
            back = [reference.combine(y, handles, [output.recv_topk_weights for output in sent]) for y in ys]  # type: ignore[misc]
            self.rounds.append((xs, idxs, weights, sent, counts, ys, back))

    def run(self, pushes: bool = False, few: bool = False) -> str | None:
        """What went wrong, or `None`."""
        try:
            return self._difference(self.outputs(pushes, few))
        except (SimError, tile_ep.PeerTimeoutError) as error:
            return str(error)

    def outputs(self, pushes: bool = False, few: bool = False) -> list[list[list[Any]]]:
        """Of every rank."""
        with tile_ep.loopback(
            RANKS,
            num_max_tokens_per_rank=self.most,
            hidden=104,
            num_topk=TOPK,
            num_experts=EXPERTS,
            num_slots=9,
            seed=self.seed,
            timeout_s=30,
            tuning=replace(SIMULATOR, pushes=pushes, few=self.most * TOPK if few else 0),
        ) as ranks:
            assert ranks.simulation is not None
            with ranks.simulation.queued():
                return ranks.run(self._on_rank)

    def _on_rank(self, rank: int, buffer: Buffer) -> list[list[Any]]:
        outputs = []
        if rank == 1:  # its free slots are not those of the others
            buffer._backend._slots.take()  # type: ignore[union-attr]
        for xs, idxs, weights, _, _, ys, _ in self.rounds:
            recv, recv_idx, recv_weights, handle, _ = buffer.dispatch(
                xs[rank], idxs[rank], weights[rank], do_cpu_sync=False
            )
            reads = isinstance(recv, torch.Tensor)  # combines read the rows received, at once, where they were received
            backs = [buffer.combine(recv, handle, recv_weights)] if reads else []
            backs += [buffer.combine(y[rank], handle, recv_weights) for y in (ys[1:-1] if reads else ys)]
            again, again_idx, _, _, _ = buffer.dispatch(xs[rank], handle=handle)
            backs += [buffer.combine(again, handle, recv_weights)] if reads else []
            outputs.append(
                [recv, again, recv_idx, recv_weights, again_idx, *(part for b in backs for part in b[:2]), handle]
            )
        return outputs

    def _difference(self, outputs: list[list[list[Any]]]) -> str | None:
        for number, (_, _, _, sent, counts, _, back) in enumerate(self.rounds):
            for rank in range(RANKS):
                want = sent[rank]
                expected = [want.recv_x, want.recv_x, want.recv_topk_idx, want.recv_topk_weights, want.recv_topk_idx]
                expected += [part for b in back for part in (b[rank].combined_x, b[rank].combined_topk_weights)]
                *found, handle = outputs[rank][number]
                for name in HANDLE_FIELDS:
                    left, right = (getattr(one, name) for one in (want.handle, handle))
                    if not torch.equal(left[: counts[rank]], right[: counts[rank]]):
                        return f"round {number}, rank {rank}: handle.{name} differs"
                for place, (a, b) in enumerate(zip(expected, found, strict=True)):
                    rows = counts[rank] if place < 2 else None  # what lies past the count is undefined
                    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
                    if not all(torch.equal(left[:rows], right[:rows]) for left, right in pairs):
                        return f"round {number}, rank {rank}, output {place} differs"
        return None


def _first_failure(
    scenarios: Callable[[int], Scenario], pushes: bool = False, few: bool = False
) -> tuple[int, str] | None:
    for seed in range(SEEDS):
        said = scenarios(seed).run(pushes, few)
        if said is not None:
            return seed, said
    return None


@pytest.mark.parametrize("pushes, few", [(False, False), (True, False), (False, True)], ids=["pulls", "pushes", "few"])
def test_without_a_fault_every_seed_passes(pushes: bool, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = _plant(monkeypatch, None)
    assert _first_failure(Scenario, pushes, few) is None
    assert len(specs) == 5  # both payloads' dispatch and cached dispatch, one combine


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = _plant(monkeypatch, fault)
    found = _first_failure(lambda seed: Scenario(seed, fault.tokens), fault.pushes, fault.few)
    planted = [cuda_source(spec) for spec in specs if fault.is_in(spec)]
    assert any(re.search(fault.pattern, source) for source in planted), "the fault does not apply to the kernels"
    assert found is not None, f"not found in {SEEDS} seeds: {fault.why}"
    print(f"{fault.name}: seed {found[0]}: {found[1].splitlines()[0]}")


@pytest.mark.parametrize("twice", ["nowhere", "dispatch", "combine"])
def test_no_chunk_is_fetched_twice(twice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the results would show it: the same bytes go to the same place again."""
    taken_twice = Fault("", twice, r"num_blocks \* 4\) \+ \(\(int\)ep_atomic", r"num_blocks * 2) + ((int)ep_atomic", "")
    _plant(monkeypatch, taken_twice)
    scenario = Scenario(0)
    x, idx = scenario.rounds[0][:2]

    def dispatch(rank: int, buffer: Buffer) -> tuple[EPHandle, torch.Tensor]:
        recv_x, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank])
        y = buffer.combine_input(handle)
        y.copy_(recv_x)
        return handle, y

    with tile_ep.loopback(
        RANKS, num_max_tokens_per_rank=9, hidden=104, num_topk=TOPK, num_experts=EXPERTS, seed=1
    ) as ranks:
        assert ranks.simulation is not None
        dispatched = ranks.run(dispatch)
        reports = list(ranks.simulation.reports)
        ranks.run(lambda rank, buffer: buffer.combine(dispatched[rank][1], dispatched[rank][0]))
        dispatches, combines = (
            sum(report.fetched_bytes for report in some) for some in (reports, ranks.simulation.reports[len(reports) :])
        )
    tokens, rows = sum(x.nbytes for x in x), sum(y.nbytes for _, y in dispatched)
    assert dispatches > tokens if twice == "dispatch" else dispatches == tokens
    assert combines > rows if twice == "combine" else combines == rows


@pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
@pytest.mark.parametrize("fault", [None, LEFT_BEHIND], ids=["no fault", LEFT_BEHIND.name])
def test_a_block_that_gives_up_leaves_nothing_behind(
    fault: Fault | None, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank waits for a moment only. Whatever it then does, the simulator has nothing to object to."""
    patience_ns = 0
    impatient: list[NvlinkBackend] = []

    def timeout_ns(backend: NvlinkBackend) -> int:
        if backend.rank != 1:
            return 30_000_000_000
        impatient.append(backend)
        return patience_ns

    monkeypatch.setattr(NvlinkBackend, "_timeout_ns", property(timeout_ns))
    _plant(monkeypatch, fault)
    gave_up, objected = 0, 0
    for seed in range(SEEDS):
        patience_ns = int(10 ** (1 + 4 * seed / SEEDS))
        try:
            Scenario(seed).outputs(few=few)
        except SimError as error:
            assert "the block ends while" in str(error)
            objected += 1
        gave_up += bool(impatient[-1]._status_view.any())
    assert gave_up > SEEDS // 2
    assert (objected > 0) == (fault is not None)


@pytest.mark.parametrize("fault", ANNOUNCED_EARLY, ids=lambda fault: fault.name)
def test_rows_announced_early_are_wrong_bytes_to_a_combine(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(rank: int, kernel: SimKernel, num_blocks: int, args: dict[str, int], _: tuple[int, int]) -> Launch:
        return Launch(rank, kernel, num_blocks, args)  # nothing is known to be an inbox

    monkeypatch.setattr(simulated, "Launch", launch)
    _plant(monkeypatch, fault)
    found = _first_failure(Scenario)
    assert found is not None and "differs" in found[1]


def test_a_seed_fails_in_the_same_way_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, FAULTS[0])
    found = _first_failure(Scenario)
    assert found is not None
    assert Scenario(found[0]).run() == found[1]
