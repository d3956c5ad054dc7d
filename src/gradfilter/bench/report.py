"""A record as text: an aligned table for the terminal, or Markdown for the documentation."""

from __future__ import annotations

from typing import Any

from ..plans import table
from . import layers, regions
from .environment import conditions

__all__ = ["markdown", "text"]

_LINES = {"layers": layers.lines, "regions": regions.lines}


def text(record: dict[str, Any]) -> str:
    """The record's table and its conditions."""
    return f"{table(_lines(record))}\n\n{conditions(record['environment'])}"


def markdown(record: dict[str, Any]) -> str:
    """The same in Markdown."""
    head, *body = ("| " + " | ".join(line) + " |" for line in _lines(record))
    rule = "|" + " --- |" * len(_lines(record)[0])
    return "\n".join([head, rule, *body, "", conditions(record["environment"])])


def _lines(record: dict[str, Any]) -> list[list[str]]:
    return _LINES[record["benchmark"]](record)
