"""How far a long command has come, on stderr, so that stdout has the result alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

__all__ = ["Progress", "Say", "Tell", "silent"]

Tell = Callable[[str, int, int], None]  # task, step, steps
Say = Callable[[str], None]
ON_TERMINAL, IN_FILE = 0.2, 30.0  # seconds between two lines: never one per step


def silent(*_: object) -> None:
    """For callers that want to hear of nothing."""


class Progress:
    """Steps, rate, time left and memory: on a terminal one line, written over; in a file a few lines."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._is_terminal = quiet, sys.stderr.isatty()
        self._task = ""
        self._begun = self._told = 0.0
        self._first = self._last = 0

    def __call__(self, task: str, step: int, steps: int) -> None:
        now = time.monotonic()
        if task != self._task or step <= self._last:  # the same again, for another set
            self._task, self._begun, self._first, self._told = task, now, step, 0.0
            if not self._is_terminal:
                self._write(f"{task} ({steps}) ...\n")
                self._told = now
        self._last = step
        if now - self._told >= (ON_TERMINAL if self._is_terminal else IN_FILE):
            self._told = now
            line = f"{task}: {step} of {steps}{self._pace(now, step, steps)}"
            self._write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")

    def say(self, text: str) -> None:
        """Print a line of the result, between two lines of progress."""
        if self._quiet:
            return
        if self._is_terminal and self._task:
            self._write("\r\x1b[K")
        print(text, flush=True)

    def _pace(self, now: float, step: int, steps: int) -> str:
        passed, done = now - self._begun, step - self._first
        if passed < 1 or done < 1:
            return ""
        rate = done / passed
        return f", {rate:.3g}/s, {_clock((steps - step) / rate)} left{_memory()}"

    def _write(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._is_terminal and self._task:
            self._write("\r\x1b[K")


def _clock(seconds: float) -> str:
    """
    >>> _clock(59), _clock(61), _clock(3700)
    ('0:59', '1:01', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _memory() -> str:
    """What the process has in memory now, where the system tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return ""
    return f", {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB"
