"""Masks at one bit per value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(mask: Tensor) -> Tensor:
    """Eight values to the byte, in memory order: bit k of the bytes holds the k-th eighth of the values.

    >>> pack(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = torch.as_strided(mask, (mask.numel(),), (1,)).view(torch.uint8)
    plane = -(-len(flat) // 8)
    packed = flat[:plane].clone()
    for bit in range(1, 8):
        part = flat[bit * plane : (bit + 1) * plane]
        packed[: len(part)].bitwise_or_(part << bit)
    return packed


def unpack(packed: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The mask again, as bytes of 0 and 1."""
    flat = torch.cat([(packed >> bit) & 1 for bit in range(8)])
    return flat.as_strided(tuple(shape), tuple(strides))
