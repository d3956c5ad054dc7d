"""Normalisation on the grid: the usual formulas, with patch means of x-hat and pixel counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..coarse import CoarseGradient, densify, onto
from ..grid import Grid, pixels, pool
from ..spectral import SpectralGradient
from ..wanted import wanted_basis, wanted_grid
from .refusal import first_derivative_only
from .walsh import Basis

__all__ = ["batch_norm", "fixed_scale", "group_norm", "layer_norm"]


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm with fixed or with batch statistics."""
    grid = wanted_grid(x)
    affine = any(p is not None and p.requires_grad for p in (weight, bias))
    if (
        not training
        and running_mean is not None
        and running_var is not None
        and not (grid.is_dense and affine)
    ):
        result: Tensor = _FixedNorm.apply(
            x, running_mean, running_var, weight, bias, eps, grid, wanted_basis(x)
        )
        return result
    if grid.is_dense or not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    made: Tensor = _BatchNorm.apply(x, running_mean, running_var, weight, bias, momentum, eps, grid)
    return made


def _per_channel(vector: Tensor, dims: int) -> Tensor:
    return vector.view(1, -1, *[1] * (dims - 2))


def fixed_scale(var: Tensor, weight: Tensor | None, eps: float, like: Tensor) -> Tensor:
    """What a batch norm with fixed statistics multiplies each channel by."""
    scale = torch.rsqrt(var + eps)
    return _per_channel(scale if weight is None else scale * weight, like.dim()).to(like.dtype)


def _over_pixels(values: Tensor) -> Tensor:
    return values.sum([0, *range(2, values.dim())])


class _FixedNorm(torch.autograd.Function):
    """y = scale * x + shift. Nothing is kept, unless the scale trains: then patch means of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        grid: Grid,
        basis: Basis | None,
    ) -> Tensor:
        kept = pool(x, grid) if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(mean, var, weight, kept)
        ctx.eps, ctx.grid, ctx.wanted, ctx.basis = eps, grid, grid.patches, basis
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        mean, var, weight, x = ctx.saved_tensors
        if isinstance(grad, SpectralGradient) and ctx.basis is not None:  # then nothing here trains
            return grad * fixed_scale(var, weight, ctx.eps, grad), *[None] * 7
        values = densify(grad) if ctx.grid.is_dense else onto(grad, ctx.grid)
        x_grad = values * fixed_scale(var, weight, ctx.eps, values)
        weight_grad = bias_grad = None
        if x is not None or ctx.needs_input_grad[4]:
            sums = values * pixels(ctx.grid, values)
            bias_grad = _over_pixels(sums)
            if x is not None:
                weight_grad = (_over_pixels(sums * x) - bias_grad * mean) * torch.rsqrt(var + ctx.eps)
        if not ctx.grid.is_dense:
            x_grad = CoarseGradient(x_grad, ctx.grid)
        bias_grad = bias_grad if ctx.needs_input_grad[4] else None
        return x_grad, None, None, weight_grad, bias_grad, None, None, None


class _BatchNorm(torch.autograd.Function):
    """Batch statistics: keeps patch means of x and the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
        grid: Grid,
    ) -> Tensor:
        y, mean, rstd = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(weight, pool(x, grid), mean, rstd)
        ctx.grid, ctx.wanted = grid, grid.patches
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, x, mean, rstd = ctx.saved_tensors
        values = onto(grad, ctx.grid)
        dims = values.dim()
        x_hat = (x - _per_channel(mean, dims)) * _per_channel(rstd, dims)
        sums = values * pixels(ctx.grid, values)
        bias_grad, weight_grad = _over_pixels(sums), _over_pixels(sums * x_hat)
        wanted = _if_wanted(ctx, weight=weight_grad, bias=bias_grad, first=3)
        count = ctx.grid.shape[0] * _pixel_count(ctx.grid)
        scale = rstd if weight is None else rstd * weight
        centred = (
            values - _per_channel(bias_grad / count, dims) - x_hat * _per_channel(weight_grad / count, dims)
        )
        x_grad = (centred * _per_channel(scale, dims)).to(values.dtype)
        return CoarseGradient(x_grad, ctx.grid), None, None, *wanted, None, None, None


def _if_wanted(ctx: Any, weight: Tensor, bias: Tensor, first: int) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and shift, inputs ``first`` and the one after it, where they train."""
    needs = ctx.needs_input_grad
    return weight if needs[first] else None, bias if needs[first + 1] else None


def _pixel_count(grid: Grid) -> int:
    return int(torch.Size(grid.shape[2:]).numel())


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group norm over maps."""
    grid = wanted_grid(x)
    if grid.is_dense:
        return F.group_norm(x, groups, weight, bias, eps)
    result: Tensor = _GroupNorm.apply(x, groups, weight, bias, eps, grid)
    return result


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        grid: Grid,
    ) -> Tensor:
        n, c = x.shape[:2]
        y, mean, rstd = torch.native_group_norm(
            _laid_out(x), weight, bias, n, c, _pixel_count(grid), groups, eps
        )
        ctx.save_for_backward(weight, pool(x, grid), mean, rstd)
        ctx.groups, ctx.grid, ctx.wanted = groups, grid, grid.patches
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, x, mean, rstd = ctx.saved_tensors
        values, groups = onto(grad, ctx.grid), ctx.groups
        n, c = x.shape[:2]

        def per_group(t: Tensor) -> Tensor:
            return t.repeat_interleave(c // groups, 1).view(n, c, *[1] * (x.dim() - 2))

        x_hat = (x - per_group(mean)) * per_group(rstd)
        sums = values * pixels(ctx.grid, values)
        wanted = _if_wanted(ctx, weight=_over_pixels(sums * x_hat), bias=_over_pixels(sums), first=2)
        scaled = values if weight is None else values * _per_channel(weight, x.dim())
        weighted = scaled * pixels(ctx.grid, values)
        count = c // groups * _pixel_count(ctx.grid)

        def group_mean(t: Tensor) -> Tensor:
            return per_group(t.flatten(2).sum(2).view(n, groups, c // groups).sum(2) / count)

        mean_grad, mean_product = group_mean(weighted), group_mean(weighted * x_hat)
        x_grad = per_group(rstd) * (scaled - mean_grad - x_hat * mean_product)
        return CoarseGradient(x_grad, ctx.grid), None, *wanted, None, None


def _laid_out(x: Tensor) -> Tensor:
    """In the layout that ``F.group_norm`` hands to torch's kernel, which takes only two."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=layouts[x.dim()] if _is_channels_last(x) else torch.contiguous_format)


def _is_channels_last(x: Tensor) -> bool:
    """Whether strides grow from channels over columns and rows to the batch, as torch itself judges it."""
    if x.dim() not in (4, 5) or x.numel() == 0:
        return False
    smallest = 0
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        stride = x.stride(d)
        if stride < smallest or stride == 0 or (d == 0 and smallest == x.stride(1)):
            return False
        smallest = stride * x.shape[d]
    return True


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over channels (the last dimension) of maps."""
    grid = wanted_grid(x)
    if grid.is_dense or len(normalized_shape) != 1 or grid.patches[-1] != 1:
        return F.layer_norm(x, list(normalized_shape), weight, bias, eps)
    result: Tensor = _LayerNorm.apply(x, tuple(normalized_shape), weight, bias, eps, grid)
    return result


class _LayerNorm(torch.autograd.Function):
    """Statistics vary from pixel to pixel, so the patch means of x-hat and 1/std stand for them: the one
    approximation between layers (exact where x is constant on each patch)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        grid: Grid,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        lines = Grid((*grid.shape[:-1], 1), grid.patches)
        ctx.save_for_backward(weight, pool((x - mean) * rstd, grid), pool(rstd, lines))
        ctx.grid, ctx.wanted = grid, grid.patches
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, x_hat, rstd = ctx.saved_tensors
        values = onto(grad, ctx.grid)
        sums = values * pixels(ctx.grid, values)
        dims = list(range(values.dim() - 1))
        scaled = values if weight is None else values * weight
        mean_grad = scaled.mean(-1, keepdim=True)
        mean_product = (scaled * x_hat).mean(-1, keepdim=True)
        x_grad = rstd * (scaled - mean_grad - x_hat * mean_product)
        weight_grad = (sums * x_hat).sum(dims) if ctx.needs_input_grad[2] else None
        bias_grad = sums.sum(dims) if ctx.needs_input_grad[3] else None
        return CoarseGradient(x_grad, ctx.grid), None, weight_grad, bias_grad, None, None
