"""overlap: matrix products over gathered taps, for ragged maps of few patches and many channels."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..grid import pixels
from .exact_conv import Gradients, Want
from .layout import kernel_rows, rows
from .matmul import product
from .taps import tap_counts

__all__ = ["Gathered"]


class Gathered:
    """Matrix products over taps gathered from patches: exact for ragged maps at their own patch."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        p, q = self.out_grid.patches[2:], self.in_grid.patches[2:]
        self.counts = [tap_counts(a, r, s) for a, r, s in zip(geometry.axes, p, q, strict=True)]
        self._tables: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        n, channels_out, *outputs = self.out_grid.coarse_shape
        channels_in, inputs = self.in_grid.coarse_shape[1], self.in_grid.coarse_shape[2:]
        self.macs = n * prod(outputs) * geometry.taps * channels_out * channels_in
        gathering = n * prod(outputs) * geometry.taps * channels_in * max(inputs)
        self.cost = self.macs + 8 * gathering  # gathering moves memory: each of its products is dearer

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        tables, flat = self._tables_for(grad), rows(grad)
        x_grad = self._spread(product(flat, kernel_rows(weight).flatten(1)), tables) if want.x else None
        if x_grad is not None:
            x_grad = x_grad / pixels(self.in_grid, x_grad)
        weight_grad = None
        if want.weight and x is not None:
            found = product(flat.t(), self._gather(x, tables))
            weight_grad = found.view(len(weight), *weight.shape[2:], -1).movedim(-1, 1)
        return Gradients(x_grad, weight_grad)

    def _gather(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        """(N * output patches, taps * C): what each tap of each output patch reads."""
        lead, moved = x.shape[0], x.movedim(1, -1)
        tail = prod(x.shape[1:])
        for table, size in zip(tables, self.in_grid.coarse_shape[2:], strict=True):
            tail //= size
            moved = table @ moved.reshape(lead, size, tail)
            lead *= len(table)
        split = [n for c in self.counts for n in (c.shape[1], c.shape[0])]
        axes = len(tables)
        order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1]
        taken = moved.reshape(x.shape[0], *split, x.shape[1]).permute(order)
        return taken.reshape(
            x.shape[0] * prod(self.out_grid.coarse_shape[2:]), self.geometry.taps * x.shape[1]
        )

    def _spread(self, products: Tensor, tables: list[Tensor]) -> Tensor:
        """The transpose of ``_gather``: back to (N, C, input patches)."""
        n, channels = self.geometry.x_shape[:2]
        axes = len(tables)
        patches = [c.shape[1] for c in self.counts]
        kernel = [c.shape[0] for c in self.counts]
        order = [0, *(i for a in range(axes) for i in (1 + a, 1 + axes + a)), 1 + 2 * axes]
        moved = products.view(n, *patches, *kernel, channels).permute(order)
        lead = n * prod(len(t) for t in tables)
        tail = channels
        for table, size in zip(reversed(tables), reversed(self.in_grid.coarse_shape[2:]), strict=True):
            lead //= len(table)
            moved = table.t() @ moved.reshape(lead, len(table), tail)
            tail *= size
        return moved.view(n, *self.in_grid.coarse_shape[2:], channels).movedim(-1, 1)

    def _tables_for(self, like: Tensor) -> list[Tensor]:
        """Per axis the (output patches * taps, input patches) matrix of counts."""
        key = (like.dtype, like.device)
        if key not in self._tables:
            self._tables[key] = [
                c.transpose(0, 1).reshape(-1, c.shape[2]).to(dtype=like.dtype, device=like.device)
                for c in self.counts
            ]
        return self._tables[key]
