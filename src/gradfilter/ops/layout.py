"""Maps and kernels as matrices; views where memory is channels-last."""

from __future__ import annotations

from torch import Tensor

__all__ = ["kernel_rows", "rows"]


def rows(maps: Tensor) -> Tensor:
    """(N, C, spatial...) as the matrix (N * spatial, C); a view where maps are channels-last."""
    if maps.dim() == 4:
        return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
    return maps.movedim(1, -1).reshape(-1, maps.shape[1])


def kernel_rows(weight: Tensor) -> Tensor:
    """(O, I, taps...) as (O, taps, I); a view where the kernel is channels-last."""
    return weight.movedim(1, -1).reshape(weight.shape[0], -1, weight.shape[1])
