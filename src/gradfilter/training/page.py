"""A report as one HTML file: nothing is loaded from anywhere, nothing runs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..masks import colour
from ..plans import format_bytes, format_count
from . import svg
from .elements import details, legend, scroll, section, table
from .markup import Markup, tag
from .report import Comparison, Report, plain

__all__ = ["page"]

_NAMES = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"}
_MOST_WORST = 15  # confusions that are named

# The browser itself then refuses whatever is not in the file.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = Path(__file__).with_name("report.css")


def page(report: Report) -> str:
    """The whole file."""
    report = replace(report, epochs=plain(report.epochs), others=plain(report.others))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", report.title),
        tag("style", Markup(_STYLE.read_text())),
    )
    parts = (_curves, _costs, _confusion, _overlays, _plan, _settings, _environment)
    body = tag(
        "body",
        _header(report),
        tag("main", *(part(report) for part in parts)),
        tag("footer", "Made by gradfilter. All numbers are in report.json, beside this file."),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(report: Report) -> Markup:
    told = f"The run ended because {report.why_ended}." if report.why_ended else None
    return tag(
        "header",
        tag("h1", report.title),
        tag("p", told, class_="soft") if told else None,
        *(tag("p", note) for note in report.notes),
        tag("dl", *(_fact(*fact) for fact in _facts(report)), class_="facts"),
    )


def _facts(report: Report) -> Iterable[tuple[str, str, str]]:
    """The few numbers one looks for first: name, value, and what to say below."""
    if not report.epochs:
        return
    best, last = report.epochs[report.best], report.epochs[-1]
    for score in report.scores[:2]:
        yield (
            f"Best {_name(score)}" if score == report.scores[0] else _sentence(_name(score)),
            *_at(best, score),
        )
    if report.scores:
        yield f"Last {_name(report.scores[0])}", *_at(last, report.scores[0])
    else:
        yield "Last loss", f"{_number(last.get('loss'))}", f"epoch {_epoch(last)}"
    for cost in report.costs:
        if share := _share(cost):
            yield cost.name, share[0], share[1]
    if (seconds := last.get("seconds")) is not None:
        yield "Time", _time(seconds), f"{len(report.epochs)} epoch{'s' * (len(report.epochs) > 1)}"


def _at(entry: Mapping[str, float | None], score: str) -> tuple[str, str]:
    value = entry.get(score)
    return "unknown" if value is None else f"{value:.2f} %", f"epoch {_epoch(entry)}"


def _fact(name: str, value: str, more: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, tag("span", more, class_="more")))


def _share(cost: Comparison) -> tuple[str, str] | None:
    """The second arm, which is the run, against the first, if both are known."""
    if len(cost.values) < 2:
        return None
    (first, exact), (_, own) = list(cost.values.items())[:2]
    if not exact or own is None:
        return None
    return (
        f"{own / exact:.2f}\u00a0\u00d7",
        f"{_measure(cost.unit, own)}; {first}: {_measure(cost.unit, exact)}",
    )


def _curves(report: Report) -> Markup | None:
    if not report.epochs:
        return None
    losses = [key for key in report.epochs[0] if "loss" in key]
    found = [_curve(report, "Loss", losses, "loss", "mean over the samples")] if losses else []
    if report.scores:
        found.append(_curve(report, "Score", report.scores, "percent", "in percent", best=True))
    return section("Curves", tag("div", *found, class_="charts"))


def _curve(
    report: Report, title: str, keys: Sequence[str], y_label: str, unit: str, *, best: bool = False
) -> Markup:
    runs = {"": report.epochs, **report.others}
    longest = max(runs.values(), key=len)
    x = [_epoch(entry) for entry in longest]
    series: dict[str, Sequence[float | None]] = {}
    for run, epochs in runs.items():
        for key in keys if not run else keys[:1]:
            padded = [entry.get(key) for entry in epochs] + [None] * (len(longest) - len(epochs))
            series[run or (_name(key) if len(runs) == 1 else f"this run, {_name(key)}")] = padded
    told = f"{_sentence(', '.join(map(_name, keys)))} by epoch, {unit}."
    marked = None
    if best and (value := report.epochs[report.best].get(keys[0])) is not None:
        index = report.best % len(report.epochs)
        marked = (next(iter(series)), index)
        told += f" The ring marks the best, {value:.2f}\u00a0% in epoch {_epoch(report.epochs[index])}."
    drawn = svg.lines(title, x, series, x_label="epoch", y_label=y_label, marked=marked)
    colours = legend([(f"fill-{i % 4}", name) for i, name in enumerate(series)]) if len(series) > 1 else None
    return tag("figure", tag("h3", title), colours, drawn, tag("figcaption", told))


def _costs(report: Report) -> Markup | None:
    if not report.costs:
        return None
    return section(
        "Cost against exact training", tag("div", *map(_cost, report.costs), class_="charts three")
    )


def _cost(cost: Comparison) -> Markup:
    drawn = svg.bars(cost.name, cost.values, lambda value: _measure(cost.unit, value))
    first = next(iter(cost.values), "")
    exact = cost.values.get(first)
    shares = [
        f"{arm} {v / exact:.2f}\u00a0\u00d7" for arm, v in cost.values.items() if arm != first and v and exact
    ]
    told = f"Against {first}: {'; '.join(shares)}." if shares else "There is nothing known to compare."
    return tag("figure", tag("h3", cost.name), drawn, tag("figcaption", told))


def _confusion(report: Report) -> Markup | None:
    counts = report.confusion
    if not counts:
        return None
    drawn = scroll(svg.confusion_matrix(counts, report.classes), "Confusion matrix")
    told = "Rows are the true classes, columns the predicted ones; the shade is the share of the row."
    figure = tag("figure", drawn, tag("figcaption", told), class_="fit")
    return section("Confusion matrix", figure, _worst(counts, report.classes))


def _worst(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Markup | None:
    """The confusions that happened most often, in words: in a large matrix they are hard to find."""
    wrong = [(n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if i != j and n]
    if not wrong or len(counts) < 3:
        return None
    rows = [
        [names[i], names[j], str(n), f"{100 * n / sum(counts[i]):.1f} %"]
        for n, i, j in sorted(wrong, key=lambda entry: (-entry[0], entry[1:]))[:_MOST_WORST]
    ]
    head = ["true class", "predicted as", "times", "of the class"]
    return details("The most frequent confusions", table(head, rows, numbers={2, 3}), opened=len(counts) > 20)


def _overlays(report: Report) -> Markup | None:
    if not report.overlays:
        return None
    seen = sorted({number for overlay in report.overlays for number in overlay.classes})
    key = tag(
        "ul",
        *(tag("li", tag("i", style=f"background:{_hex(n)}"), _class_name(report, n)) for n in seen),
        class_="legend",
    )
    return section(
        "Masks",
        key if seen else None,
        tag("div", *map(_overlay, report.overlays), class_="charts"),
    )


def _overlay(overlay: Any) -> Markup:
    pictures = [
        tag(
            "div",
            tag(
                "img",
                src=f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}",
                alt=f"{overlay.name}: {caption}",
            ),
            tag("span", caption),
        )
        for caption, png in overlay.pictures.items()
    ]
    return tag("figure", tag("div", *pictures, class_="overlay"), tag("figcaption", overlay.name))


def _plan(report: Report) -> Markup | None:
    plan = report.plan
    if not plan or not plan["layers"]:
        return None
    active = [row for row in plan["layers"] if row["action"] != "frozen"]
    frozen = [row for row in plan["layers"] if row["action"] == "frozen"]
    foot = []
    if "total" in plan:
        foot = [_plan_cells({"layer": "other modules", **plan["other"]}, True)]
        foot.append(_plan_cells({"layer": "total", **plan["total"]}, True))
    told = "Trained layers learn; layers that pass only hand gradients on; frozen ones do neither."
    parts: list[Markup | None] = [tag("p", told, class_="soft")]
    parts.append(_plan_table(active, foot) if active else None)
    if frozen:
        parts.append(details(f"{len(frozen)} frozen layers", _plan_table(frozen, [])))
    return section("Plan by layer", *parts)


def _plan_table(rows: Sequence[Mapping[str, Any]], foot: list[list[str]]) -> Markup:
    costs = any("kept" in row for row in rows)
    reasons = any(row["reason"] for row in rows)
    head = ["layer", "kind", "action", "method"]
    head += ["kept, exact", "kept", "backward, exact", "backward"] * costs + ["why exact"] * reasons
    cells = [_plan_cells(row, costs) + [row["reason"]] * reasons for row in rows]
    foot = [line + [""] * reasons for line in foot] if costs else []
    caption = "Kept: bytes for the backward of one batch. Backward: its multiply-adds." if costs else None
    return table(head, cells, numbers={4, 5, 6, 7} if costs else set(), foot=foot, caption=caption)


def _plan_cells(row: Mapping[str, Any], costs: bool) -> list[str]:
    cells = [str(row.get(key, "")) for key in ("layer", "kind", "action", "method")]
    if not costs:
        return cells
    forms = {"kept_exact": format_bytes, "kept": format_bytes}
    forms |= {"backward_macs_exact": format_count, "backward_macs": format_count}
    return cells + [form(row[key]) if key in row else "" for key, form in forms.items()]


def _settings(report: Report) -> Markup | None:
    return section("Settings", _pairs(report.settings)) if report.settings else None


def _environment(report: Report) -> Markup | None:
    return section("Environment", _pairs(report.environment)) if report.environment else None


def _pairs(facts: Mapping[str, Any]) -> Markup:
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in _flat(facts)]
    return tag("table", tag("tbody", *rows), class_="pairs")


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    """Nested settings by dotted names.

    >>> list(_flat({"loop": {"epochs": 3}, "data": None}))
    [('loop.epochs', '3'), ('data', 'none')]
    """
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{before}{name}", ", ".join(map(str, value))
        else:
            yield f"{before}{name}", "none" if value is None else str(plain(value))


def _class_name(report: Report, number: int) -> str:
    return report.classes[number] if number < len(report.classes) else str(number)


def _hex(number: int) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour(number))


def _name(key: str) -> str:
    return _NAMES.get(key, key.replace("_", " "))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _epoch(entry: Mapping[str, float | None]) -> int:
    return int(entry.get("epoch") or 0)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _measure(unit: str, value: float) -> str:
    """
    >>> _measure("bytes", 2048), _measure("ms", 12.34), _measure("J", 1.5), _measure("", 2e6)
    ('2.0 KiB', '12.3 ms', '1.5 J', '2.0 M')
    """
    if unit in ("bytes", ""):
        return format_bytes(round(value)) if unit else format_count(round(value))
    return f"{value:.1f} ms" if unit == "ms" else f"{value:.4g} {unit}"


def _time(seconds: float) -> str:
    """
    >>> _time(12), _time(240), _time(9000)
    ('12 s', '4 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
