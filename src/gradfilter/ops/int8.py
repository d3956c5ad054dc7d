"""Symmetric int8: whole numbers from -127 to 127 times a scale, one for all values or one per row.

The largest value of a scale's own is 127 steps, or as many as are asked for, so nothing is ever cut off.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Int8", "dequantized", "has_integer_products", "integer_product", "quantized", "rounded"]

_MOST_ROWS = (2**31 - 1) // 127**2  # so many products fit into a sum of 32 bits


class Int8(NamedTuple):
    """values * scale; the scale has the dimensions of the values."""

    values: Tensor
    scale: Tensor


def quantized(x: Tensor, by_row: bool, steps: int = 127) -> Int8:
    """x in int8, with one scale or with one for each entry of its first dimension.

    >>> quantized(torch.tensor([[1.0, -2.0], [0.0, 0.0]]), by_row=True).values
    tensor([[  64, -127],
            [   0,    0]], dtype=torch.int8)
    """
    whole, scale = _whole(x, by_row, steps)
    return Int8(whole.to(torch.int8), scale)


def dequantized(q: Int8, dtype: torch.dtype) -> Tensor:
    """Floats again."""
    return q.values.to(q.scale.dtype).mul_(q.scale).to(dtype)


def rounded(x: Tensor, by_row: bool) -> Tensor:
    """What int8 makes of x, in floats: the simulation."""
    whole, scale = _whole(x, by_row)
    return whole.mul_(scale).to(x.dtype)


def _whole(x: Tensor, by_row: bool, steps: int = 127) -> tuple[Tensor, Tensor]:
    """Whole numbers, as floats, and their scale: in float32 at least, where halves have too few numbers."""
    wide = x if x.dtype == torch.float64 else x.float()
    dims = list(range(1 if by_row else 0, x.dim()))
    if x.numel() == 0:
        ones = [len(x) if by_row and d == 0 else 1 for d in range(x.dim())]
        return torch.empty_like(wide), wide.new_ones(ones)
    largest = torch.maximum(wide.amax(dims, keepdim=True), wide.amin(dims, keepdim=True).neg_())
    scale = largest.div_(steps).clamp_(min=torch.finfo(wide.dtype).tiny)
    return torch.div(wide, scale).round_(), scale


@cache
def has_integer_products() -> bool:
    """Whether torch multiplies int8 matrices with instructions made for it.

    It can everywhere, but where the processor has no dot products of int8 it is many times slower than float.
    """
    told = getattr(torch.cpu, "_is_vnni_supported", None)
    return told is not None and bool(told())


def integer_product(a: Int8, b: Int8, factor: float) -> Tensor | None:
    """a^T b * factor of matrices with one scale each, summed in int32; None where that could overflow."""
    if len(a.values) > _MOST_ROWS:
        return None
    if 1 in (*a.values.shape, *b.values.shape):  # torch 2.13 misreads strides that mean nothing
        product = a.values.int().t() @ b.values.int()
    else:
        product = torch._int_mm(a.values.t(), b.values)
    return product * (a.scale * b.scale * factor).view(1, 1)
