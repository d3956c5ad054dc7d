"""The unfoldings of a tensor along its modes: products with them, in the tensor's own memory order.

The unfolding along a mode is the matrix whose rows are the slices of that mode.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

__all__ = ["at_least_float32", "balanced", "mode_cross", "mode_gram", "mode_product", "other_modes"]

FEWEST_COLUMNS = 32  # a batch of narrower products is slower than one product of a copy


def at_least_float32(x: Tensor) -> Tensor:
    """Half types lack kernels, and the digits that sums of squares need."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def balanced(core: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Core and factor with the core's scale shared between them: float16 could not hold all of it in one."""
    largest = core.abs().amax()
    scale = torch.where(largest > 0, largest.sqrt(), 1.0)
    return core / scale, factor * scale


def other_modes(x: Tensor, mode: int) -> int:
    """How many columns the unfolding has.

    >>> other_modes(torch.zeros(2, 3, 5), 1)
    10
    """
    return prod(size for i, size in enumerate(x.shape) if i != mode)


def mode_product(x: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """The tensor with ``matrix`` multiplied onto a mode: its size becomes the matrix's rows.

    >>> mode_product(torch.ones(2, 3, 5), torch.ones(4, 3), 1).shape
    torch.Size([2, 4, 5])
    """
    order = _memory_order(x)
    place = order.index(mode)
    moved = x.permute(order)
    before, after = moved.shape[:place], moved.shape[place + 1 :]
    blocks = _blocks(x, order, mode)
    if blocks.shape[0] > 1 and blocks.shape[2] < FEWEST_COLUMNS:
        rows = blocks.transpose(1, 2).reshape(-1, x.shape[mode])
        made = (rows @ matrix.t()).reshape(*before, *after, len(matrix)).movedim(-1, place)
    else:
        made = (matrix @ blocks).reshape(*before, len(matrix), *after)
    return made.permute([order.index(i) for i in range(x.dim())])


def mode_cross(x: Tensor, y: Tensor, mode: int) -> Tensor:
    """The unfolding of ``x`` times that of ``y`` transposed; they differ in that mode's size at most.

    >>> mode_cross(torch.ones(2, 3, 5), torch.ones(2, 4, 5), 1)[0]
    tensor([10., 10., 10., 10.])
    """
    order = _memory_order(x)
    a, b = _blocks(x, order, mode), _blocks(y, order, mode)
    if a.shape[2] == 1:
        return a[..., 0].t() @ b[..., 0]
    if a.shape[0] > 1 and a.shape[2] < FEWEST_COLUMNS:
        return a.transpose(0, 1).flatten(1) @ b.transpose(0, 1).flatten(1).t()
    return torch.bmm(a, b.transpose(1, 2)).sum(0)


def mode_gram(x: Tensor, mode: int) -> Tensor:
    """The unfolding times its own transpose."""
    return mode_cross(x, x, mode)


def _memory_order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _blocks(x: Tensor, order: list[int], mode: int) -> Tensor:
    """(what varies slower in memory, the mode, what varies faster)."""
    place = order.index(mode)
    moved = x.permute(order)
    return moved.reshape(prod(moved.shape[:place]), x.shape[mode], prod(moved.shape[place + 1 :]))
