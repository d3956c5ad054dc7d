"""Exact backpropagation: the baseline, and the method of layers that no other method fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

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

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:  # as the base class does, but both in one call
        return exact_backward(densify(grad), kept[0] if kept else None, weight, geometry, want)

    def weight_gradient_tells_scale(self, module: nn.Module) -> bool:
        return type(self) is Exact  # what derives from it may keep less
