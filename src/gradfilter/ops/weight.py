"""The exact weight gradient alone, of an input or of what stands for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..geometry import ConvGeometry
from .exact_conv import Want, exact_backward

__all__ = ["exact_weight_gradient"]


def exact_weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int], geometry: ConvGeometry) -> Tensor:
    """The gradient of a weight of this shape; its numbers are not needed."""
    weight = grad.new_empty(()).expand(*shape)
    found = exact_backward(grad, x, weight, geometry, Want(False, True)).weight
    if found is None:
        raise AssertionError("a weight gradient was asked for")
    return found
