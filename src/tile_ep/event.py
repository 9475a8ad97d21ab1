"""The event that every collective returns."""

from __future__ import annotations

from types import TracebackType

import torch


class EventOverlap:
    """Completion of a collective on the communication stream; DeepEP's class of the same name.

    Wraps a `torch.cuda.Event`, or `None` where the collective was synchronous (then waiting does nothing).
    As a context manager it overlaps the block with the collective and waits at its end::

        with event:
            compute_on_current_stream()
        # here the current stream has waited for the collective

    Attributes:
        event: the CUDA event, or `None`.
        temporaries: tensors the collective still reads; they live until the event object is dropped.
    """

    def __init__(self, event: torch.cuda.Event | None = None, temporaries: tuple[torch.Tensor, ...] = ()) -> None:
        self.event = event
        self.temporaries = temporaries

    def current_stream_wait(self) -> None:
        """Make the current CUDA stream wait for the collective. The host does not block."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream())

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.current_stream_wait()
