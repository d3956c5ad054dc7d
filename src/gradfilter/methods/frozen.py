"""Nothing of a layer trains; for mixtures."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Method

__all__ = ["Frozen"]


@dataclass(frozen=True)
class Frozen(Method):
    """Leave a layer as it is: behind the first layer that trains it only passes gradients on.

    >>> import gradfilter as gf
    >>> model = gf.models.build("tiny")
    >>> plan = gf.plan(model, {"inverted.body.1.*": gf.Frozen(), "*": gf.Exact()}, "last:3")
    >>> [row.action for row in plan.rows]
    ['frozen', 'frozen', 'frozen', 'frozen', 'train', 'pass', 'train', 'train']
    """

    trains = frozenset()
