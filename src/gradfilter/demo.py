"""MobileNetV2 adapts to handwritten digits: exactly, and filtered. Three runs of ``gradfilter train``.

Each run has a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import GradFilterError
from .files import write
from .plans import format_bytes, table
from .training.report import Comparison, Report, read_report, write_report

__all__ = ["ARMS", "compare"]

# plain PyTorch keeps no features, so for a fair picture nobody does here
SHARED = ("--data", "digits", "--size", "96", "--augment", "false", "--cache", "off", "--workers", "1")
ARMS = {
    "exact, last 4": ("--method", "Exact()", "--accelerate", "false"),
    "filtered, last 4": ("--patch", "2"),
    "filtered, all": ("--patch", "2", "--layers", "all"),
}


def compare(folder: Path, epochs: int, options: tuple[str, ...] = ()) -> str:
    """Train every arm, write report.html and pictures into the folder, and tell what it took."""
    if any(folder.glob("*/config.json")):
        raise GradFilterError(f"{folder} holds a demo already; remove it, or give another --out.")
    reports = {}
    for number, (arm, own) in enumerate(ARMS.items(), 1):
        print(f"{number} of {len(ARMS)}: {arm}", file=sys.stderr, flush=True)
        out = folder / arm.replace(", ", "-").replace(" ", "")
        _train(("--epochs", str(epochs), "--out", str(out), *SHARED, *own, *options))
        reports[arm] = read_report(out / "report.json")
    summary = _summary(reports)
    write_report(folder, summary)
    for cost in summary.costs:
        write(folder / f"{cost.name.replace(' ', '_')}.png", _chart(cost))
    return table(_lines(reports))


def _train(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "gradfilter", "train", *options]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603  our own command
    if done.returncode:
        raise GradFilterError("The demo ends here, for the reason above.")


def _summary(reports: dict[str, Report]) -> Report:
    main = reports["filtered, last 4"]
    others = {arm: report.epochs for arm, report in reports.items() if report is not main}
    costs = [
        Comparison("time of a step", "ms", {arm: _value(r, "step") for arm, r in reports.items()}),
        Comparison("kept for the backward", "bytes", {arm: _value(r, "kept") for arm, r in reports.items()}),
        Comparison("peak of the process", "bytes", {arm: _value(r, "peak") for arm, r in reports.items()}),
    ]
    title = "MobileNetV2 learns digits: exact and filtered"
    return replace(main, title=title, costs=costs, others=others)


def _value(report: Report, name: str) -> float | None:
    """A cost of this run, whose name begins so."""
    return next(cost.values["this run"] for cost in report.costs if cost.name.startswith(name))


def _lines(reports: dict[str, Report]) -> list[list[str]]:
    lines = [["training", "test accuracy", "time of a step", "kept for the backward", "peak of the process"]]
    for arm, report in reports.items():
        accuracy = report.epochs[report.best]["accuracy"] or 0.0
        step, kept, peak = (_value(report, name) or 0 for name in ("step", "kept", "peak"))
        lines.append(
            [arm, f"{accuracy:.1f} %", f"{step:.0f} ms", format_bytes(int(kept)), format_bytes(int(peak))]
        )
    return lines


def _chart(cost: Comparison) -> bytes:
    from .bench.charts import bars

    shown: dict[str, Any] = {"ms": "{:.0f} ms".format, "bytes": lambda count: format_bytes(int(count))}
    return bars(cost.name, cost.unit, dict(cost.values), shown[cost.unit])
