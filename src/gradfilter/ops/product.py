"""Products of maps, and dropout: the mean of (constant * something) is constant * mean of something."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..coarse import CoarseGradient, onto
from ..grid import Grid, pixels, pool
from ..wanted import wanted_grid
from .refusal import first_derivative_only

__all__ = ["dropout", "multiply"]


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b, where at least one is a map of a region; the other may be a map or broadcast over it."""
    grid = _product_grid(a, b)
    if grid is None or not (_keeps_map(a, b, grid) or _keeps_map(b, a, grid)):
        return torch.mul(a, b)
    result: Tensor = _Product.apply(a, b, grid)
    return result


def _product_grid(a: Tensor, b: Tensor) -> Grid | None:
    """The grid that serves both factors; None where only the dense gradient does."""
    shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
    trained = [t for t in (a, b) if t.requires_grad]
    if all(t.shape != shape for t in trained):
        return None
    grids = [_on_product(wanted_grid(t), shape) for t in trained]
    grid = grids[0] if len(grids) == 1 else grids[0].common(grids[1])
    return None if grid.is_dense else grid


def _on_product(own: Grid, shape: tuple[int, ...]) -> Grid:
    """A factor's grid, seen on the product: where it is broadcast, one patch will do."""
    missing = len(shape) - len(own.shape)
    sides = (
        n if size == 1 else p for size, p, n in zip(own.shape, own.patches, shape[missing:], strict=True)
    )
    return Grid.of(shape, (*shape[:missing], *sides))


def _keeps_map(factor: Tensor, partner: Tensor, grid: Grid) -> bool:
    """Whether torch would keep a partner that varies inside patches for the gradient of ``factor``."""
    return factor.requires_grad and not _own_grid(partner, grid).is_dense


def _own_grid(factor: Tensor, grid: Grid) -> Grid:
    """The grid of a factor that may be smaller than the map: no patches where it is broadcast."""
    missing = len(grid.shape) - factor.dim()
    patches = tuple(p if factor.shape[d] > 1 else 1 for d, p in enumerate(grid.patches[missing:]))
    return Grid.of(tuple(factor.shape), patches)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid) -> Tensor:
        ctx.grids = _own_grid(a, grid), _own_grid(b, grid)
        need_a, need_b = ctx.needs_input_grad[:2]
        mean_a = pool(a, ctx.grids[0]) if need_b else None
        mean_b = pool(b, ctx.grids[1]) if need_a else None
        ctx.save_for_backward(mean_a, mean_b)
        ctx.grid, ctx.wanted = grid, grid.patches
        return torch.mul(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        mean_a, mean_b = ctx.saved_tensors
        values = onto(grad, ctx.grid)
        grad_a = None if mean_b is None else _reduce(values * mean_b, ctx.grid, ctx.grids[0])
        grad_b = None if mean_a is None else _reduce(values * mean_a, ctx.grid, ctx.grids[1])
        return grad_a, grad_b, None


def _reduce(values: Tensor, grid: Grid, own: Grid) -> Tensor:
    """Patch values for a factor as large as the map; else their sum over the pixels it was broadcast to."""
    if own.shape == grid.shape:
        return CoarseGradient(values, grid)
    missing = len(grid.shape) - len(own.shape)
    summed = Grid(
        grid.shape,
        tuple(1 if d >= missing and own.shape[d - missing] > 1 else p for d, p in enumerate(grid.patches)),
    )
    sums = (values * pixels(summed, values)).sum_to_size(own.coarse_shape)
    return sums if own.is_dense else CoarseGradient(sums, own)


def dropout(x: Tensor, p: float, inplace: bool) -> Tensor:
    """Dropout in training, drawing the same numbers as torch does; keeps the mean of its mask."""
    grid = wanted_grid(x)
    if grid.is_dense or not 0 < p < 1 or x.is_cuda or x.numel() == 0:
        return F.dropout(x, p, True, inplace)
    result: Tensor = _Dropout.apply(x, p, inplace, grid)
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, inplace: bool, grid: Grid) -> Tensor:
        noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
        ctx.save_for_backward(pool(noise, grid))
        ctx.grid, ctx.wanted = grid, grid.patches
        if inplace:
            ctx.mark_dirty(x)
            return x.mul_(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        return CoarseGradient(onto(grad, ctx.grid) * ctx.saved_tensors[0], ctx.grid), None, None, None
