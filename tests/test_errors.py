"""Exceptions keep their message and their facts on the way from one process to another."""

from __future__ import annotations

import pickle

import pytest

from tile_ep import errors

EXAMPLES = [
    errors.ArgumentError("x", "int8", "bf16", "Cast it"),
    errors.DisagreementError("hidden", [1, 2]),
    errors.RoutingError(3, 8, 99),
    errors.CapacityError({1: 20}, {1: 10}, 1.0, 2.0),
    errors.PeerTimeoutError(0, "entry", [1], 7, 5.0),
    errors.StaleHandleError("old"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_pickles(error: errors.TileEPError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
