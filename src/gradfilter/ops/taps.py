"""How the taps of a kernel fall on the patches of a grid, per axis.

For output patch p and input patch q, tap k contributes ``count[k, p, q]`` times: the number of output pixels
of p whose tap k reads a pixel of q. Everything the coarse backward does follows from these counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from ..geometry import ConvAxis

__all__ = ["WorkAxis", "tap_counts", "tap_matrix", "work_axis"]


@dataclass(frozen=True, eq=False)
class WorkAxis:
    """One axis of the convolution that stands for the original one on a grid.

    ``shares[k, a]``: the share of the taps k that falls on column a of the coarse kernel.
    """

    out_patch: int
    in_patch: int
    shares: Tensor
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def columns(self) -> int:
        return int(self.shares.shape[1])


@lru_cache(maxsize=4096)
def tap_counts(axis: ConvAxis, out_patch: int, in_patch: int) -> Tensor:
    """``count[k, p, q]``; taps that read padding count nowhere.

    >>> tap_counts(ConvAxis(4, 4, kernel=3, pad=1, pad_end=1), 2, 2)[0]
    tensor([[1., 0.],
            [1., 1.]], dtype=torch.float64)
    """
    pixel = torch.arange(axis.size_out)
    tap = torch.arange(axis.kernel)
    read = axis.stride * pixel + (tap * axis.dilation - axis.pad)[:, None]
    real = (read >= 0) & (read < axis.size_in)
    shape = (axis.kernel, -(-axis.size_out // out_patch), -(-axis.size_in // in_patch))
    index = (
        tap[:, None].expand_as(read)[real],
        (pixel // out_patch).expand_as(read)[real],
        torch.div(read, in_patch, rounding_mode="floor")[real],
    )
    counts = torch.zeros(shape, dtype=torch.float64)
    return counts.index_put_(index, torch.ones(len(index[0]), dtype=torch.float64), accumulate=True)


@lru_cache(maxsize=4096)
def work_axis(axis: ConvAxis, patch: int, in_patch: int) -> WorkAxis:
    """The coarsest grid, no coarser than ``patch``, on which one kernel serves every patch of the axis.

    Ragged maps have none at ``patch`` itself, because their last patch reads differently; a divisor of it may
    do, and single pixels always do.
    """
    if axis.size_out <= patch:
        counts = tap_counts(axis, axis.size_out, min(in_patch, axis.size_in))
        return WorkAxis(axis.size_out, min(in_patch, axis.size_in), counts[:, 0] / axis.size_out)
    finest = 1 if axis.stride > 1 and axis.dilation == 1 else 2  # strided single pixels still pool the input
    for side in range(patch, finest - 1, -1):
        if patch % side == 0 and in_patch % (side * axis.stride) == 0 and _is_uniform(axis, side):
            return _uniform(axis, side)
    if (
        axis.size_in + 2 * axis.pad - axis.dilation * (axis.kernel - 1) - 1
    ) // axis.stride + 1 != axis.size_out:
        landings = [[axis.offset(k)] for k in range(axis.kernel)]
        return _padded_alike(landings, axis.size_in, axis.size_out, 1, 1, axis.stride)
    shares = torch.eye(axis.kernel, dtype=torch.float64)
    return WorkAxis(1, 1, shares, axis.stride, axis.pad, axis.dilation)


def _is_uniform(axis: ConvAxis, side: int) -> bool:
    return axis.size_out % side == 0 and axis.size_in % (side * axis.stride) == 0


def _uniform(axis: ConvAxis, side: int) -> WorkAxis:
    in_side = side * axis.stride
    landings = [
        [(axis.stride * j + axis.offset(k)) // in_side for j in range(side)] for k in range(axis.kernel)
    ]
    return _padded_alike(landings, axis.size_in // in_side, axis.size_out // side, side, in_side, 1)


def _padded_alike(
    landings: list[list[int]], size_in: int, size_out: int, side: int, in_side: int, stride: int
) -> WorkAxis:
    """The kernel whose taps land as listed, with empty columns so that torch, which pads both ends alike,
    makes the right number of outputs."""
    first = min(0, min(map(min, landings)))
    last = max(0, max(map(max, landings)))
    left, columns = -first, last - first + 1
    made = (size_in + 2 * left - columns) // stride + 1
    extra_left = stride * max(0, size_out - made)
    columns += extra_left + stride * max(0, made - size_out)
    left += extra_left
    shares = torch.zeros(len(landings), columns, dtype=torch.float64)
    for k, row in enumerate(landings):
        for a in row:
            shares[k, a + left] += 1 / len(row)
    return WorkAxis(side, in_side, shares, stride=stride, padding=left)


def tap_matrix(axes: tuple[WorkAxis, ...]) -> Tensor | None:
    """All taps to all columns of the coarse kernel; None where that changes nothing."""
    matrix = reduce(torch.kron, [axis.shares for axis in axes])
    same = matrix.shape[0] == matrix.shape[1] and torch.equal(
        matrix, torch.eye(len(matrix), dtype=matrix.dtype)
    )
    return None if same else matrix
