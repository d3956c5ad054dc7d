"""Exact backpropagation: the baseline, and the method of layers that no other method fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..coarse import densify
from ..geometry import ConvGeometry
from ..ops.exact_conv import Gradients, Want, exact_backward
from .base import Memory, Method

__all__ = ["Exact"]


@dataclass(frozen=True)
class Exact(Method):
    """Keep the whole input; gradients are exact.

    >>> Exact()
    Exact()
    """

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        return (x,)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        return exact_backward(densify(grad), kept[0] if kept else None, weight, geometry, want)
