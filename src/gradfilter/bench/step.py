"""Whole training steps of any model, in several ways that take turns (arm.py), and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from ..errors import GradFilterError, nearest
from ..plans import format_bytes, format_count
from ..progress import Tell, silent
from .arm import Case, Settings, Times, facts, method_in
from .energy import Meter, energy_of, find_meter
from .environment import environment
from .layers import WARMUP
from .memory import peak_of_step
from .timing import Interval, in_turn, median_of, ratio_of
from .worker import Worker

__all__ = ["ARMS", "BASELINES", "ON_REQUEST", "cells", "lines", "measure", "notes"]

ARMS = (
    "inference",
    "inference+prefix",
    "exact-all",
    "exact",
    "filter",
    "exact+prefix",
    "filter+prefix",
    "exact+cache",
    "filter+prefix+cache",
)
ON_REQUEST = ("inference+int8", "exact+int8", "filter+int8")  # their results are not those of the others
BASELINES = ("inference", "exact", "exact+prefix")
PARTS = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")


def measure(
    settings: Settings,
    arms: Sequence[str] = ARMS,
    memory: bool = True,
    tell: Tell = silent,
    one_process: bool = False,
) -> dict[str, Any]:
    """Measure every arm; an arm that the model does not allow has the reason instead of numbers.

    Each arm has a process of its own and they take turns, unless all shall be in one: that needs less memory,
    but what one arm leaves to the allocator then speeds up or slows down the others.
    """
    known = (*ARMS, *ON_REQUEST)
    for name in arms:
        if name not in known:
            raise GradFilterError(
                f"There is no arm {name}; choose among {', '.join(known)}.{nearest(name, known)}"
            )
    with settings.in_memory(arms[0]):
        case = Case(settings)
    found = environment()
    case.check_memory(arms)
    meter = find_meter()
    with ExitStack() as workers:
        steps, rows = _prepare(case, list(dict.fromkeys(arms)), None if one_process else workers, tell)
        times = _times(settings, steps, tell) if steps else {}
        for number, (name, step) in enumerate(steps.items()):
            tell("energy", number + 1, len(steps))
            rows[name] |= _summary(times, name) | {"energy_j": energy_of(step, meter)}
    for number, name in enumerate(steps):
        tell("memory", number + 1, len(steps))
        peak = peak_of_step(settings, name) if memory else "unavailable: --no-memory was given"
        rows[name]["peak_bytes"] = peak
    return {
        "benchmark": "step",
        "environment": found,
        "settings": asdict(settings),
        "one_process": one_process,
        "energy_meter": meter.name if isinstance(meter, Meter) else meter,
        "arms": list(rows.values()),
    }


class Step(Protocol):
    """An arm, here or in a process of its own."""

    def __call__(self) -> Times: ...

    def turn(self) -> Times: ...


def _prepare(
    case: Case, arms: list[str], workers: ExitStack | None, tell: Tell
) -> tuple[dict[str, Step], dict[str, dict[str, Any]]]:
    """Each arm that can be had, and what is known of each before."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(arms):
        tell("preparing", number + 1, len(arms))
        step: Step | None
        if workers is None:
            step, known = facts(name, case)
        else:
            step = workers.enter_context(Worker(case.settings, name))
            known = step.facts()
        rows[name] = {"name": name} | known
        if step is not None and "unavailable" not in known:
            steps[name] = step
    return steps, rows


def _times(settings: Settings, steps: dict[str, Step], tell: Tell) -> dict[str, list[Times]]:
    def take(name: str) -> Times:
        with settings.in_memory(name):
            return steps[name].turn()

    calls = {name: partial(take, name) for name in steps}
    title, total = f"steps of {settings.model}", settings.rounds + WARMUP
    return in_turn(calls, settings.rounds, WARMUP, tell=lambda number: tell(title, number, total))


def _summary(times: dict[str, list[Times]], name: str) -> dict[str, Any]:
    """Medians in milliseconds, ratios of step times to those of the baselines, and all their intervals."""
    columns = [[sum(taken) for taken in times[name]], *zip(*times[name], strict=True)]
    found = {part: median_of([1e3 * t for t in column]) for part, column in zip(PARTS, columns, strict=True)}
    for base in BASELINES:
        if base in times:
            found[f"to_{base}"] = ratio_of(columns[0], [sum(taken) for taken in times[base]])
    return {key: interval.median for key, interval in found.items()} | {
        "intervals": {key: [interval.low, interval.high] for key, interval in found.items()}
    }


def lines(record: dict[str, Any]) -> list[list[str]]:
    """The table, one line per arm."""
    s = record["settings"]
    title = f"{s['model']}, {s['layers']}, {method_in(s)}, batch {s['batch']}, {s['size']} px"
    made = [[title, "step", "forward", "backward", "optimizer", "kept", "peak"]]
    made[0] += ["forward MACs", "backward MACs", *(f"of {base}" for base in BASELINES), "energy"]
    for row in record["arms"]:
        if "unavailable" in row:
            made.append([row["name"], *["-"] * (len(made[0]) - 1)])
            continue
        step = Interval(row["step_ms"], *row["intervals"]["step_ms"])
        made.append([row["name"], f"{step.median:.1f} ms ({step.low:.1f} to {step.high:.1f})"])
        made[-1] += [f"{row[part]:.1f} ms" for part in PARTS[1:]]
        made[-1] += [_cell(row[key], format_bytes) for key in ("kept_bytes", "peak_bytes")]
        made[-1] += [format_count(row["macs"][way]) for way in ("forward", "backward")]
        made[-1] += [_cell(row.get(f"to_{base}"), "{:.2f}x".format) for base in BASELINES]
        made[-1].append(_cell(row["energy_j"], "{:.2f} J".format))
    return made


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if value is None or isinstance(value, str) else form(value)


def notes(record: dict[str, Any]) -> list[str]:
    """What the table leaves out: the reasons of its gaps, and where its energy comes from."""
    made = [
        f"{row['name']}: unavailable: {row['unavailable']}" for row in record["arms"] if "unavailable" in row
    ]
    made += [f"{row['name']}: {row['int8']}" for row in record["arms"] if "int8" in row]
    peaks = {row["peak_bytes"] for row in record["arms"] if isinstance(row.get("peak_bytes"), str)}
    made += [f"Peak memory: {reason}" for reason in sorted(peaks)]
    return [*made, f"Energy: {record['energy_meter']}"]


def cells(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms as flat rows for a spreadsheet, the settings in each; an interval has two columns."""
    made = []
    for row in record["arms"]:
        flat = {key: value for key, value in row.items() if key not in ("macs", "intervals")}
        flat |= {f"{way}_macs": count for way, count in row.get("macs", {}).items()}
        for key, bounds in row.get("intervals", {}).items():
            flat |= dict(zip((f"{key}_low", f"{key}_high"), bounds, strict=True))
        made.append(flat | record["settings"])
    return made
