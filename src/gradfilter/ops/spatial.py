"""Linear operators along the axes of a map: average pooling, up-sampling, padding, means.

Such an operator is one small matrix per axis. Seen through two grids it is a smaller matrix per axis, so its
backward stays on the grid and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..coarse import CoarseGradient
from ..grid import Grid, apply_along, overlap_matrix
from ..wanted import wanted_grid
from .refusal import first_derivative_only

__all__ = ["AxisOperator", "spatial_mean", "spatially_linear"]

AxisOperator = Callable[[Tensor], Tensor]


def spatially_linear(
    x: Tensor, function: Callable[[Tensor], Tensor], along: Sequence[AxisOperator], key: tuple[Any, ...]
) -> Tensor:
    """Run ``function``, which acts on the trailing axes of x as the one-axis operators ``along`` do in turn.

    ``key`` names the operators: calls with equal keys and sizes share their matrices.
    """
    grid = wanted_grid(x)
    result: Tensor = _SpatiallyLinear.apply(x, function, tuple(along), key, grid)
    return result


class _SpatiallyLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        along: tuple[AxisOperator, ...],
        key: tuple[Any, ...],
        grid: Grid,
    ) -> Tensor:
        y = function(x)
        ctx.along, ctx.key, ctx.grid = along, key, grid
        lead = y.dim() - len(along)
        sides = [
            max(1, p * after // before)
            for p, before, after in zip(grid.patches[lead:], x.shape[lead:], y.shape[lead:], strict=True)
        ]
        ctx.wanted = (1,) * y.dim() if grid.is_dense else (1,) * lead + tuple(sides)
        ctx.out_shape = tuple(y.shape)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        source, values = Grid.dense(ctx.out_shape), grad
        if isinstance(grad, CoarseGradient):
            source, values = grad.grid, grad.means
        patches = list(ctx.grid.patches)
        lead = len(patches) - len(ctx.along)
        for i, operator in enumerate(ctx.along):
            d = lead + i
            keyed, size = _Keyed(operator, (*ctx.key, i)), ctx.grid.shape[d]
            if ctx.out_shape[d] == 1 and patches[d] > 1 and _is_mean(keyed, size):
                patches[d] = size
            matrix = _coarse_matrix(keyed, size, patches[d], ctx.out_shape[d], source.patches[d])
            values = apply_along(values, matrix, d)
        target = Grid(ctx.grid.shape, tuple(patches))
        x_grad = values if target.is_dense else CoarseGradient(values, target)
        return x_grad, None, None, None, None


class _Keyed:
    """An operator that equals another if their keys do, for the cache below."""

    def __init__(self, operator: AxisOperator, key: tuple[Any, ...]) -> None:
        self.operator, self.key = operator, key

    def matrix(self, size: int) -> Tensor:
        """(inputs, outputs): what each input pixel gives to each output pixel."""
        return self.operator(torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@lru_cache(maxsize=1024)
def _is_mean(keyed: _Keyed, size: int) -> bool:
    """Whether the only output reads all inputs alike, so that one patch as large as the map will do."""
    return len(keyed.matrix(size).unique()) == 1


@lru_cache(maxsize=1024)
def _coarse_matrix(keyed: _Keyed, size_in: int, in_patch: int, size_out: int, out_patch: int) -> Tensor:
    """Means over input patches of the transposed operator, for a gradient constant on output patches."""
    to_patches = overlap_matrix(size_in, in_patch, 1)
    from_patches = overlap_matrix(size_out, 1, out_patch)
    return to_patches @ keyed.matrix(size_in) @ from_patches / to_patches.sum(1, keepdim=True)


def spatial_mean(
    x: Tensor, dims: Sequence[int], keepdim: bool, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """The mean over ``dims``, pooled ones among them; its gradient is one patch as large as the map."""
    dims = tuple(d % x.dim() for d in dims)
    result: Tensor = _SpatialMean.apply(x, dims, keepdim, function, wanted_grid(x).pooled)
    return result


class _SpatialMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: tuple[int, ...],
        keepdim: bool,
        function: Callable[[Tensor], Tensor],
        pooled: tuple[int, ...],
    ) -> Tensor:
        shape = tuple(x.shape)
        ctx.grid = Grid(shape, tuple(n if d in pooled else 1 for d, n in enumerate(shape)))
        ctx.kept_sizes = [1 if d in dims else n for d, n in enumerate(shape)]
        ctx.count = max(1, prod(shape[d] for d in dims))
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        values = (grad.reshape(ctx.kept_sizes) / ctx.count).expand(ctx.grid.coarse_shape)
        return CoarseGradient(values, ctx.grid), None, None, None, None
