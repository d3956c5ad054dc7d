"""A batch of maps as a few maps and how much of each every sample has; weight gradients from these alone."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import Tensor

from ..geometry import ConvGeometry
from .exact_conv import exact_weight_gradient
from .subspace import Enough, leading
from .unfolding import at_least_float32, balanced, mode_product

__all__ = ["batch_factors", "factors_macs", "factors_weight_gradient", "most_macs"]


def batch_factors(x: Tensor, enough: Enough) -> tuple[Tensor, Tensor] | None:
    """U (N, k) and Sigma V^T = U^T x (k, C, spatial...), up to scale; None if they are not smaller than x."""
    full = at_least_float32(x)
    shares = leading(full, 0, enough)
    if shares.shape[1] > _largest_rank(tuple(x.shape)):
        return None
    maps, shares = balanced(mode_product(full, shares.t(), 0), shares)
    return shares.to(x.dtype), maps.to(x.dtype)


def factors_weight_gradient(
    grad: Tensor, shares: Tensor, maps: Tensor, weight: Tensor, geometry: ConvGeometry
) -> Tensor:
    """The sum over samples is one over the kept maps, once the gradient is summed with their shares."""
    grad, shares, maps = (at_least_float32(t) for t in (grad, shares, maps))
    mixed = mode_product(grad, shares.t(), 0)
    return exact_weight_gradient(mixed, maps, weight.shape, _with_batch(geometry, len(maps)))


def factors_macs(geometry: ConvGeometry, rank: int) -> int:
    """Multiply-adds of ``factors_weight_gradient``."""
    return rank * prod(geometry.y_shape) + _with_batch(geometry, rank).macs


def most_macs(geometry: ConvGeometry) -> int:
    """The most a weight gradient can take, whatever the rank is."""
    return max(geometry.macs, factors_macs(geometry, _largest_rank(geometry.x_shape)))


def _largest_rank(shape: tuple[int, ...]) -> int:
    """The largest rank whose factors are smaller than the tensor."""
    rows, columns = shape[0], prod(shape[1:])
    return max(0, rows * columns - 1) // (rows + columns) if rows + columns else 0


def _with_batch(geometry: ConvGeometry, batch: int) -> ConvGeometry:
    x_shape, y_shape = ((batch, *shape[1:]) for shape in (geometry.x_shape, geometry.y_shape))
    return replace(geometry, x_shape=x_shape, y_shape=y_shape)
