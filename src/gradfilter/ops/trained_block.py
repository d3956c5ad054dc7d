"""A trained inverted residual whose forward was one native pass.

Its hidden maps were never in memory: the pass kept their patch means and open pixels, which is all that the
backward of gradient filtering asks for. Here its convolutions become one autograd node each, as ever, with
stand-ins of the right shape in place of the hidden maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..grid import Grid
from ..native import inverted_residual as native
from .activation import Gate
from .fused import FusedConv
from .layer import Call, Followers, run_layer
from .means import remember_means

__all__ = ["Training", "training_of"]

_FEW_PIXELS = 1024  # of a batch: with fewer, packing the weights takes longer than is gained


@dataclass(frozen=True)
class Training:
    """How a block trains on maps of one size: what its pass has to keep."""

    stages: Sequence[FusedConv]
    geometries: Sequence[ConvGeometry]
    patches: native.Patches

    def linked(self, x: Tensor, y: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
        """y as autograd's result of x. kept: means and open pixels of each hidden map, as made."""
        *inner, last = zip(self.stages, self.geometries, strict=True)
        # Where there is no expansion, nothing is kept of the first map, which is x.
        known = [pair for pair in zip(kept[::2], kept[1::2], strict=True) if pair[0] is not None]
        for (stage, geometry), (means, count) in zip(inner, known, strict=True):
            slope = stage.activation.slope
            finish = _Once(means, None if slope is None else count).finish
            followers = Followers(stage.norm, None, slope=slope, finish=finish)
            x = _node(x, stage, geometry, followers, _stand_in(geometry.y_shape))
        return _node(x, *last, Followers(last[0].norm, None), y)


class _Once:
    """Values that are handed over once: an autograd node holds on to what made its output."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made: Tensor = self.values.pop()
        return made

    def finish(self, y: Tensor, grid: Grid) -> Tensor | None:
        """The pass's means and open pixels, in place of one more pass over the map."""
        count: Tensor | None = self.values.pop()
        remember_means(y, grid, self.values.pop())
        return count


def _node(x: Tensor, stage: FusedConv, geometry: ConvGeometry, followers: Followers, y: Tensor) -> Tensor:
    conv: Any = stage.conv
    made = _Once(y).output
    call = Call(made, geometry, conv.gradfilter_method, conv.gradfilter_memory, followers=followers)
    return run_layer(x, conv.weight, conv.bias, call)


def _stand_in(shape: Sequence[int]) -> Tensor:
    """One number where all of a map should be; in place, because autograd has its own ideas about views."""
    return torch.zeros(1, dtype=torch.float32).as_strided_(shape, [0] * len(shape))


def training_of(stages: Sequence[FusedConv], x: Tensor) -> Training | None:
    """None where the native pass cannot see all that has to be kept, or does not gain."""
    if x.numel() < _FEW_PIXELS * x.shape[1]:
        return None
    geometries, shape = [], tuple(x.shape)
    for stage in stages:
        geometries.append(stage.geometry_of(shape))
        shape = geometries[-1].y_shape
    if not all(_keeps_means(*pair) for pair in zip(stages, geometries, strict=True)):
        return None
    grids = [_output_grid(*pair) for pair in zip(stages[:-1], geometries, strict=False)]
    methods: list[Any] = [stage.conv.gradfilter_method for stage in stages]
    wanted = [m.kept_grid(geometry) for m, geometry in zip(methods[1:], geometries[1:], strict=True)]
    if not all(_tells(*pair) for pair in zip(grids, wanted, strict=True)):
        return None
    if not _tiles_nest(geometries[-2], grids):
        return None
    sides = [side for grid in grids for side in grid.patches[2:]]
    bounds = [bound for stage in stages[:-1] for bound in _bounds(stage)]
    first, second = None, grids[-1].coarse_shape
    if len(grids) == 2:
        first = grids[0].coarse_shape
    else:  # no expansion
        sides, bounds = [1, 1, *sides], [0, 0, *bounds]
    return Training(stages, geometries, native.patches((first, second), sides, bounds))


def _keeps_means(stage: FusedConv, geometry: ConvGeometry) -> bool:
    """Whether the layer's own backward needs patch means of its input, and nothing else of any map."""
    method: Any = getattr(stage.conv, "gradfilter_method", None)
    return (
        method is not None
        and stage.conv.weight.requires_grad
        and isinstance(stage.activation.slope, Gate | None)
        and method.refuses(geometry) is None
        and method.kept_grid(geometry) is not None
    )


def _output_grid(stage: FusedConv, geometry: ConvGeometry) -> Grid:
    method: Any = stage.conv.gradfilter_method
    return geometry.output_grid(method.patches(geometry))


def _tells(grid: Grid, wanted: Grid) -> bool:
    """Whether the means that are wanted can be had from those on the grid (ops/means.py)."""
    nests = all(p % q == 0 for p, q in zip(wanted.patches, grid.patches, strict=True))
    return 1 < prod(grid.patches) < 256 and (grid.patches == wanted.patches or (nests and grid.is_even))


def _tiles_nest(depthwise: ConvGeometry, grids: Sequence[Grid]) -> bool:
    """Whether rows of outputs that are worked on together have whole patches of both maps to themselves."""
    axis, group = depthwise.axes[0], grids[-1].patches[2]
    whole = group >= axis.size_out or group * axis.stride % grids[0].patches[2] == 0
    reach = axis.kernel - axis.pad
    return whole and reach >= axis.stride and (axis.size_out - 1) * axis.stride + reach >= axis.size_in


def _bounds(stage: FusedConv) -> tuple[float, float]:
    gate = stage.activation.slope
    return gate.bounds(torch.float32) if isinstance(gate, Gate) else (float("nan"), float("nan"))
