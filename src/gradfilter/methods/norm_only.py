"""Only scale and shift of the norm behind a layer train."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Method

__all__ = ["NormOnly"]


@dataclass(frozen=True)
class NormOnly(Method):
    """Train scale and shift of the norm behind a layer; weight, bias and statistics stay.

    A layer without a norm behind it, as most heads, only passes gradients on: give it a method of its own.

    >>> import gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), {"head": gf.Exact(), "*": gf.NormOnly()}, "last:1")
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['inverted.body.2.1.weight', 'inverted.body.2.1.bias', 'head.weight', 'head.bias']
    """

    trains = frozenset()
    trains_norm = True
