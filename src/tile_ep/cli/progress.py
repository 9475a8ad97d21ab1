"""Progress on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 10.0


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of `total` steps, from any thread."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    lock = threading.Lock()
    done, start = 0, time.monotonic()
    said = start

    def tick() -> None:
        nonlocal done, said
        with lock:
            done += 1
            if time.monotonic() - said > _LINE_EVERY_S:
                said = time.monotonic()
                console.print(f"{what}: {done} of {total} steps after {said - start:.0f} s", highlight=False)

    yield tick
