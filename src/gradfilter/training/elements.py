"""Pieces that the parts of a report's page are put together from."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import Markup, tag

__all__ = ["details", "legend", "scroll", "section", "table"]


def section(title: str, *parts: Markup | None) -> Markup:
    """A part of the page under a heading."""
    return tag("section", tag("h2", title), *parts)


def details(title: str, content: Markup, *, opened: bool = False) -> Markup:
    """What opens when its title is clicked."""
    return tag("details", tag("summary", title), content, open="" if opened else None)


def scroll(content: Markup, label: str) -> Markup:
    """Wide content scrolls by itself, with the keyboard too."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: set[int],
    foot: Sequence[Sequence[str]] = (),
    caption: str | None = None,
) -> Markup:
    """Rows of cells, the first of each its heading; the columns in ``numbers`` stand to the right."""

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
    return scroll(tag("table", tag("caption", caption) if caption else None, *parts), caption or "Table")


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names beside their colours, each given as a class of report.css."""
    return tag("ul", *(tag("li", tag("i", class_=style), name) for style, name in entries), class_="legend")
