"""Masks at one bit per value."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(mask: Tensor) -> Tensor:
    """Eight values to the byte: bit k of the bytes holds the k-th eighth of the values.

    Channels-last masks are packed in that order, and ``unpack`` gives them back in it.

    >>> pack(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = _flat(mask).view(torch.uint8)
    plane = -(-len(flat) // 8)
    packed = flat[:plane].clone()
    for bit in range(1, 8):
        part = flat[bit * plane : (bit + 1) * plane]
        packed[: len(part)].bitwise_or_(part << bit)
    return packed


def unpack(packed: Tensor, like: Tensor) -> Tensor:
    """The mask again, as bytes of 0 and 1 in the shape of ``like``."""
    flat = torch.cat([(packed >> bit) & 1 for bit in range(8)])[: like.numel()]
    if like.dim() < 3:
        return flat.view(like.shape)
    return flat.view(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)


def _flat(mask: Tensor) -> Tensor:
    """Values in channels-last order, whatever the layout in memory."""
    return mask.reshape(-1) if mask.dim() < 3 else mask.movedim(1, -1).reshape(-1)
