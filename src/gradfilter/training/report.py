"""The report of a run: one value, from which ``report.json`` and ``report.html`` are made."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..errors import GradFilterError
from ..files import write
from ..plans import LayerCost, Plan

__all__ = ["Comparison", "Overlay", "Report", "plan_facts", "read_report", "write_report"]

SCHEMA = 1


@dataclass(frozen=True)
class Comparison:
    """One quantity of several arms: first what the others are held against, usually exact, then the run.

    unit: "bytes", "ms" and "", a count, are shown as people read them, any other as it is. A value that is
    unavailable is None.
    """

    name: str
    unit: str
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Overlay:
    """A picture of a segmentation: PNG files by caption, such as picture, found and truth.

    classes: the numbers of the classes that are seen in it, for the legend.
    """

    name: str
    pictures: Mapping[str, bytes]
    classes: Sequence[int] = ()


@dataclass(frozen=True)
class Report:
    """All that is told about a run; whatever is not known is left out, and its part of the page with it.

    Args:
        epochs: one entry each: epoch, loss, seconds, and scores, as in metrics.jsonl; None where a value is
            not finite.
        scores: which keys of the epochs are scores, in percent; the first one decided which epoch is best.
        best: the index of the best epoch.
        plan: what ``plan_facts`` makes of a plan.
        confusion: counts; rows are true classes, columns predicted ones.
        others: the epochs of other runs to draw beside this one's, by name.
    """

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: Sequence[Mapping[str, float | None]] = ()
    scores: Sequence[str] = ()
    best: int = -1
    why_ended: str = ""
    classes: Sequence[str] = ()
    plan: Mapping[str, Any] | None = None
    costs: Sequence[Comparison] = ()
    confusion: Sequence[Sequence[int]] | None = None
    overlays: Sequence[Overlay] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    others: Mapping[str, Sequence[Mapping[str, float | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs and not -len(self.epochs) <= self.best < len(self.epochs):
            raise GradFilterError(f"best is epoch {self.best} of a report that has {len(self.epochs)}.")
        count = len(self.classes)
        rows = self.confusion
        if rows is not None and (len(rows) != count or any(len(row) != count for row in rows)):
            raise GradFilterError(
                f"The confusion matrix must have one row and one column for each of {count}."
            )


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan as plain values; costs are there if the plan has them.

    >>> from gradfilter.methods import Exact
    >>> from gradfilter.plans import LayerPlan
    >>> plan_facts(Plan((LayerPlan("conv", "Conv2d", "train", Exact()),)))["layers"]
    [{'layer': 'conv', 'kind': 'Conv2d', 'action': 'train', 'method': 'Exact()', 'reason': ''}]
    """
    facts: dict[str, Any] = {"norm": plan.norm, "norms": list(plan.norms)}
    facts["layers"] = [
        {
            "layer": row.name,
            "kind": row.kind,
            "action": row.action,
            "method": "" if row.action == "frozen" else str(row.method),
            "reason": row.reason,
            **_costs(row.before, row.after),
        }
        for row in plan.rows
    ]
    if plan.other:
        facts |= {"other": _costs(*plan.other), "total": _costs(*plan.total)}
    return facts


def _costs(before: LayerCost | None, after: LayerCost | None) -> dict[str, int]:
    if before is None or after is None:
        return {}
    return {
        "kept_exact": before.kept,
        "kept": after.kept,
        "backward_macs_exact": before.backward_macs,
        "backward_macs": after.backward_macs,
    }


def write_report(folder: str | os.PathLike[str], report: Report) -> None:
    """Write ``report.json``, and ``report.html`` from the same value."""
    from .page import page

    write(Path(folder) / "report.json", to_json(report))
    write(Path(folder) / "report.html", page(report))


def read_report(file: str | os.PathLike[str]) -> Report:
    """The report that a ``report.json`` holds."""
    try:
        return from_json(Path(file).read_text())
    except OSError as error:
        raise GradFilterError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError):
        raise GradFilterError(f"{file} is not a report of this version of gradfilter.") from None


def to_json(report: Report) -> str:
    """What is not a finite number becomes null, as JSON has no word for it; pictures become base64."""
    facts = {each.name: getattr(report, each.name) for each in fields(Report)}
    facts["costs"] = [vars(cost) for cost in report.costs]
    facts["overlays"] = [
        {
            "name": overlay.name,
            "pictures": {
                name: base64.b64encode(png).decode("ascii") for name, png in overlay.pictures.items()
            },
            "classes": list(overlay.classes),
        }
        for overlay in report.overlays
    ]
    return json.dumps(plain({"schema": SCHEMA, **facts}), indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    facts = json.loads(text)
    if facts.pop("schema") != SCHEMA:
        raise ValueError
    facts["costs"] = [Comparison(**cost) for cost in facts["costs"]]
    facts["overlays"] = [
        Overlay(
            overlay["name"],
            {name: base64.b64decode(png) for name, png in overlay["pictures"].items()},
            overlay["classes"],
        )
        for overlay in facts["overlays"]
    ]
    return Report(**facts)


def plain(value: Any) -> Any:
    """A value as JSON can hold it.

    >>> plain({"loss": float("nan"), "of": (1, 2.5), "in": Path("runs")})
    {'loss': None, 'of': [1, 2.5], 'in': 'runs'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [plain(own) for own in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):  # numpy's numbers are such too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
