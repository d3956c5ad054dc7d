"""The geometry of a convolution or linear layer: which input pixel each tap of each output pixel reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from .grid import Grid

__all__ = ["ConvAxis", "ConvGeometry"]


@dataclass(frozen=True, slots=True)
class ConvAxis:
    """One spatial axis: tap k of output pixel i reads input pixel ``stride*i + k*dilation - pad``."""

    size_in: int
    size_out: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    pad_end: int = 0

    def offset(self, tap: int) -> int:
        return tap * self.dilation - self.pad

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == 1 and self.pad == 0 and self.pad_end == 0


@dataclass(frozen=True)
class ConvGeometry:
    """Everything about one call of a layer that does not depend on the numbers in its tensors.

    is_map: whether the spatial axes are those of a map; tokens behind a linear layer may be anything.
    For a transposed convolution ``axes`` describe the convolution it is the transpose of: from its output map
    to its input map.
    """

    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    axes: tuple[ConvAxis, ...]
    groups: int = 1
    transposed: bool = False
    is_map: bool = True

    @cached_property
    def macs(self) -> int:
        """Multiply-adds of the forward pass; each of the two gradients takes as many."""
        small, other = (self.x_shape, self.y_shape) if self.transposed else (self.y_shape, self.x_shape)
        return prod(small) * (other[1] // self.groups) * self.taps

    @cached_property
    def taps(self) -> int:
        return prod(axis.kernel for axis in self.axes)

    @cached_property
    def spatial(self) -> int:
        return len(self.axes)

    @cached_property
    def is_depthwise(self) -> bool:
        return self.x_shape[1] == self.y_shape[1] == self.groups

    def output_grid(self, patch: tuple[int, ...]) -> Grid:
        return Grid.of(self.y_shape, (1, 1, *patch))

    def input_grid(self, patch: tuple[int, ...]) -> Grid:
        """The patches of the input that belong to output patches of side ``patch``."""
        sides = (
            max(1, p // axis.stride) if self.transposed else p * axis.stride
            for p, axis in zip(patch, self.axes, strict=True)
        )
        return Grid.of(self.x_shape, (1, 1, *sides))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What was worked out from this geometry before, by whoever did."""
        return {}

    @classmethod
    def pointwise(cls, x_shape: Sequence[int], channels_out: int) -> ConvGeometry:
        """A linear layer, seen as a 1x1 convolution of (N, C, spatial...)."""
        n, _, *sizes = x_shape
        axes = tuple(ConvAxis(size, size, 1) for size in sizes)
        return cls(tuple(x_shape), (n, channels_out, *sizes), axes, is_map=len(sizes) > 1)
