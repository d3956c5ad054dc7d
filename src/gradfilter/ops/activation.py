"""Activations on the grid.

A gradient that is constant on a patch leaves an activation as constant * mean of f'. Gates (ReLU and its kin,
whose slope is one of two numbers) keep how many pixels of each patch are open, one byte; on the dense grid, one
bit per value. Smooth activations keep the mean slope.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..coarse import CoarseGradient, densify, onto
from ..grid import Grid, pixels, pool
from ..wanted import wanted_grid
from .bits import pack, unpack
from .layer import first_derivative_only

__all__ = ["Gate", "gated", "prelu", "smooth"]


class Gate(NamedTuple):
    """A gate is open, with slope 1, where low < output < high; shut, its slope is ``shut``."""

    low: float = 0.0
    high: float = float("inf")
    shut: float = 0.0

    def open(self, y: Tensor) -> Tensor:
        above = y > self.low
        return above if self.high == float("inf") else above & (y < self.high)


def gated(x: Tensor, function: Callable[[Tensor], Tensor], gate: Gate, inplace: bool) -> Tensor:
    """A gate activation; ``function`` computes it, in place or not."""
    result: Tensor = _Gated.apply(x, function, gate, inplace, wanted_grid(x))
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], gate: Gate, inplace: bool, grid: Grid
    ) -> Tensor:
        y = function(x)
        if inplace:
            ctx.mark_dirty(x)
        is_open = gate.open(y)
        ctx.save_for_backward(pack(is_open) if grid.is_dense else _open_count(is_open, grid))
        ctx.gate, ctx.grid, ctx.wanted = gate, grid, grid.patches
        ctx.strides = is_open.stride()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        (kept,) = ctx.saved_tensors
        if ctx.grid.is_dense:
            grad = densify(grad)
            is_open = unpack(kept, ctx.grid.shape, ctx.strides)
            return _two_slopes(grad, is_open.to(grad.dtype), ctx.gate.shut), None, None, None, None
        values = onto(grad, ctx.grid)
        share = kept.to(values.dtype) / pixels(ctx.grid, values)
        return CoarseGradient(_two_slopes(values, share, ctx.gate.shut), ctx.grid), None, None, None, None


def _open_count(is_open: Tensor, grid: Grid) -> Tensor:
    """How many pixels of each patch are open, in the smallest integer that holds a full patch."""
    share = pool(is_open.to(torch.float32), grid)
    count = share.mul_(pixels(grid, share)).round_()
    return count.to(torch.uint8 if prod(grid.patches) < 256 else torch.int32)


def _two_slopes(values: Tensor, share: Tensor, shut: float) -> Tensor:
    return values * share if shut == 0 else values * (share * (1 - shut) + shut)


def smooth(
    x: Tensor,
    function: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor, Tensor], Tensor],
    inplace: bool,
) -> Tensor:
    """A smooth activation; ``slope(one, x)`` is its derivative. On the dense grid torch's own is as good."""
    grid = wanted_grid(x)
    if grid.is_dense:
        return function(x)
    result: Tensor = _Smooth.apply(x, function, slope, inplace, grid)
    return result


class _Smooth(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor, Tensor], Tensor],
        inplace: bool,
        grid: Grid,
    ) -> Tensor:
        one = x.new_ones(1).expand(x.shape)
        ctx.save_for_backward(pool(slope(one, x), grid))
        ctx.grid, ctx.wanted = grid, grid.patches
        if inplace:
            ctx.mark_dirty(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        values = onto(grad, ctx.grid) * ctx.saved_tensors[0]
        return CoarseGradient(values, ctx.grid), None, None, None, None


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """PReLU: a gate whose shut slope is learned, per channel or shared."""
    grid = wanted_grid(x)
    if grid.is_dense:
        return torch.prelu(x, weight)
    result: Tensor = _PReLU.apply(x, weight, grid)
    return result


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        kept = [weight, _open_count(x > 0, grid)]
        if ctx.needs_input_grad[1]:
            kept.append(pool(x.clamp(max=0), grid))
        ctx.save_for_backward(*kept)
        ctx.grid, ctx.wanted = grid, grid.patches
        return torch.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, count, *below = ctx.saved_tensors
        values = onto(grad, ctx.grid)
        total = pixels(ctx.grid, values)
        share = count.to(values.dtype) / total
        shut = weight.view(1, -1, *[1] * (values.dim() - 2))
        weight_grad = None
        if below:
            sums = values * below[0] * total
            dims = [0, *range(2, sums.dim())] if weight.numel() > 1 else list(range(sums.dim()))
            weight_grad = sums.sum(dims).view_as(weight)
        return CoarseGradient(values * (share + (1 - share) * shut), ctx.grid), weight_grad, None
