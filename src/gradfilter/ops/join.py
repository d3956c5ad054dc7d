"""Residual joins: z = a + b, where b came out of a gate and z goes into another.

The gradient that returns to b passes both gates, and the mean of a product of masks is not the product of
their means. So the second gate also counts the pixels where both are open, and tells the join what b gets:
the share of b's open pixels where z is open too, instead of the share of all pixels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..coarse import CoarseGradient
from ..grid import Grid
from ..wanted import wanted_grid
from .refusal import first_derivative_only

if TYPE_CHECKING:
    from .activation import Gate

__all__ = ["Gated", "add", "gated", "gated_term"]


class Gated(NamedTuple):
    """A tensor that came out of a gate, and how many of its pixels are open by patch."""

    tensor: Tensor
    gate: Gate
    open_count: Tensor


def gated(x: Tensor, grid: Grid) -> Gated | None:
    """What is known of x if it came out of a gate (which lets nothing pass when shut) on this grid."""
    node: Any = x.grad_fn
    gate = getattr(node, "gate", None)
    if gate is None or Grid.of(tuple(x.shape), node.wanted).patches != grid.patches:
        return None
    count: Tensor | None = node.open_count  # not a saved tensor: a checkpoint would compute those again
    if count is None:  # its backward has run
        return None
    if count.dim() > x.dim():  # max pooling counts by neighbour
        count = gate.after(x.detach(), grid)
    return Gated(x, gate, count)


def add(a: Tensor, b: Tensor, inplace: bool) -> Tensor | None:
    """a + b if one of them came out of a gate on a coarse grid; None where torch's own sum does."""
    if a.shape != b.shape or a.dtype != b.dtype or not (a.requires_grad and b.requires_grad):
        return None
    grid = wanted_grid(a).common(wanted_grid(b))
    if grid.is_dense:
        return None
    if gated(b, grid) is None:
        if inplace or gated(a, grid) is None:
            return None
        a, b = b, a
    result: Tensor = _Join.apply(a, b, inplace, grid, weakref.ref(b))
    return result


def gated_term(z: Tensor, grid: Grid) -> Gated | None:
    """The gated term of z, if z is the sum of a join."""
    node: Any = z.grad_fn
    reference = getattr(node, "gated", None)
    term = reference() if reference is not None else None
    return None if term is None or term._version != node.version else gated(term, grid)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, inplace: bool, grid: Grid, term: weakref.ref[Tensor]
    ) -> Tensor:
        ctx.grid, ctx.wanted = grid, grid.patches
        ctx.gated, ctx.version = term, b._version
        if inplace:
            ctx.mark_dirty(a)
            return a.add_(b)
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        if isinstance(grad, CoarseGradient) and grad.gated_means is not None:
            plain = CoarseGradient(grad.means, grad.grid)
            return plain, CoarseGradient(grad.gated_means, grad.grid), None, None, None
        return grad, grad, None, None, None
