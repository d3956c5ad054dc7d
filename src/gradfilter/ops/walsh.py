"""A map as a few coefficients per patch: Walsh functions in the order of their sign changes, smoothest first.

The functions of a patch are products of one function per axis, and orthonormal. So a 1x1 convolution has the
same backward on all coefficients as on all pixels, and the first coefficient alone is a scaled patch mean.
The ragged last patch of an axis has functions of its own size: Walsh functions if that is a power of two,
else cosines, which are as smooth and exist for every size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import pi, prod

import torch
from torch import Tensor

from ..geometry import ConvGeometry

__all__ = ["Basis"]


@dataclass(frozen=True)
class Basis:
    """The functions of a map of ``sizes``, of which ``patches`` keep those that are smooth enough.

    order: products are kept whose functions, numbered from 0 on each axis, have numbers of a sum below it.
    extra: so many pixels in front of the map are kept as they are; the map then comes as one axis.

    >>> Basis((8, 8), (4, 4), order=2).count  # four patches with (0, 0), (0, 1) and (1, 0)
    12
    """

    sizes: tuple[int, ...]
    patches: tuple[int, ...]
    order: int
    extra: int = 0

    @cached_property
    def count(self) -> int:
        """How many coefficients there are."""
        return self.extra + (self._products if self._chosen is None else len(self._chosen))

    @cached_property
    def transform_macs(self) -> int:
        """Multiply-adds that make the coefficients of one map, or the map from them."""
        macs, sizes = 0, list(self.sizes)
        for i, axis in enumerate(self._axes):
            macs += prod(sizes) * min(self.order, axis.patch)
            sizes[i] = len(axis.numbers)
        return macs

    def geometry(self, layer: ConvGeometry) -> ConvGeometry:
        """A layer over pixels as the 1x1 convolution over coefficients that it is."""
        known: ConvGeometry | None = layer.memo.get(self)
        if known is None:
            plain = ConvGeometry.pointwise((*layer.x_shape[:2], 1, self.count), layer.y_shape[1])
            known = ConvGeometry(plain.x_shape, plain.y_shape, plain.axes, layer.groups)
            layer.memo[self] = known
        return known

    def analyse(self, maps: Tensor) -> Tensor:
        """The coefficients (N, C, 1, count) of maps (N, C, spatial...); channels-last if those are."""
        x = maps.movedim(1, -1).contiguous()  # a copy of other maps is cheaper than products along their rows
        extra = x[:, : self.extra]
        if self.extra:
            x = x[:, self.extra :].unflatten(1, self.sizes)
        for i, axis in enumerate(self._axes, 1):
            x = axis.analyse(x, i)
        x = x.flatten(1, len(self.sizes))
        if self._chosen is not None:
            x = x.index_select(1, _index(self._chosen, x.device))
        if self.extra:
            x = torch.cat([extra, x], 1)
        return _channels_first(x, like=maps).unsqueeze(2)

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """The maps that have these coefficients, and no others."""
        x = coefficients.squeeze(2).movedim(1, -1).contiguous()
        extra, x = x[:, : self.extra], x[:, self.extra :]
        if self._chosen is not None:
            whole = x.new_zeros(len(x), self._products, x.shape[2])
            x = whole.index_copy_(1, _index(self._chosen, x.device), x)
        x = x.unflatten(1, [len(axis.numbers) for axis in self._axes])
        for i, axis in reversed(list(enumerate(self._axes, 1))):
            x = axis.synthesise(x, i)
        if self.extra:
            x = torch.cat([extra, x.flatten(1, len(self.sizes))], 1)
        return _channels_first(x, like=coefficients)

    def sums(self, coefficients: Tensor) -> Tensor:
        """By channel, the sum of all pixels that the coefficients stand for."""
        shape = (1, 1, self.extra + prod(self.sizes)) if self.extra else (1, 1, *self.sizes)
        of_ones = self.analyse(coefficients.new_ones(shape))
        return (coefficients * of_ones).sum((0, 2, 3))

    @cached_property
    def _axes(self) -> tuple[_Axis, ...]:
        return tuple(_Axis(n, p, self.order) for n, p in zip(self.sizes, self.patches, strict=True))

    @cached_property
    def _products(self) -> int:
        return prod(len(axis.numbers) for axis in self._axes)

    @cached_property
    def _chosen(self) -> tuple[int, ...] | None:
        """Which products of the functions kept by each axis are kept, row by row; None for all."""
        smooth = [sum(numbers) < self.order for numbers in product(*(axis.numbers for axis in self._axes))]
        return None if all(smooth) else tuple(i for i, is_smooth in enumerate(smooth) if is_smooth)


@dataclass(frozen=True)
class _Axis:
    size: int
    patch: int
    order: int

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the functions that are kept, patch after patch."""
        full, ragged = divmod(self.size, self.patch)
        return (*range(min(self.patch, self.order)),) * full + (*range(min(ragged, self.order)),)

    def analyse(self, x: Tensor, dim: int) -> Tensor:
        kept = min(self.patch, self.order)
        return self._by_patch(x, dim, self.patch, lambda side: _functions(side, kept, x.dtype, x.device))

    def synthesise(self, x: Tensor, dim: int) -> Tensor:
        kept = min(self.patch, self.order)
        return self._by_patch(x, dim, kept, lambda side: _functions(side, kept, x.dtype, x.device).t())

    def _by_patch(self, x: Tensor, dim: int, side: int, matrix: Callable[[int], Tensor]) -> Tensor:
        """Multiply the numbers that x has of each patch, ``side`` of a full one, by a matrix."""
        if self.patch == 1:
            return x
        full, ragged = divmod(self.size, self.patch)
        parts = []
        if full:
            patches = x.narrow(dim, 0, full * side).unflatten(dim, (full, side))
            parts.append(_times(matrix(self.patch), patches, dim + 1).flatten(dim, dim + 1))
        if ragged:
            rest = x.narrow(dim, full * side, x.shape[dim] - full * side)
            parts.append(_times(matrix(ragged), rest, dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _times(matrix: Tensor, x: Tensor, dim: int) -> Tensor:
    made: Tensor = matrix @ x.flatten(dim + 1)
    return made.view(*made.shape[:-1], *x.shape[dim + 1 :])


def _channels_first(x: Tensor, like: Tensor) -> Tensor:
    """(N, spatial..., C) as (N, C, spatial...), in the memory layout of another tensor like that."""
    maps = x.movedim(-1, 1)
    return maps if like.stride(1) == 1 else maps.contiguous()


@lru_cache(maxsize=1024)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


@lru_cache(maxsize=1024)
def _functions(side: int, kept: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The smoothest functions of a patch, one per row."""
    is_power_of_two = side & (side - 1) == 0
    every = _walsh(side) if is_power_of_two else _cosines(side)
    normal = every / every.square().sum(1, keepdim=True).sqrt()
    return normal[:kept].to(dtype=dtype, device=device)


def _walsh(side: int) -> Tensor:
    """Walsh functions by their number of sign changes.

    >>> _walsh(4).int().tolist()
    [[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, -1, 1], [1, -1, 1, -1]]
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < side:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    changes = (matrix[:, 1:] != matrix[:, :-1]).sum(1)
    return matrix[changes.argsort()]


def _cosines(side: int) -> Tensor:
    pixel, number = torch.arange(side, dtype=torch.float64), torch.arange(side, dtype=torch.float64)
    return torch.cos(number[:, None] * (pixel + 0.5) * (pi / side))
