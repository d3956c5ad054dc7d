"""Activations on the grid.

A gradient that is constant on a patch leaves an activation as constant * mean of f'. Gates (ReLU and its
kin, whose slope is one of two numbers) keep how many pixels of each patch are open, one byte; on the dense
grid, one bit per value. Smooth activations keep the mean slope.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import native
from ..coarse import CoarseGradient, densify, onto
from ..grid import Grid, per_pixel, pixels, pool
from ..wanted import wanted_grid
from .bits import pack, unpack
from .join import Gated, gated_term
from .means import remember_means
from .refusal import first_derivative_only

__all__ = ["Gate", "Slope", "SlopeKind", "activate", "prelu"]


class SlopeKind(Protocol):
    """How the slope of an activation is kept and applied."""

    def fits(self, grid: Grid) -> bool:
        """Whether it has a cheaper way than torch's on this grid."""

    def before(self, x: Tensor, grid: Grid) -> Tensor | None:
        """What is kept of the input."""

    def after(self, y: Tensor, grid: Grid) -> Tensor | None:
        """What is kept of the output."""

    def times(self, values: Tensor, kept: Tensor, grid: Grid, scale: Tensor | None = None) -> Tensor:
        """The gradient on the grid, times the slope, and times the scale of a norm just before."""


class Gate(NamedTuple):
    """A gate is open, with slope 1, where low < output < high; shut, its slope is ``shut``."""

    low: float = 0.0
    high: float = float("inf")
    shut: float = 0.0

    def fits(self, grid: Grid) -> bool:
        return self.shut >= 0  # else the sign of the output does not tell that of the input

    def before(self, x: Tensor, grid: Grid) -> None:
        return None

    def after(self, y: Tensor, grid: Grid) -> Tensor:
        if _is_native(y, grid):
            count, means = native.open_pixels_and_means(
                y, grid.patches[2:], grid.coarse_shape, self.bounds(y.dtype)
            )
            remember_means(y, grid, means)  # the layer that reads y keeps them
            return count
        if grid.is_dense and native.fits(y):
            return native.open_bits(y, self.bounds(y.dtype))
        openness = self.openness(y)
        return pack(openness != 0) if grid.is_dense else count_open(openness, grid)

    def bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """The outputs at and beyond which the gate is shut; NaN where there is none."""
        if self.high == float("inf"):
            return self.low, float("nan")
        return _as_stored(self.low, dtype), _as_stored(self.high, dtype)

    def openness(self, y: Tensor) -> Tensor:
        """1 where the gate is open, 0 where it is shut; torch's backward of gates makes it in one pass."""
        one = y.new_ones(1).expand(y.shape)
        if self.high == float("inf"):
            above: Tensor = torch.ops.aten.threshold_backward(one, y, self.low)
            return above
        low, high = (_as_stored(bound, y.dtype) for bound in (self.low, self.high))
        between: Tensor = torch.ops.aten.hardtanh_backward(one, y, low, high)
        return between

    def shuts(self, grid: Grid) -> bool:
        """Whether nothing passes where it is shut, and patches are counted."""
        return self.shut == 0 and not grid.is_dense

    def times(self, values: Tensor, kept: Tensor, grid: Grid, scale: Tensor | None = None) -> Tensor:
        one = values[:, :, :1, :1] if native.is_one_per_map(values) else values
        if _is_native(one, grid) and native.is_channels_last(kept):
            return native.through_gate(values, kept, scale, per_pixel(grid, values.dtype), self.shut)
        if grid.is_dense and native.fits(values):
            return native.through_bits(values, kept, scale, self.shut)
        if grid.is_dense:
            share = unpack(kept, values).to(values.dtype)
        else:
            share = kept.to(values.dtype) / pixels(grid, values)
        share = share if self.shut == 0 else share * (1 - self.shut) + self.shut
        made = values * share
        return made if scale is None else made.mul_(scale)  # dense maps are large: no third one


def _is_native(maps: Tensor, grid: Grid) -> bool:
    """Whether the native passes serve: patches of whole maps (N, C, H, W), whose pixels one byte counts."""
    return not grid.is_dense and native.serves_patches(maps, grid.patches)


@lru_cache(maxsize=64)
def _as_stored(bound: float, dtype: torch.dtype) -> float:
    """The number that a shut gate's output has: few digits of the bound itself in half precision."""
    return torch.tensor(bound, dtype=dtype).item()


class Slope(NamedTuple):
    """A smooth activation; ``derivative(one, x)`` is its slope. On the dense grid torch's own is as good."""

    derivative: Callable[[Tensor, Tensor], Tensor]

    def fits(self, grid: Grid) -> bool:
        return not grid.is_dense

    def before(self, x: Tensor, grid: Grid) -> Tensor:
        return pool(self.derivative(x.new_ones(1).expand(x.shape), x), grid)

    def after(self, y: Tensor, grid: Grid) -> None:
        return None

    def times(self, values: Tensor, kept: Tensor, grid: Grid, scale: Tensor | None = None) -> Tensor:
        return values * kept if scale is None else values * kept * scale


def activate(x: Tensor, function: Callable[[Tensor], Tensor], kind: SlopeKind, inplace: bool) -> Tensor:
    """Run ``function``, which works in place or not as ``inplace`` says, and keep its slope."""
    grid = wanted_grid(x)
    if not kind.fits(grid):
        return function(x)
    term = gated_term(x, grid) if isinstance(kind, Gate) and kind.shuts(grid) else None
    before = getattr(x, "gradfilter_means", None)
    result: Tensor = _Activation.apply(x, function, kind, inplace, grid, term)
    found = getattr(result, "gradfilter_means", None)
    if inplace and found is not before and found is not None:
        # autograd has counted the change once more since the means were taken
        result.gradfilter_means = (result._version, found[1])  # type: ignore[attr-defined]
    return result


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        kind: SlopeKind,
        inplace: bool,
        grid: Grid,
        term: Gated | None,
    ) -> Tensor:
        kept = kind.before(x, grid)
        y = function(x)
        if inplace:
            ctx.mark_dirty(x)
        kept = kind.after(y, grid) if kept is None else kept
        joint: tuple[Tensor, ...] = ()
        if isinstance(kind, Gate) and kind.shuts(grid):
            ctx.gate, ctx.open_count = kind, kept
            if term is not None:
                joint = (_open_in_both(y, kind, term, grid), term.open_count)
        ctx.save_for_backward(kept, *joint)
        ctx.kind, ctx.grid, ctx.wanted = kind, grid, grid.patches
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        kept, *joint = ctx.saved_tensors
        ctx.open_count = None
        if ctx.grid.is_dense:
            return ctx.kind.times(densify(grad), kept, ctx.grid), None, None, None, None, None
        arrived = onto(grad, ctx.grid)
        gated = None
        if joint:
            both, term_count = (count.to(arrived.dtype) for count in joint)
            gated = arrived * (both / term_count.clamp_(min=1))
        values = ctx.kind.times(arrived, kept, ctx.grid)
        return CoarseGradient(values, ctx.grid, gated), None, None, None, None, None


def _open_in_both(y: Tensor, gate: Gate, term: Gated, grid: Grid) -> Tensor:
    """In how many pixels of each patch y and the gated term are both open."""
    if _is_native(y, grid) and native.fits(y, term.tensor):
        bounds = gate.bounds(y.dtype), term.gate.bounds(y.dtype)
        sides, shape = grid.patches[2:], grid.coarse_shape
        return native.open_in_both(y, bounds[0], term.tensor, bounds[1], sides, shape)
    return count_open(gate.openness(y).mul_(term.gate.openness(term.tensor)), grid)


def count_open(openness: Tensor, grid: Grid) -> Tensor:
    """How many pixels of each patch are open, in the smallest integer that holds a full patch."""
    if openness.dtype in (torch.float16, torch.bfloat16):
        openness = openness.float()  # a count may need more digits than these have
    share = pool(openness, grid)
    return (
        share.mul_(pixels(grid, share)).round_().to(torch.uint8 if prod(grid.patches) < 256 else torch.int32)
    )


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """PReLU: a gate whose shut slope is learned, per channel or shared."""
    grid = wanted_grid(x)
    if grid.is_dense:
        return torch.prelu(x, weight)
    result: Tensor = _PReLU.apply(x, weight, grid)
    return result


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        kept = [weight, count_open(Gate().openness(x), grid)]
        if ctx.needs_input_grad[1]:
            kept.append(pool(x.clamp(max=0), grid))
        ctx.save_for_backward(*kept)
        ctx.grid, ctx.wanted = grid, grid.patches
        return torch.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, count, *below = ctx.saved_tensors
        values = onto(grad, ctx.grid)
        total = pixels(ctx.grid, values)
        share = count.to(values.dtype) / total
        shut = weight.view(1, -1, *[1] * (values.dim() - 2))
        weight_grad = None
        if below:
            sums = values * below[0] * total
            dims = [0, *range(2, sums.dim())] if weight.numel() > 1 else list(range(sums.dim()))
            weight_grad = sums.sum(dims).view_as(weight)
        return CoarseGradient(values * (share + (1 - share) * shut), ctx.grid), weight_grad, None
