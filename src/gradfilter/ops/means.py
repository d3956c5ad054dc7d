"""Patch means of a map, worked out once: by the sweep that counts open pixels, or by the first layer to ask.

They are remembered on the tensor itself, so layers that read the same map also share what they keep of it.
Only on maps made on the way: not on a model's inputs, nor on features of its frozen part.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import native
from ..grid import Grid, pool

__all__ = ["patch_means", "remember_means"]


def patch_means(x: Tensor, grid: Grid) -> Tensor:
    """The mean of ``x`` over each patch; on a grid that was asked for before, the very same tensor."""
    if grid.is_dense:
        return x  # not to be remembered: a tensor that holds itself is freed late
    if x.grad_fn is None:  # the user's own tensor, who may refill it in ways that nobody sees
        return _pooled(x, grid)
    known = _known(x)
    if grid.patches not in known:
        remember_means(x, grid, _from_finer(known, grid, x))
        known = _known(x)
    return known[grid.patches]


def remember_means(x: Tensor, grid: Grid, means: Tensor) -> None:
    """For whoever asks next, as long as ``x`` stays as it is."""
    known = _known(x)
    known[grid.patches] = means
    x.gradfilter_means = (x._version, known)  # type: ignore[attr-defined]


def _from_finer(known: dict[tuple[int, ...], Tensor], grid: Grid, x: Tensor) -> Tensor:
    """Means of means where patches of another grid fill ours evenly."""
    for patches, means in known.items():
        nests = all(p % q == 0 for p, q in zip(grid.patches, patches, strict=True))
        if nests and Grid.of(grid.shape, patches).is_even:
            steps = tuple(p // q for p, q in zip(grid.patches, patches, strict=True))
            return _pooled(means, Grid.of(tuple(means.shape), steps))
    return _pooled(x, grid)


def _pooled(x: Tensor, grid: Grid) -> Tensor:
    if not native.serves_patches(x, grid.patches):
        return pool(x, grid)
    nobody = (float("nan"), float("nan"))
    return native.open_pixels_and_means(x, grid.patches[2:], grid.coarse_shape, nobody)[1]


def _known(x: Any) -> dict[tuple[int, ...], Tensor]:
    version, known = getattr(x, "gradfilter_means", (None, {}))
    return known if version == x._version else {}
