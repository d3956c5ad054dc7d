"""Patches of a map: the only place that knows how a tensor is cut into patches.

A grid gives every dimension of a tensor a patch size (1 where it is not pooled, as for batch and channels).
Patches start at the origin; the last one of a dimension may be ragged, and means count real pixels only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Grid",
    "apply_along",
    "common_patches",
    "expand",
    "overlap_matrix",
    "per_axis",
    "per_pixel",
    "pixels",
    "pool",
    "regrid",
]

Patches = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """The patches of one tensor: its full shape and a patch size per dimension.

    >>> Grid((8, 64, 7, 7), (1, 1, 2, 2)).coarse_shape
    (8, 64, 4, 4)
    """

    shape: tuple[int, ...]
    patches: Patches

    @staticmethod
    @lru_cache(maxsize=4096)  # the same few grids are asked for at every step
    def of(shape: tuple[int, ...], patches: Patches) -> Grid:
        """Cut ``shape`` into patches, none larger than its dimension."""
        return Grid(shape, tuple(max(1, min(p, n)) for p, n in zip(patches, shape, strict=True)))

    @staticmethod
    def dense(shape: tuple[int, ...]) -> Grid:
        """The grid whose patches are single pixels."""
        return Grid.of(shape, (1,) * len(shape))

    @cached_property
    def coarse_shape(self) -> tuple[int, ...]:
        return tuple(-(-n // p) for n, p in zip(self.shape, self.patches, strict=True))

    @cached_property
    def pooled(self) -> tuple[int, ...]:
        """The dimensions whose patches are larger than one pixel."""
        return tuple(d for d, p in enumerate(self.patches) if p > 1)

    @cached_property
    def is_dense(self) -> bool:
        return max(self.patches, default=1) == 1

    @cached_property
    def is_even(self) -> bool:
        """Whether every patch has the same number of pixels."""
        return all(n % p == 0 for n, p in zip(self.shape, self.patches, strict=True))

    def permute(self, dims: Sequence[int]) -> Grid:
        return Grid(tuple(self.shape[d] for d in dims), tuple(self.patches[d] for d in dims))

    def common(self, other: Grid) -> Grid:
        """The coarsest grid that both refine to."""
        if self.patches == other.patches:
            return self
        return Grid.of(self.shape, common_patches(self.shape, self.patches, other.patches))


def common_patches(shape: Sequence[int], a: Patches, b: Patches) -> Patches:
    """The largest patches that both refine to; a patch that covers its dimension refines to any.

    >>> common_patches((8, 64, 7, 6), (1, 1, 8, 4), (1, 1, 2, 2))
    (1, 1, 2, 2)
    """
    return tuple(q if p >= n else p if q >= n else gcd(p, q) for n, p, q in zip(shape, a, b, strict=True))


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number per axis, from a number or a sequence.

    >>> per_axis(2, 3)
    (2, 2, 2)
    """
    return (value,) * axes if isinstance(value, int) else tuple(value)


def pool(x: Tensor, grid: Grid) -> Tensor:
    """The mean of ``x`` over each patch."""
    dims = grid.pooled
    if not dims:
        return x
    if x.numel() == 0:
        return x.new_zeros(grid.coarse_shape)
    if all(grid.patches[d] == grid.shape[d] for d in dims):
        return x.mean(dims, keepdim=True)
    if dims[0] >= 2 and x.dim() == 4:
        return _average(x, grid.patches[2:])
    kept = [d for d in range(x.dim()) if d not in dims]
    order = [*kept, *dims]
    moved = x.permute(order)
    lead = moved.shape[: len(kept)]
    flat = moved if len(kept) == 2 else moved.reshape(1, -1, *moved.shape[len(kept) :])
    means = _average(flat, [grid.patches[d] for d in dims])
    means = means.reshape(*lead, *means.shape[2:])
    return means.permute([order.index(d) for d in range(x.dim())])


def _average(x: Tensor, patches: Sequence[int]) -> Tensor:
    """Average pooling of (N, C, spatial...) with ragged ends; one to three spatial axes."""
    if len(patches) == 1:
        return _average(x.unsqueeze(2), (1, patches[0])).squeeze(2)
    op = F.avg_pool2d if len(patches) == 2 else F.avg_pool3d
    if len(patches) == 3 and x.dtype in (torch.float16, torch.bfloat16):
        return _average(x.float(), patches).to(x.dtype)  # the half-precision 3d kernel is missing on CPU
    return op(x, tuple(patches), ceil_mode=True, count_include_pad=False)


def expand(values: Tensor, grid: Grid) -> Tensor:
    """The dense tensor that is constant on each patch."""
    return _repeat(values, grid.patches, grid.shape)


def _repeat(values: Tensor, factors: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Repeat every entry ``factors[d]`` times along each dimension, then crop to ``sizes``."""
    if values.dim() == 4 and values.stride(1) == 1 and factors[0] == factors[1] == 1:
        n, c, h, w = values.shape  # channels-last: both axes in one pass
        index = _pixel_owners((h, w), tuple(factors[2:]), tuple(sizes[2:]), values.device)
        taken = values.permute(0, 2, 3, 1).reshape(n, h * w, c).index_select(1, index)
        return taken.view(n, *sizes[2:], c).permute(0, 3, 1, 2)
    for d, factor in enumerate(factors):
        if factor > 1:
            values = values.index_select(d, _owners(sizes[d], factor, values.device))
    return values


@lru_cache(maxsize=1024)
def _pixel_owners(
    patches: tuple[int, int], factors: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> Tensor:
    """The patch, counted row by row, that each pixel of a map belongs to."""
    rows, columns = (_owners(size, factor, device) for size, factor in zip(sizes, factors, strict=True))
    return (rows[:, None] * patches[1] + columns).flatten()


@lru_cache(maxsize=1024)
def _owners(size: int, patch: int, device: torch.device) -> Tensor:
    """The patch that each pixel belongs to."""
    return torch.arange(size, device=device) // patch


def regrid(values: Tensor, source: Grid, target: Grid) -> Tensor:
    """Project a tensor that is constant on the patches of ``source`` to means on those of ``target``.

    This equals expanding to pixels and averaging again, without the dense tensor in between.
    """
    if source.patches == target.patches:
        return values
    if all(
        s % t == 0 or s >= n for s, t, n in zip(source.patches, target.patches, source.shape, strict=True)
    ):
        return _refine(values, source, target)
    for d, (s, t) in enumerate(zip(source.patches, target.patches, strict=True)):
        if s != t:
            matrix = overlap_matrix(source.shape[d], t, s)
            values = apply_along(values, matrix / matrix.sum(1, keepdim=True), d)
    return values


def _refine(values: Tensor, source: Grid, target: Grid) -> Tensor:
    sizes = target.coarse_shape
    single = [d for d in range(values.dim()) if values.shape[d] == 1]
    factors = [
        1 if d in single else s // t
        for d, (s, t) in enumerate(zip(source.patches, target.patches, strict=True))
    ]
    if max(factors) > 1:
        cropped = [1 if d in single else n for d, n in enumerate(sizes)]
        values = _repeat(values, factors, cropped)
    return values.expand(sizes)


def apply_along(values: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Multiply dimension ``dim`` by a small (new x old) matrix, keeping channels-last maps channels-last."""
    if matrix.numel() == 1:
        return values * matrix.item()
    matrix = matrix.to(dtype=values.dtype, device=values.device)
    if values.dim() == 4 and dim == 3 and values.stride(1) == 1:
        return (matrix @ values.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    if values.dim() == 4 and dim == 2 and values.stride(1) == 1:
        n, c, h, w = values.shape
        rows = matrix @ values.permute(0, 2, 3, 1).reshape(n, h, w * c)
        return rows.reshape(n, len(matrix), w, c).permute(0, 3, 1, 2)
    return (values.movedim(dim, -1) @ matrix.t()).movedim(-1, dim)


@lru_cache(maxsize=4096)
def overlap_matrix(size: int, rows: int, columns: int) -> Tensor:
    """How many of ``size`` pixels lie in both patch i (side ``rows``) and patch j (side ``columns``).

    >>> overlap_matrix(5, 2, 3)
    tensor([[2., 0.],
            [1., 1.],
            [0., 1.]], dtype=torch.float64)
    """
    matrix = torch.zeros(-(-size // rows), -(-size // columns), dtype=torch.float64)
    pixel = torch.arange(size)
    matrix.index_put_(
        (pixel // rows, pixel // columns), torch.ones(size, dtype=torch.float64), accumulate=True
    )
    return matrix


def pixels(grid: Grid, like: Tensor) -> Tensor | float:
    """The number of real pixels in each patch: one number if all are equal, else a broadcastable tensor."""
    if grid.is_even:
        return float(math.prod(grid.patches))
    return _ragged_pixels(grid.shape, grid.patches, like.dtype, like.device)


@lru_cache(maxsize=1024)
def _ragged_pixels(
    shape: tuple[int, ...], patches: Patches, dtype: torch.dtype, device: torch.device
) -> Tensor:
    total = torch.ones((1,) * len(shape), dtype=dtype)
    for d, (n, p) in enumerate(zip(shape, patches, strict=True)):
        if p > 1:
            counts = overlap_matrix(n, p, n).sum(1).to(dtype)
            total = total * counts.view([-1 if i == d else 1 for i in range(len(shape))])
    if len(shape) == 4 and patches[:2] == (1, 1):  # along channels too: broadcasting there is slow
        total = total.expand(1, shape[1], -1, -1).contiguous(memory_format=torch.channels_last)
    return total.to(device)


@lru_cache(maxsize=1024)
def per_pixel(grid: Grid, dtype: torch.dtype) -> Tensor:
    """1 / the number of real pixels of each patch, for every patch of the pooled dimensions.

    >>> per_pixel(Grid((8, 64, 1, 3), (1, 1, 1, 2)), torch.float64)
    tensor([[0.5000, 1.0000]], dtype=torch.float64)
    """
    counts = torch.ones(grid.coarse_shape[2:], dtype=dtype)
    for d in grid.pooled:
        line = overlap_matrix(grid.shape[d], grid.patches[d], grid.shape[d]).sum(1).to(dtype)
        counts = counts * line.view([-1 if i == d else 1 for i in range(2, len(grid.shape))])
    return counts.reciprocal_()
