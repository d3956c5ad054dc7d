"""A report as one HTML file: nothing is loaded from anywhere, nothing runs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..masks import colour
from ..plans import format_bytes, format_count
from . import svg
from .markup import Markup, tag
from .report import Comparison, Report, plain

__all__ = ["page"]

_NAMES = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"}
_MOST_WORST = 15  # confusions that are named

# The browser itself then refuses whatever is not in the file.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1d2327; --soft: #5b656d; --rule: #e2e5e7; --accent: #1f6f8b;
  --on-accent: #fff; --c0: #1f6f8b; --c1: #8b969d; --c2: #c2612c; --c3: #8a6bb0; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181b; --card: #1b2125; --ink: #e4e8ea; --soft: #9aa5ad; --rule: #2d353a; --accent: #63b7d3;
  --on-accent: #0d1316; --c0: #63b7d3; --c1: #7d8991; --c2: #e8935f; --c3: #b79bdc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main, header, footer { max-width: 1040px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--rule); }
h3 { font-size: .95rem; margin: 0 0 8px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 70ch; } .soft, figcaption, summary, dt { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 22px 0 0; }
.facts div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.facts div { padding: 12px 16px; } dt { font-size: .8rem; } dd { margin: 0; }
.facts dd { font-size: 1.35rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.facts .more { display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px; }
.charts.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 290px), 1fr)); }
figure.fit { width: fit-content; max-width: 100%; }
figure { margin: 0; padding: 16px; min-width: 0; } figcaption { font-size: .85rem; margin-top: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 8px; padding: 0; list-style: none;
  font-size: .85rem; } .legend li { overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
svg.chart { display: block; max-width: none; } svg.chart:not([width]) { width: 100%; height: auto; }
svg text { font-size: 13px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .small { font-size: 11px; } svg .value { fill: var(--ink); font-weight: 600; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .frame { fill: none; stroke: var(--rule); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .ring { fill: none; stroke: var(--ink); stroke-width: 1.5; }
svg .cell { fill: var(--accent); } svg .on-cell { fill: var(--on-accent); font-weight: 600; }
svg .in-cell { fill: var(--ink); } svg .faint { fill: var(--soft); opacity: .55; }
.fill-0 { fill: var(--c0); background: var(--c0); } .stroke-0 { stroke: var(--c0); }
.fill-1 { fill: var(--c1); background: var(--c1); } .stroke-1 { stroke: var(--c1); }
.fill-2 { fill: var(--c2); background: var(--c2); } .stroke-2 { stroke: var(--c2); }
.fill-3 { fill: var(--c3); background: var(--c3); } .stroke-3 { stroke: var(--c3); }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
caption { text-align: left; color: var(--soft); font-size: .85rem; padding-bottom: 8px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 500; overflow-wrap: anywhere; } .scroll tbody th { min-width: 12em; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tfoot td, tfoot th { font-weight: 600; border-bottom: 0; }
.pairs th { width: 13em; max-width: 45%; } .pairs td { overflow-wrap: anywhere; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .9em; }
.overlay { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 140px), 1fr)); gap: 10px; }
.overlay img { display: block; width: 100%; height: auto; border-radius: 4px; }
.overlay span { font-size: .8rem; color: var(--soft); }
details { margin-top: 14px; } summary { cursor: pointer; font-size: .9rem; margin-bottom: 8px; }
footer { margin-top: 44px; padding-bottom: 32px; font-size: .85rem; color: var(--soft); }
@media print { body { background: none; } figure { break-inside: avoid; } }
"""


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
        tag("style", Markup(_STYLE)),
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
    return _section("Curves", tag("div", *found, class_="charts"))


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
    legend = _legend([(f"fill-{i % 4}", name) for i, name in enumerate(series)]) if len(series) > 1 else None
    return tag("figure", tag("h3", title), legend, drawn, tag("figcaption", told))


def _costs(report: Report) -> Markup | None:
    if not report.costs:
        return None
    return _section(
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
    drawn = _scroll(svg.confusion_matrix(counts, report.classes), "Confusion matrix")
    told = "Rows are the true classes, columns the predicted ones; the shade is the share of the row."
    figure = tag("figure", drawn, tag("figcaption", told), class_="fit")
    return _section("Confusion matrix", figure, _worst(counts, report.classes))


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
    return _details(
        "The most frequent confusions", _table(head, rows, numbers={2, 3}), opened=len(counts) > 20
    )


def _overlays(report: Report) -> Markup | None:
    if not report.overlays:
        return None
    seen = sorted({number for overlay in report.overlays for number in overlay.classes})
    legend = tag(
        "ul",
        *(tag("li", tag("i", style=f"background:{_hex(n)}"), _class_name(report, n)) for n in seen),
        class_="legend",
    )
    return _section(
        "Masks",
        legend if seen else None,
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
        parts.append(_details(f"{len(frozen)} frozen layers", _plan_table(frozen, [])))
    return _section("Plan by layer", *parts)


def _plan_table(rows: Sequence[Mapping[str, Any]], foot: list[list[str]]) -> Markup:
    costs = any("kept" in row for row in rows)
    reasons = any(row["reason"] for row in rows)
    head = ["layer", "kind", "action", "method"]
    head += ["kept, exact", "kept", "backward, exact", "backward"] * costs + ["why exact"] * reasons
    cells = [_plan_cells(row, costs) + [row["reason"]] * reasons for row in rows]
    foot = [line + [""] * reasons for line in foot] if costs else []
    caption = "Kept: bytes for the backward of one batch. Backward: its multiply-adds." if costs else None
    return _table(head, cells, numbers={4, 5, 6, 7} if costs else set(), foot=foot, caption=caption)


def _plan_cells(row: Mapping[str, Any], costs: bool) -> list[str]:
    cells = [str(row.get(key, "")) for key in ("layer", "kind", "action", "method")]
    if not costs:
        return cells
    forms = {"kept_exact": format_bytes, "kept": format_bytes}
    forms |= {"backward_macs_exact": format_count, "backward_macs": format_count}
    return cells + [form(row[key]) if key in row else "" for key, form in forms.items()]


def _settings(report: Report) -> Markup | None:
    return _section("Settings", _pairs(report.settings)) if report.settings else None


def _environment(report: Report) -> Markup | None:
    return _section("Environment", _pairs(report.environment)) if report.environment else None


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


def _section(title: str, *parts: Markup | None) -> Markup:
    return tag("section", tag("h2", title), *parts)


def _details(title: str, content: Markup, *, opened: bool = False) -> Markup:
    return tag("details", tag("summary", title), content, open="" if opened else None)


def _scroll(content: Markup, label: str) -> Markup:
    """Wide content scrolls by itself, with the keyboard too."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: set[int],
    foot: Sequence[Sequence[str]] = (),
    caption: str | None = None,
) -> Markup:
    def line(cells: Sequence[str]) -> Markup:
        kinds = ["number" if i in numbers else None for i in range(len(cells))]
        first = tag("th", cells[0], scope="row")
        return tag(
            "tr",
            first,
            *(tag("td", cell, class_=kind) for cell, kind in zip(cells[1:], kinds[1:], strict=True)),
        )

    heads = [
        tag("th", cell, scope="col", class_="number" if i in numbers else None) for i, cell in enumerate(head)
    ]
    parts = [tag("thead", tag("tr", *heads)), tag("tbody", *map(line, rows))]
    if foot:
        parts.append(tag("tfoot", *map(line, foot)))
    return _scroll(tag("table", tag("caption", caption) if caption else None, *parts), caption or "Table")


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    return tag("ul", *(tag("li", tag("i", class_=style), name) for style, name in entries), class_="legend")


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
    >>> _measure("bytes", 2048), _measure("ms", 12.34), _measure("J", 1.5)
    ('2.0 KiB', '12.3 ms', '1.5 J')
    """
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:.1f} ms" if unit == "ms" else f"{value:.4g} {unit}"


def _time(seconds: float) -> str:
    """
    >>> _time(12), _time(240), _time(9000)
    ('12 s', '4 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
