"""A record as text: an aligned table for the terminal, or Markdown for the documentation."""

from __future__ import annotations

from typing import Any

from ..plans import table
from . import layers, regions
from .environment import conditions

__all__ = ["markdown", "markdown_table", "text"]

_LINES = {"layers": layers.lines, "regions": regions.lines}


def text(record: dict[str, Any]) -> str:
    """The record's table and its conditions."""
    return f"{table(_lines(record))}\n\n{conditions(record['environment'])}"


def markdown(record: dict[str, Any]) -> str:
    """The same in Markdown."""
    return f"{markdown_table(_lines(record))}\n\n{conditions(record['environment'])}"


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
