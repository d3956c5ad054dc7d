"""overlap, depthwise: one native walk over the pairs of patches that taps link."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .. import native
from ..geometry import ConvAxis, ConvGeometry
from ..grid import per_pixel
from .convolved import Convolved
from .exact_conv import Gradients, Want
from .taps import tap_counts

__all__ = ["Linked"]


class Linked:
    """Depthwise maps of any size, ragged or not, each patch at its own size; else as ``Convolved``."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        sides = zip(geometry.axes, self.out_grid.patches[2:], self.in_grid.patches[2:], strict=True)
        height, width = (_links(axis, out_side, in_side) for axis, out_side, in_side in sides)
        self.axes = (height, width)
        self.macs = prod(geometry.x_shape[:2]) * int(height.table[4]) * int(width.table[4])
        self.convolved = Convolved(geometry, patch)

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        x = x if want.weight else None
        if not (native.fits(grad, x) and weight.is_contiguous() and weight.dtype == grad.dtype):
            return self.convolved.backward(grad, x, weight, want)
        found = native.depthwise(grad, x, weight, want.x, per_pixel(self.in_grid, grad.dtype), self.axes)
        return Gradients(*found)


def _links(axis: ConvAxis, out_side: int, in_side: int) -> native.Links:
    """Which output patches each input patch is linked with, and what each link weighs per tap."""
    counts = tap_counts(axis, out_side, in_side)
    taps, outputs, inputs = counts.shape
    kinds: dict[tuple[float, ...], int] = {}
    first, patch, kind = [0], [], []
    for q in range(inputs):
        for p in range(outputs):
            weighs = tuple(counts[:, p, q].tolist())
            if any(weighs):
                patch.append(p)
                kind.append(kinds.setdefault(weighs, len(kinds)))
        first.append(len(patch))
    table = [inputs, outputs, taps, len(kinds), len(patch), *first, *patch, *kind]
    weights = torch.tensor(list(kinds) or [[0.0] * taps], dtype=torch.float64)
    return native.Links(torch.tensor(table, dtype=torch.int32), weights)
