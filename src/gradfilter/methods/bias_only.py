"""Only the bias trains: nothing of the input is needed for it."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Method

__all__ = ["BiasOnly"]


@dataclass(frozen=True)
class BiasOnly(Method):
    """Train a layer's bias alone and keep nothing of its input; gradients are exact.

    A layer without a bias, as before most batch norms, only passes gradients on.

    >>> import gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), gf.BiasOnly(), "last:1")
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['head.bias']
    """

    trains = frozenset({"bias"})
