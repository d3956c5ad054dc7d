"""A record as text: an aligned table for the terminal, Markdown for documents, CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
from typing import Any

from ..files import write
from ..plans import table
from . import layers, regions, step
from .environment import conditions

__all__ = ["csv_of", "markdown", "markdown_table", "text", "write"]

_LINES = {"layers": layers.lines, "regions": regions.lines, "step": step.lines}


def text(record: dict[str, Any]) -> str:
    """The record's table, its notes and its conditions."""
    return "\n".join([table(_lines(record)), "", *_below(record)])


def markdown(record: dict[str, Any]) -> str:
    """The same in Markdown."""
    return "\n".join([markdown_table(_lines(record)), "", "  \n".join(_below(record))])


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV; a row may lack columns that others have.

    >>> print(csv_of([{"name": "a"}, {"name": "b", "ms": 3.5}]))
    name,ms
    a,
    b,3.5
    <BLANKLINE>
    """
    made = io.StringIO()
    columns = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(made, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue()


def markdown_table(lines: list[list[str]]) -> str:
    """Cells to a Markdown table; the first line is its head.

    >>> print(markdown_table([["layer", "ms"], ["conv", "3"]]))
    | layer | ms |
    | --- | --- |
    | conv | 3 |
    """
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])


def _lines(record: dict[str, Any]) -> list[list[str]]:
    return _LINES[record["benchmark"]](record)


def _below(record: dict[str, Any]) -> list[str]:
    return [*(step.notes(record) if record["benchmark"] == "step" else []), conditions(record["environment"])]
