"""Measured numbers as pictures: above all times, kept bytes and peak bytes of every arm of ``bench step``."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import GradFilterError
from ..plans import format_bytes
from .arm import method_in
from .environment import conditions

__all__ = ["bars", "check_matplotlib", "step_chart"]

PARTS = {"forward_ms": "#4c78a8", "backward_ms": "#f58518", "optimizer_ms": "#9d9da1"}
BYTES = {"kept_bytes": "kept for the backward", "peak_bytes": "peak above model, gradients, optimizer"}


def check_matplotlib() -> None:
    """Before the measuring, so that a missing library does not cost its minutes."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise GradFilterError("A picture needs matplotlib: pip install 'gradfilter[bench]'.") from None


def step_chart(record: dict[str, Any]) -> bytes:
    """The picture as PNG. An arm without a number has no bar, and the word unavailable instead."""
    from matplotlib.figure import Figure

    arms = record["arms"]
    figure = Figure(figsize=(15, 1.9 + 0.42 * len(arms)), dpi=120, layout="constrained")
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(1.3, 1, 1))
    _draw_times(axes[0], arms)
    for axis, (key, title) in zip(axes[1:], BYTES.items(), strict=True):
        values = [row.get(key) for row in arms]
        widths = [value / 2**20 if isinstance(value, int) else 0.0 for value in values]
        axis.barh(range(len(arms)), widths, color="#54a24b")
        axis.set_title(title, loc="left")
        axis.set_xlabel("MiB")
        _label(axis, values, widths, format_bytes)
    axes[0].set_yticks(range(len(arms)), [row["name"] for row in arms])
    axes[0].invert_yaxis()
    s = record["settings"]
    figure.suptitle(
        f"{s['model']}, layers {s['layers']}, {method_in(s)}, batch {s['batch']}, "
        f"{s['size']} px, {s['dtype']}, {s['device']}",
        fontweight="bold",
    )
    figure.supxlabel(conditions(record["environment"]), fontsize=7, color="#666666")
    return _png(figure)


def bars(title: str, unit: str, values: Mapping[str, float | None], form: Callable[[Any], str]) -> bytes:
    """One quantity of several arms, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.42 * len(values)), dpi=120, layout="constrained")
    axis = figure.subplots()
    widths = [value or 0.0 for value in values.values()]
    axis.barh(range(len(values)), widths, color="#54a24b")
    axis.set_title(title, loc="left")
    axis.set_xlabel(unit)
    _label(axis, list(values.values()), widths, form)
    axis.set_yticks(range(len(values)), list(values))
    axis.invert_yaxis()
    return _png(figure)


def _png(figure: Any) -> bytes:
    made = io.BytesIO()
    figure.savefig(made, format="png")
    return made.getvalue()


def _draw_times(axis: Any, arms: list[dict[str, Any]]) -> None:
    ends = [0.0] * len(arms)
    for part, colour in PARTS.items():
        widths = [row.get(part, 0.0) for row in arms]
        axis.barh(range(len(arms)), widths, left=ends, color=colour, label=part.removesuffix("_ms"))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axis.set_title("time of a step", loc="left")
    axis.set_xlabel("ms (medians)")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, borderaxespad=0.1)
    _label(axis, [row.get("step_ms") for row in arms], ends, "{:.1f} ms".format)


def _label(axis: Any, values: list[Any], ends: list[float], form: Callable[[Any], str]) -> None:
    """Each number behind its bar, and room for it."""
    axis.set_xlim(0, 1.22 * max(ends) or 1.0)
    for i, (value, end) in enumerate(zip(values, ends, strict=True)):
        known = isinstance(value, int | float)
        axis.annotate(
            form(value) if known else "unavailable",
            (end, i),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color="black" if known else "#999999",
        )
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#dddddd")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
