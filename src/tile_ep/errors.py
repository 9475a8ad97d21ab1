"""Exceptions. Each says what was given, what was expected and, where there is one, the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TileEPError(Exception):
    """Base class of every exception that TileEP raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Constructors take facts, not the message: rebuild without them, so that exceptions cross processes.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[TileEPError], args: tuple[object, ...], facts: dict[str, object]) -> TileEPError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ArgumentError(TileEPError, ValueError):
    """An argument is wrong: dtype, shape, device, range, or a combination of arguments.

    Attributes:
        argument: name of the argument, as the caller wrote it.
        got: what was given, in words.
        expected: what is accepted, in words.
    """

    def __init__(self, argument: str, got: object, expected: str, hint: str | None = None) -> None:
        self.argument, self.got, self.expected = argument, got, expected
        message = f"{argument}: got {got}, expected {expected}"
        super().__init__(f"{message}. {hint}" if hint else message)


class DisagreementError(TileEPError, ValueError):
    """Ranks called the same collective with values that must agree and do not.

    Attributes:
        what: name of the value.
        values: value of each rank, indexed by rank.
    """

    def __init__(self, what: str, values: Sequence[object]) -> None:
        self.what, self.values = what, list(values)
        said = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        super().__init__(f"ranks disagree on {what} ({said}); it must be the same everywhere")


class RoutingError(TileEPError, ValueError):
    """`topk_idx` holds entries outside `-1 .. num_experts - 1`.

    Attributes:
        num_bad: how many entries are out of range.
        example: one of the offending values, `None` where only the device has seen them.
    """

    def __init__(self, num_bad: int, num_experts: int, example: int | None = None) -> None:
        self.num_bad, self.num_experts, self.example = num_bad, num_experts, example
        shown = "" if example is None else f" (for example {example})"
        super().__init__(
            f"topk_idx: {num_bad} of its entries{shown} are outside -1..{num_experts - 1}; "
            "use -1 for a selection that selects nothing"
        )


class CapacityError(TileEPError, RuntimeError):
    """An expanded dispatch needs more rows at a destination than `expand_factor` provides for.

    Attributes:
        rows_needed: rows needed, for every rank that overflows.
        capacity: rows that each of these ranks has.
        expand_factor: the factor in use.
        expand_factor_needed: a factor that would have held every row.
    """

    def __init__(
        self,
        rows_needed: Mapping[int, int],
        capacity: Mapping[int, int],
        expand_factor: float,
        expand_factor_needed: float,
    ) -> None:
        self.rows_needed, self.capacity = dict(rows_needed), dict(capacity)
        self.expand_factor, self.expand_factor_needed = expand_factor, expand_factor_needed
        where = "; ".join(
            f"rank {rank} needs {needed} rows and holds {self.capacity[rank]}"
            for rank, needed in self.rows_needed.items()
        )
        super().__init__(
            f"expanded dispatch overflows: {where} (expand_factor={expand_factor:g}). "
            f"Build the Buffer with expand_factor>={expand_factor_needed:g}"
        )


class PeerTimeoutError(TileEPError, TimeoutError):
    """A peer did not do its part in time. The buffer is unusable until a collective `reset()`.

    Attributes:
        rank: the rank that waited.
        phase: what it waited for, in words.
        peers: the ranks that were missing.
        epoch: number of the collective on this buffer, `None` where the backend does not count them.
    """

    def __init__(self, rank: int, phase: str, peers: Sequence[int], epoch: int | None, timeout_s: float) -> None:
        self.rank, self.phase, self.peers, self.epoch = rank, phase, list(peers), epoch
        missing = ", ".join(str(peer) for peer in peers) or "unknown"
        at = "" if epoch is None else f" of collective {epoch}"
        super().__init__(
            f"rank {rank} waited {timeout_s:g} s in phase '{phase}'{at} for rank(s) {missing}. "
            "Call reset() on every rank, or rebuild the Buffer, before using it again"
        )


class StaleHandleError(TileEPError, RuntimeError):
    """A handle or a zero-copy view is used where its plan or its memory is no longer valid."""


class BackendUnavailableError(TileEPError, RuntimeError):
    """A backend cannot be used here. The message names what is missing and how to get it."""


class CaptureError(TileEPError, RuntimeError):
    """Something was asked for during CUDA graph capture that cannot be captured."""


class DestroyedError(TileEPError, RuntimeError):
    """The buffer was destroyed, or a peer's failure left it unusable until `reset()`."""
