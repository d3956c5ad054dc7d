"""The backward of a convolution on the grid: patch means of gradient and input in, gradients out.

With g and x constant on their patches, the exact backward, averaged over input patches, needs patch values
only. Four ways to run it; all but ``Collapsed`` give the same numbers, and the cheapest one is taken.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..geometry import ConvGeometry
from .collapsed import Collapsed
from .convolved import Convolved
from .exact_conv import Gradients, Want
from .gathered import Gathered
from .linked import Linked

__all__ = ["coarse_backward", "coarse_macs", "weight_factor"]

Strategy = Collapsed | Convolved | Gathered | Linked


def coarse_backward(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    geometry: ConvGeometry,
    patch: tuple[int, ...],
    taps: str,
    want: Want,
) -> Gradients:
    """Gradients from the patch means ``grad`` and ``x``: patch means for x, full size for the weight."""
    return _strategy(geometry, patch, taps).backward(grad, x, weight, want)


def coarse_macs(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> int:
    """Multiply-adds of one of the two gradients."""
    return _strategy(geometry, patch, taps).macs


def weight_factor(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> float | None:
    """Where the weight gradient is grad^T x * factor, with patches as rows and taps all alike: the factor."""
    if geometry.groups > 1 or geometry.transposed:
        return None
    if prod(patch) == 1:
        return 1.0 if all(axis.is_pointwise and axis.stride == 1 for axis in geometry.axes) else None
    strategy = _strategy(geometry, patch, taps)
    return strategy.total if isinstance(strategy, Collapsed) and strategy.even else None


def _strategy(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> Strategy:
    known: Strategy | None = geometry.memo.get((patch, taps))
    if known is None:
        known = geometry.memo[patch, taps] = _choose(geometry, patch, taps)
    return known


def _choose(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> Strategy:
    one_tap = all(axis.is_pointwise for axis in geometry.axes) and not geometry.transposed
    if taps == "collapse" or one_tap:
        return Collapsed(geometry, patch)
    if geometry.is_depthwise and geometry.spatial == 2 and not geometry.transposed:
        return Linked(geometry, patch)
    convolved = Convolved(geometry, patch)
    if geometry.transposed or geometry.groups > 1:
        return convolved
    gathered = Gathered(geometry, patch)
    return gathered if gathered.cost < convolved.macs else convolved
