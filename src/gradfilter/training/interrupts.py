"""Ctrl-C, heard between two steps: in the middle of one, the weights would be neither old nor new."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopAsked", "ignore_interrupts"]


class StopAsked:
    """Notes that somebody has pressed Ctrl-C; pressed again, it interrupts at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._listens = threading.current_thread() is threading.main_thread()

    def __bool__(self) -> bool:
        return self._asked

    def __enter__(self) -> StopAsked:
        if self._listens:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._listens:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


def ignore_interrupts(worker: int) -> None:
    """For processes that read samples: the one that trains ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
