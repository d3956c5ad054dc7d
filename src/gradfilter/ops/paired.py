"""overlap, depthwise: every pair of an output and an input patch, for maps of a handful of patches."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..grid import pixels
from .exact_conv import Gradients, Want
from .layout import rows
from .taps import tap_counts

__all__ = ["Paired"]


class Paired:
    """Depthwise, on maps of a handful of patches: every pair of an output and an input patch at once."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        self.pairs = (prod(self.in_grid.coarse_shape[2:]), prod(self.out_grid.coarse_shape[2:]))
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.macs = geometry.x_shape[0] * geometry.x_shape[1] * prod(self.pairs)
        self.cost = 8 * self.macs  # elementwise work, against a tuned convolution

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        n, channels = self.geometry.x_shape[:2]
        table, (inputs, outputs) = self._table_for(grad), self.pairs
        g = rows(grad).view(n, 1, outputs, channels)
        x_grad = weight_grad = None
        if want.x:
            links = (table.t() @ weight.reshape(channels, -1).t()).view(1, inputs, outputs, channels)
            sums = (g * links).sum(2).view(n, *self.in_grid.coarse_shape[2:], channels).movedim(-1, 1)
            x_grad = sums / pixels(self.in_grid, sums)
        if want.weight and x is not None:
            products = (g * rows(x).view(n, inputs, 1, channels)).sum(0).view(inputs * outputs, channels)
            weight_grad = (table @ products).t().reshape(weight.shape)
        return Gradients(x_grad, weight_grad)

    def _table_for(self, like: Tensor) -> Tensor:
        """(taps, input patches * output patches): how often each tap links the two."""
        key = (like.dtype, like.device)
        if key not in self._tables:
            p, q = self.out_grid.patches[2:], self.in_grid.patches[2:]
            counts = [tap_counts(a, r, s) for a, r, s in zip(self.geometry.axes, p, q, strict=True)]
            table = torch.ones(1, 1, 1, dtype=torch.float64)
            for count in counts:
                table = torch.einsum("tqp,kab->tkqbpa", table, count).reshape(
                    len(table) * len(count), table.shape[1] * count.shape[2], -1
                )
            self._tables[key] = table.flatten(1).to(dtype=like.dtype, device=like.device)
        return self._tables[key]
