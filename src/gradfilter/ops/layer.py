"""Convolutions and linear layers whose backward is left to a method, with what directly follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..coarse import CoarseGradient, densify, leave_grid, onto
from ..geometry import ConvGeometry
from ..grid import Grid, pixels
from ..spectral import SpectralGradient
from ..wanted import end_of_grid, wanted_basis, wanted_grid
from .activation import Gate, SlopeKind
from .exact_conv import Want
from .norm import fixed_scale
from .refusal import first_derivative_only
from .sources import hold, state_of
from .storage import packed, unpacked
from .walsh import Basis

if TYPE_CHECKING:
    from ..methods import Memory, Method

__all__ = ["Call", "Followers", "run_layer"]


@dataclass(frozen=True)
class Followers:
    """What reads a layer's output and nothing else does: a batch norm with fixed statistics, an activation.

    Run with the layer as one autograd node, they cost no node of their own. What has nothing to run was run
    by the layer's own forward.

    finish: all of it, in place, in one pass over the output; returns what is kept of the slope.
    """

    norm: nn.Module | None
    run_norm: Callable[[Tensor], Tensor] | None
    run_activation: Callable[[Tensor], Tensor] | None = None
    slope: SlopeKind | None = None
    finish: Callable[[Tensor, Grid], Tensor | None] | None = None


NOBODY = Followers(None, None)


@dataclass(frozen=True)
class Call:
    """One call of a layer: its geometry, its method, and what that remembers from earlier calls.

    channel: the dimension of x that holds channels.
    made_of: two tensors whose product the weight is, and which are kept instead.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    geometry: ConvGeometry
    method: Method
    memory: Memory
    channel: int = 1
    followers: Followers = NOBODY
    made_of: tuple[Tensor, Tensor] | None = None


def run_layer(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Run a layer exactly as ``call.forward`` does, and its followers exactly as they do."""
    basis = call.method.basis(call.geometry)
    if basis is None:
        compact_input = not wanted_grid(x).is_dense
        ends_at = None if compact_input else end_of_grid(x)
    else:
        compact_input = wanted_basis(x) == basis
        ends_at = None if compact_input or x.grad_fn is None else type(x.grad_fn).__name__
    result: Tensor = _Layer.apply(x, weight, bias, call, basis, compact_input, ends_at)
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        basis: Basis | None,
        compact_input: bool,
        ends_at: str | None,
    ) -> Tensor:
        geometry, method, followers = call.geometry, call.method, call.followers
        y = method.forward(call.forward, x, weight, bias)
        kept: Sequence[Tensor] = ()
        if ctx.needs_input_grad[1]:
            maps = x if call.channel == 1 else x.movedim(call.channel, 1)
            found = method.keep(maps, geometry, call.memory)
            found = tuple(k.to(y.dtype) if k.dtype == x.dtype else k for k in found)
            kept, ctx.layouts = packed(found, method.store, call.memory)
        sides = method.patches(geometry)
        ctx.grid = Grid.of(tuple(y.shape), (1, 1, *sides) if call.channel == 1 else (1, *sides, 1))
        ctx.wanted = ctx.grid.patches
        ctx.basis = basis if followers.slope is None else None
        slope = None
        if followers.run_norm is not None:
            y = followers.run_norm(y)
        if followers.finish is not None:
            slope = followers.finish(y, ctx.grid)
        elif followers.slope is not None:
            slope = followers.slope.before(y, ctx.grid)
            if followers.run_activation is not None:
                y = followers.run_activation(y)
            slope = followers.slope.after(y, ctx.grid) if slope is None else slope
        if isinstance(followers.slope, Gate) and followers.slope.shuts(ctx.grid):
            ctx.gate, ctx.open_count = followers.slope, slope
        # As it is now: parameters may be others by the time of the backward.
        ctx.scale = None if followers.norm is None else _remembered_scale(followers.norm, y)
        weight, ctx.fold = call.made_of or (weight, None)
        ctx.save_for_backward(weight, slope, *kept)
        ctx.call, ctx.compact_input, ctx.ends_at = call, compact_input, ends_at
        ctx.dtypes = (x.dtype, weight.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, slope, *kept = ctx.saved_tensors
        ctx.open_count = None
        call: Call = ctx.call
        grad = _through_followers(grad, ctx.grid, call.followers.slope, slope, ctx.scale)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        maps = grad if call.channel == 1 else grad.movedim(call.channel, 1)
        bias_grad = _bias_gradient(maps).to(ctx.dtypes[1]) if need_bias else None
        x_grad = weight_grad = None
        if need_x or need_weight:
            weight = weight if ctx.fold is None else weight * ctx.fold
            if weight.dtype != grad.dtype:  # autocast ran the forward in a smaller type
                weight = weight.to(grad.dtype)
            kernel = weight if call.channel == 1 else weight.view(*weight.shape, *[1] * call.geometry.spatial)
            want = Want(need_x, need_weight)
            if need_weight:
                kept = unpacked(kept, call.method.store, ctx.layouts, grad.dtype)
            x_grad, weight_grad = call.method.gradients(maps, kept, kernel, call.geometry, want)
        if x_grad is not None:
            x_grad = x_grad if ctx.compact_input else leave_grid(x_grad, ctx.ends_at)
            x_grad = x_grad if x_grad.dtype == ctx.dtypes[0] else x_grad.to(ctx.dtypes[0])
            x_grad = x_grad if call.channel == 1 else x_grad.movedim(1, call.channel)
        if weight_grad is not None:
            weight_grad = weight_grad if weight_grad.dtype == ctx.dtypes[1] else weight_grad.to(ctx.dtypes[1])
            weight_grad = weight_grad if call.channel == 1 else weight_grad.view(weight.shape)
        return x_grad, weight_grad, bias_grad, None, None, None, None


def _through_followers(
    grad: Tensor, grid: Grid, kind: SlopeKind | None, slope: Tensor, scale: Tensor | None
) -> Tensor:
    """Back through activation and norm, on the layer's own grid."""
    if scale is None and kind is None:
        return grad
    if isinstance(grad, SpectralGradient) and scale is not None and kind is None:
        return grad * scale
    values = densify(grad) if grid.is_dense else onto(grad, grid)
    if kind is not None:
        values = kind.times(values, slope, grid, scale)
    elif scale is not None:
        values = values * scale
    return values if grid.is_dense else CoarseGradient(values, grid)


def _remembered_scale(norm: Any, like: Tensor) -> Tensor:
    """The norm's scale, worked out again only when its statistics or parameters have changed."""
    var, weight = norm.running_var, norm.weight
    sources = (var,) if weight is None else (var, weight)
    state = [like.dtype, like.dim(), *state_of(sources)]
    known = norm.__dict__.get("gradfilter_scale")
    if known is None or known[0] != state:
        scale = fixed_scale(var, weight, norm.eps, like)
        known = norm.__dict__["gradfilter_scale"] = (state, scale, hold(sources))
    remembered: Tensor = known[1]
    return remembered


def _bias_gradient(grad: Tensor) -> Tensor:
    dims = [0, *range(2, grad.dim())]
    if isinstance(grad, CoarseGradient) and grad.grid.is_even:
        return grad.means.sum(dims).mul_(prod(grad.grid.patches))
    if isinstance(grad, CoarseGradient):
        return (grad.means * pixels(grad.grid, grad.means)).sum(dims)
    return grad.sum(dims)
