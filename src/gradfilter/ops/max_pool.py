"""Max pooling on the grid: per patch and neighbour, how many maxima lie there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..coarse import CoarseGradient, onto
from ..grid import Grid, pixels, pool
from ..wanted import wanted_grid
from .join import Gated, gated
from .refusal import first_derivative_only

__all__ = ["PoolWindow", "max_pool"]

_POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class PoolWindow:
    """Kernel, stride, padding and dilation of a pooling, one number per axis."""

    def __init__(
        self,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil: bool,
    ) -> None:
        self.kernel, self.stride, self.padding = tuple(kernel), tuple(stride), tuple(padding)
        self.dilation, self.ceil = tuple(dilation), ceil

    def run(self, x: Tensor, return_indices: bool) -> Any:
        return _POOLS[len(self.kernel)](
            x, self.kernel, self.stride, self.padding, self.dilation, self.ceil, return_indices
        )

    def tiles(self, grid: Grid, shape: Sequence[int]) -> bool:
        """Whether windows tile the patches, so that each pixel gets its share wherever the maximum lies."""
        axes = zip(self.kernel, self.stride, self.padding, self.dilation, grid.patches[2:], strict=True)
        whole = all(n % k == 0 for n, k in zip(shape[2:], self.kernel, strict=True))
        return whole and all(k == s and pad == 0 and d == 1 and p % k == 0 for k, s, pad, d, p in axes)


def max_pool(x: Tensor, window: PoolWindow) -> Tensor:
    """Max pooling of (N, C, spatial...)."""
    grid = wanted_grid(x)
    if grid.is_dense:
        y: Tensor = window.run(x, False)
        return y
    gate = gated(x, grid)
    if gate is None and window.tiles(grid, x.shape):
        tiled: Tensor = _TiledMax.apply(x, window, grid)
        return tiled
    result: Tensor = _CountedMax.apply(x, window, grid, gate)
    return result


class _TiledMax(torch.autograd.Function):
    """Keeps nothing: a patch holds whole windows, each of which passes its gradient to one of its pixels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: PoolWindow, grid: Grid) -> Tensor:
        y: Tensor = window.run(x, False)
        sides = tuple(p // k for p, k in zip(grid.patches[2:], window.kernel, strict=True))
        ctx.wanted = (1, 1, *sides)
        ctx.out_grid, ctx.grid, ctx.share = Grid.of(tuple(y.shape), ctx.wanted), grid, 1 / prod(window.kernel)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        return CoarseGradient(onto(grad, ctx.out_grid) * ctx.share, ctx.grid), None, None


class _CountedMax(torch.autograd.Function):
    """Keeps, for each patch of the output and each patch of the input near it, a byte: the maxima there.

    Behind a gate only maxima in open pixels count, and each patch is told what its open pixels get, because
    the gate will multiply by its open share.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: PoolWindow, grid: Grid, gate: Gated | None) -> Tensor:
        y, counts = _maxima(x, window, grid, gate)
        ctx.wanted = grid.patches
        ctx.out_grid, ctx.grid, ctx.window = Grid.of(tuple(y.shape), grid.patches), grid, window
        ctx.first, ctx.reach = _neighbours(window, grid)
        if gate is not None:
            ctx.gate, ctx.open_count = gate.gate, counts
        ctx.save_for_backward(counts, None if gate is None else gate.open_count)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        counts, open_count = ctx.saved_tensors
        ctx.open_count = None
        values = onto(grad, ctx.out_grid)
        if native.fits(values) and _is_native(counts) and (open_count is None or _is_native(open_count)):
            axes = _axes(ctx.window, ctx.grid, ctx.out_grid)
            means = native.max_pool_back(values, counts, open_count, axes, ctx.grid.coarse_shape)
            return CoarseGradient(means, ctx.grid), None, None, None
        patches_out, patches_in = ctx.out_grid.coarse_shape[2:], ctx.grid.coarse_shape[2:]
        steps, before = ctx.window.stride, [-f for f in ctx.first]
        width = [
            max(s * (p - 1) + r, q + b)
            for s, p, r, q, b in zip(steps, patches_out, ctx.reach, patches_in, before, strict=True)
        ]
        total = values.new_zeros(*values.shape[:2], *width)
        for k, shift in enumerate(product(*map(range, ctx.reach))):
            lattice: list[Any] = [
                slice(a, a + s * (p - 1) + 1, s) for a, s, p in zip(shift, steps, patches_out, strict=True)
            ]
            total[(..., *lattice)] += values * counts[k]
        sums = total
        for i, (b, q) in enumerate(zip(before, patches_in, strict=True)):
            sums = sums.narrow(i + 2, b, q)
        share = pixels(ctx.grid, sums) if open_count is None else open_count.to(sums.dtype).clamp_(min=1)
        return CoarseGradient(sums / share, ctx.grid), None, None, None


def _is_native(counts: Tensor) -> bool:
    """Bytes, channels-last, of one map or of one for each neighbour."""
    return counts.dtype == torch.uint8 and counts.movedim(-3, -1).is_contiguous()


def _maxima(x: Tensor, window: PoolWindow, grid: Grid, gate: Gated | None) -> tuple[Tensor, Tensor]:
    """The pooled map, and by neighbour and output patch how many maxima, open ones if gated, lie there."""
    if native.fits(x) and prod(grid.patches) < 256:
        shape = tuple(window.run(x[:1, :1].to("meta"), False).shape)
        out_grid = Grid.of((*x.shape[:2], *shape[2:]), grid.patches)
        bounds = (float("nan"), float("nan")) if gate is None else gate.gate.bounds(x.dtype)
        return native.max_pool(
            x, _axes(window, grid, out_grid), out_grid.shape, out_grid.coarse_shape, bounds
        )
    y, index = window.run(x, True)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # the meta device has no autocast
        y = window.run(x, False)  # autocast knows the two forms apart, and may cast only this one
    out_grid = Grid.of(tuple(y.shape), grid.patches)
    first, reach = _neighbours(window, grid)
    neighbour = _neighbour_of_maximum(index, x.shape, out_grid, grid, window, first, reach)
    if gate is not None:
        neighbour.masked_fill_(gate.gate.openness(y) == 0, -1)
    return y, _count_each(neighbour, prod(reach), out_grid)


def _axes(window: PoolWindow, grid: Grid, out_grid: Grid) -> Tensor:
    """One row per axis, laid out as PoolAxis in native/kernels.cpp."""
    settings = (window.kernel, window.stride, window.padding, window.dilation)
    sides = (grid.patches[2:], out_grid.patches[2:])
    columns = (grid.shape[2:], out_grid.shape[2:], *settings, *sides, *_neighbours(window, grid))
    return torch.tensor(columns).t().contiguous()


def _neighbours(window: PoolWindow, grid: Grid) -> tuple[list[int], list[int]]:
    """Per axis: index of the first input patch that output patch 0 may read, and how many it may read."""
    first, reach = [], []
    settings = zip(window.kernel, window.stride, window.padding, window.dilation, strict=True)
    for (k, s, pad, d), p in zip(settings, grid.patches[2:], strict=True):
        low = -pad // p
        high = (s * (p - 1) - pad + d * (k - 1)) // p
        first.append(low)
        reach.append(high - low + 1)
    return first, reach


def _neighbour_of_maximum(
    index: Tensor,
    shape: Sequence[int],
    out_grid: Grid,
    grid: Grid,
    window: PoolWindow,
    first: list[int],
    reach: list[int],
) -> Tensor:
    """For each output pixel the number of the neighbouring input patch that holds its maximum."""
    number = torch.zeros_like(index)
    for i in reversed(range(len(first))):
        size, d = shape[i + 2], i + 2
        position = index % size
        index = index // size
        own = torch.arange(out_grid.shape[d], device=index.device) // out_grid.patches[d]
        start = (own * window.stride[i] + first[i]).view([-1 if j == d else 1 for j in range(index.dim())])
        number += (position // grid.patches[d] - start) * prod(reach[i + 1 :])
    return number


def _count_each(neighbour: Tensor, kinds: int, grid: Grid) -> Tensor:
    small = torch.uint8 if prod(grid.patches) < 256 else torch.int32
    counts = neighbour.new_empty(kinds, *grid.coarse_shape, dtype=small)
    for k in range(kinds):
        share = pool((neighbour == k).to(torch.float32), grid)
        counts[k] = share.mul_(pixels(grid, share)).round_()
    return counts
