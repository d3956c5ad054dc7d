"""Convolutions and linear layers whose backward is left to a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..coarse import CoarseGradient, densify
from ..errors import GradFilterError
from ..geometry import ConvGeometry
from ..grid import pixels
from ..wanted import wanted_grid
from .exact_conv import Want

if TYPE_CHECKING:
    from ..methods import Method

__all__ = ["first_derivative_only", "run_layer"]


def first_derivative_only() -> None:
    """Refuse create_graph=True: a filtered gradient is not a function that could be differentiated."""
    if torch.is_grad_enabled():
        raise GradFilterError(
            "Double backward through a gradfilter region is not possible: call backward without "
            "create_graph=True, or gf.restore_(model) first."
        )


def run_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    geometry: ConvGeometry,
    method: Method,
    channel: int,
) -> Tensor:
    """Run a layer exactly as ``forward`` does; ``channel`` is the dimension of x that holds its channels."""
    producer = wanted_grid(x)
    result: Tensor = _Layer.apply(x, weight, bias, forward, geometry, method, channel, not producer.is_dense)
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        forward: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        geometry: ConvGeometry,
        method: Method,
        channel: int,
        coarse_input: bool,
    ) -> Tensor:
        y = forward(x, weight, bias)
        kept: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            maps = x if channel == 1 else x.movedim(channel, 1)
            kept = tuple(k if k.dtype == y.dtype else k.to(y.dtype) for k in method.keep(maps, geometry))
        ctx.save_for_backward(weight, *kept)
        ctx.geometry, ctx.method, ctx.channel = geometry, method, channel
        ctx.coarse_input, ctx.dtypes = coarse_input, (x.dtype, weight.dtype)
        sides = method.patches(geometry)
        ctx.wanted = (1, 1, *sides) if channel == 1 else (1, *sides, 1)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        weight, *kept = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        maps = grad if ctx.channel == 1 else grad.movedim(ctx.channel, 1)
        bias_grad = _bias_gradient(maps).to(ctx.dtypes[1]) if need_bias else None
        x_grad = weight_grad = None
        if need_x or need_weight:
            if weight.dtype != grad.dtype:  # autocast ran the forward in a smaller type
                weight = weight.to(grad.dtype)
            want = Want(need_x, need_weight)
            x_grad, weight_grad = ctx.method.gradients(maps, kept, weight, ctx.geometry, want)
        if x_grad is not None:
            x_grad = _hand_on(x_grad, ctx)
        if weight_grad is not None:
            weight_grad = weight_grad.to(ctx.dtypes[1])
            if ctx.channel != 1:
                weight_grad = weight_grad.flatten(1)
        return x_grad, weight_grad, bias_grad, None, None, None, None, None


def _hand_on(x_grad: Tensor, ctx: FunctionCtx) -> Tensor:
    """Give the input gradient the dtype, layout and form (coarse or dense) that its receiver expects."""
    if not ctx.coarse_input:  # type: ignore[attr-defined]
        x_grad = densify(x_grad)
    x_grad = x_grad.to(ctx.dtypes[0])  # type: ignore[attr-defined]
    channel: int = ctx.channel  # type: ignore[attr-defined]
    return x_grad if channel == 1 else x_grad.movedim(1, channel)


def _bias_gradient(grad: Tensor) -> Tensor:
    dims = [0, *range(2, grad.dim())]
    if isinstance(grad, CoarseGradient):
        return (grad.values * pixels(grad.grid, grad.values)).sum(dims)
    return grad.sum(dims)
