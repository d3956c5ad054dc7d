"""How far a long command has come, on stderr, so that stdout has the result alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

__all__ = ["Progress", "Tell", "silent"]

Tell = Callable[[str, int, int], None]  # task, step, steps


def silent(task: str, step: int, steps: int) -> None:
    """For callers that want no progress."""


class Progress:
    """On a terminal one line that is written over; in a file one line per task, so that logs stay short."""

    def __init__(self) -> None:
        self._task = ""
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, task: str, step: int, steps: int) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{task}: {step} of {steps}", end="", file=sys.stderr, flush=True)
        elif task != self._task:
            print(f"{task} ({steps}) ...", file=sys.stderr, flush=True)
        self._task = task

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._is_terminal and self._task:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
