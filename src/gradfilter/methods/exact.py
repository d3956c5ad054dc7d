"""Exact backpropagation: the baseline, and the method of layers that no other method fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..coarse import densify
from ..geometry import ConvGeometry
from ..ops.exact_conv import Gradients, Want, exact_backward
from .base import Method

__all__ = ["Exact"]


@dataclass(frozen=True)
class Exact(Method):
    """Keep the whole input; gradients are exact.

    >>> Exact()
    Exact()
    """

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        return (1,) * geometry.spatial

    def keep(self, x: Tensor, geometry: ConvGeometry) -> tuple[Tensor, ...]:
        return (x,)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        return exact_backward(densify(grad), kept[0] if kept else None, weight, geometry, want)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        return geometry.macs * (want.x + want.weight)
