"""Every backend gives what the reference gives, to the bit."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Runner, to_cpu
from hypothesis import HealthCheck, assume, given, settings
from strategies import any_case

from tile_ep.cases import GRID, Case, assert_same, make_inputs, run_rank, run_reference
from tile_ep.kernels.tuning import HOPPER, SIMULATOR, Tuning

EXAMPLES = {"collective": 100, "sim": 6, "cuda": 20}
"""Drawn cases; `TILE_EP_HYPOTHESIS_EXAMPLES` overrides them."""

SCHEDULES = range(1, 11)


def unsupported(backend: Runner, case: Case) -> str | None:
    """Why `backend` cannot run `case`, `None` if it can."""
    if backend.name == "sim" and case.heavy:
        return "too large for the simulator"
    return backend.supports(case)


def check(backend: Runner, case: Case) -> None:
    assert_same(case, run_reference(case), backend.run(case))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(backend: Runner, case: Case) -> None:
    if reason := unsupported(backend, case):
        pytest.skip(reason)
    expected = run_reference(case)
    assert all(("overflow" in of_rank) == case.overflow for of_rank in expected)
    assert_same(case, expected, backend.run(case))


def test_drawn(backend: Runner) -> None:
    examples = int(os.environ.get("TILE_EP_HYPOTHESIS_EXAMPLES", EXAMPLES[backend.name]))

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize="TILE_EP_HYPOTHESIS_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=any_case())
    def drawn(case: Case) -> None:
        assume(unsupported(backend, case) is None)
        check(backend, case)

    drawn()


def _run_schedule(case: Case, schedule: int, tuning: Tuning = SIMULATOR) -> list[dict[str, Any]]:
    import tile_ep

    inputs = make_inputs(case)
    with tile_ep.loopback(
        case.num_ranks,
        device="sim",
        seed=schedule,
        tuning=case.tuned(tuning),
        **case.buffer_arguments(),
    ) as ranks:
        return [to_cpu(out) for out in ranks.run(lambda rank, buffer: run_rank(buffer, case, inputs[rank]))]


_SIMULATED = [case for case in GRID if not case.heavy and case.num_ranks <= 8]


@pytest.mark.parametrize("backend", ["sim"], indirect=True)
@pytest.mark.parametrize("case", _SIMULATED[:: len(_SIMULATED) // 20], ids=str)
def test_rows_copied_by_warps_and_pushed_back(backend: Runner, case: Case) -> None:
    """The variants of the kernels that no device's tuning chooses, in both layouts."""
    tuning = replace(SIMULATOR, by_warp=True, pushes=True)
    assert_same(case, run_reference(case), _run_schedule(case, len(str(case)), tuning))


@pytest.mark.parametrize("backend", ["sim"], indirect=True)
@pytest.mark.parametrize(("hidden", "do_expand"), [(2880, False), (3072, True), (5120, True), (16384, False)])
def test_rows_of_models_in_the_blocks_of_a_gpu(backend: Runner, hidden: int, do_expand: bool) -> None:
    case = Case((3, 0, 5), hidden, num_topk=4, do_expand=do_expand, mask="some", zero_copy=not do_expand, seed=hidden)
    assert_same(case, run_reference(case), _run_schedule(case, hidden, HOPPER))


_RANK_LAYOUT = [case for case in GRID if not (case.do_expand or case.heavy) and case.num_ranks <= 8]
_SCHEDULED = _RANK_LAYOUT[:: len(_RANK_LAYOUT) // 24]


@pytest.mark.parametrize("backend", ["sim"], indirect=True)
@pytest.mark.parametrize("case", _SCHEDULED, ids=str)
def test_schedules(backend: Runner, case: Case) -> None:
    """The order in which the simulator runs warps, and lets stores land, changes nothing."""
    expected = run_reference(case)
    for schedule in SCHEDULES:
        assert_same(case, expected, _run_schedule(case, schedule))


def test_there_are_enough_schedules() -> None:
    assert len(_SCHEDULED) >= 20 and len(_SCHEDULED) * len(SCHEDULES) >= 200


def test_cases_have_names_of_their_own() -> None:
    names = [str(case) for case in GRID]
    assert len(set(names)) == len(names)
    assert [eval(repr(case)) for case in GRID] == GRID


def test_inputs_are_seeded_and_fresh() -> None:
    case = GRID[0]
    once, twice = make_inputs(case), make_inputs(case)
    assert torch.equal(once[0].rounds[0].topk_idx, twice[0].rounds[0].topk_idx)
    assert once[0].rounds[0].topk_idx.data_ptr() != twice[0].rounds[0].topk_idx.data_ptr()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("combine0.combined_x", lambda t: t.index_fill(0, torch.tensor([1]), -0.0), r"first at \[1, 0\]"),
        ("combine0.combined_x", lambda t: t.float(), "torch.float32"),
        ("dispatch0.recv_x", lambda t: t[:-1], "expected torch.bfloat16"),
        ("dispatch0.handle.num_recv_tokens", lambda n: n + 1, "expected"),
        ("dispatch0.recv_topk_idx", lambda _: None, "got None"),
    ],
)
def test_a_difference_is_seen(name: str, change: Any, said: str) -> None:
    case = Case(tokens=(3, 4))
    expected, got = run_reference(case), run_reference(case)
    assert_same(case, expected, got)
    got[1][name] = change(got[1][name])
    with pytest.raises(AssertionError, match=rf"rank 1, {name}.*{said}[\s\S]*cases.Case\(tokens=\(3, 4\)\)"):
        assert_same(case, expected, got)
