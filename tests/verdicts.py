"""What came of many generated cases, in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def report(cases: Iterable[Any], judge: Callable[[Any], list[str]]) -> str:
    """Empty if every case passes; else how many fail, and the first few in full. A crash is a failure."""

    def verdict(case: Any) -> list[str]:
        try:
            return judge(case)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]

    cases = list(cases)
    failed = [(case, wrong) for case in cases if (wrong := verdict(case))]
    lines = [f"  {'; '.join(wrong)}\n    {getattr(case, 'label', '')} {case}" for case, wrong in failed[:5]]
    return "\n".join([f"{len(failed)} of {len(cases)} cases fail:", *lines]) if failed else ""
