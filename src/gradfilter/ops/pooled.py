"""Patch means that autograd follows: their backward needs no more than the grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..grid import Grid, expand, pixels, pool
from .refusal import first_derivative_only

__all__ = ["pooled"]


def pooled(x: Tensor, side: int) -> Tensor:
    """The means of (N, C, spatial...) over patches of this side; the last ones may be ragged.

    >>> pooled(torch.arange(5.0).view(1, 1, 5), 2).flatten()
    tensor([0.5000, 2.5000, 4.0000])
    """
    result: Tensor = _Pooled.apply(x, Grid.of(tuple(x.shape), (1, 1, *[side] * (x.dim() - 2))))
    return result


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        means = pool(x, grid)
        return means.clone() if means is x else means

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first_derivative_only()
        return expand(grad / pixels(ctx.grid, grad), ctx.grid), None
