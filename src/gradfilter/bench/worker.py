"""One arm in a process of its own, as a user would run it: other arms leave nothing in its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from ..errors import GradFilterError
from .arm import Case, Settings, Times, facts

__all__ = ["Worker"]

KILLED = -9  # by the system, as it does when memory runs out


class Worker:
    """A process that has an arm ready and takes steps when asked. Use it in a ``with`` block."""

    def __init__(self, settings: Settings, arm: str, surroundings: Mapping[str, str] | None = None) -> None:
        self.settings, self.arm = settings, arm
        command = [sys.executable, "-m", "gradfilter.bench.worker", arm, json.dumps(asdict(settings))]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(  # noqa: S603  ourselves
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **path, **(surroundings or {})},
        )

    def facts(self) -> dict[str, Any]:
        """Kept bytes and multiply-adds of the arm, or why the model does not allow it."""
        found: dict[str, Any] = self._ask("facts")
        return found

    def __call__(self) -> Times:
        """Take one step."""
        return self._times("step")

    def turn(self) -> Times:
        """Take a few steps; see ``Arm.turn``."""
        return self._times("turn")

    def _times(self, what: str) -> Times:
        return Times(*self._ask(what))

    def peak(self) -> int:
        """Peak bytes of a few steps; see memory.py."""
        return int(self._ask("peak"))

    def _ask(self, what: str) -> Any:
        questions: Any = self._process.stdin
        answers: Any = self._process.stdout
        try:
            print(what, file=questions, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        answer = answers.readline()
        if not answer:
            raise self._failure()
        return json.loads(answer)

    def _failure(self) -> GradFilterError:
        if self._process.wait() == KILLED:
            return self.settings.too_large(self.arm)
        self._errors.seek(0)
        told = self._errors.read().strip().splitlines() or [f"exit code {self._process.returncode}"]
        return GradFilterError(told[-1])

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _main(name: str, settings: str) -> int:
    """The process: answers on stdout, one line per line of stdin."""
    asked = Settings(**json.loads(settings))
    try:
        with asked.in_memory(name):
            arm, known = facts(name, Case(asked))
            for line in sys.stdin:
                answer = known if line == "facts\n" else _answer(line.strip(), arm)
                print(json.dumps(answer), flush=True)
    except GradFilterError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _answer(what: str, arm: Any) -> Any:
    from .memory import peak_above

    if what == "peak":
        return peak_above(lambda: arm(keep_gradients=True), arm.held_bytes)
    return arm.turn() if what == "turn" else arm()


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
