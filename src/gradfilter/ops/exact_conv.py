"""torch's own convolution backward, callable with only the shapes of what is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import lt
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import ConvAxis, ConvGeometry

__all__ = [
    "Gradients",
    "Settings",
    "Want",
    "convolution_backward",
    "exact_backward",
    "exact_weight_gradient",
    "stand_in",
]

# Of a convolution, as aten wants them: stride, padding, dilation, transposed, output padding, groups.
Settings = tuple[list[int], list[int], list[int], bool, list[int], int]


class Gradients(NamedTuple):
    """What a backward gives; None where nobody asked."""

    x: Tensor | None
    weight: Tensor | None


class Want(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool


def exact_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor, geometry: ConvGeometry, want: Want
) -> Gradients:
    """torch's own convolution backward; ``x`` may be missing where only its shape matters."""
    axes = geometry.axes
    if not 0 < len(axes) < 4:
        return _linear(grad, x, weight, want)
    source = stand_in(grad, geometry.x_shape) if x is None else x
    padding = [axis.pad for axis in axes]
    ends = [axis.pad_end for axis in axes]
    if padding != ends and not geometry.transposed:
        return _exact_uneven(grad, source, weight, geometry, want)
    output_padding = [0] * len(axes)
    if geometry.transposed:
        output_padding = [
            a.size_in - ((a.size_out - 1) * a.stride - 2 * a.pad + a.dilation * (a.kernel - 1) + 1)
            for a in axes
        ]
        if grad.dtype == torch.bfloat16:
            # oneDNN of torch 2.13 crashes on other layouts, on processors that have bfloat16 themselves.
            grad, source = grad.contiguous(), source.contiguous()
    stride, dilation = [axis.stride for axis in axes], [axis.dilation for axis in axes]
    settings = (stride, padding, dilation, geometry.transposed, output_padding, geometry.groups)
    return convolution_backward(grad, source, weight, settings, want)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, settings: Settings, want: Want
) -> Gradients:
    """aten.convolution_backward, kept from what it cannot do."""
    if grad.dtype == torch.bfloat16 and any(map(lt, x.shape[2:], settings[0])):
        # oneDNN of torch 2.13 reads and writes beyond maps that are narrower than the stride, on processors
        # that have bfloat16 themselves.
        wide = convolution_backward(grad.float(), x.float(), weight.float(), settings, want)
        return Gradients(*(None if found is None else found.to(grad.dtype) for found in wide))
    x_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
        grad, x, weight, None, *settings, [*want, False]
    )
    return Gradients(x_grad, weight_grad)


def stand_in(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """In place of an input of which only shape and layout count; its values are never used.

    One value, expanded, has the wrong layout for channels-last maps: oneDNN would reorder them.
    """
    channels_last = grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)
    if grad.device.type == "cpu" and channels_last and not grad.is_contiguous():
        return torch.empty(shape, dtype=grad.dtype, memory_format=torch.channels_last)
    return grad.new_empty(1).expand(shape)


def exact_weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int], geometry: ConvGeometry) -> Tensor:
    """The gradient of a weight of this shape; its numbers are not needed."""
    weight = grad.new_empty(()).expand(*shape)
    found: Tensor = exact_backward(grad, x, weight, geometry, Want(False, True)).weight  # type: ignore[assignment]
    return found


def _linear(grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
    """A linear layer over more axes than torch's convolutions know, or over none."""
    kernel = weight.flatten(1)
    x_grad = torch.einsum("no...,oc->nc...", grad, kernel) if want.x else None
    if x is None or not want.weight:
        return Gradients(x_grad, None)
    return Gradients(x_grad, torch.einsum("no...,nc...->oc", grad, x).view(weight.shape))


def _exact_uneven(grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, want: Want) -> Gradients:
    """padding='same' of an even kernel pads one pixel more at the end: pad outside, then crop."""
    extra = [axis.pad_end - axis.pad for axis in geometry.axes]
    padded = torch.nn.functional.pad(x, [n for e in reversed(extra) for n in (0, e)])
    inner = ConvGeometry(tuple(padded.shape), geometry.y_shape, _evened(geometry), geometry.groups)
    result = exact_backward(grad, padded, weight, inner, want)
    if result.x is None:
        return result
    x_grad = result.x
    for d, size in enumerate(geometry.x_shape):
        x_grad = x_grad.narrow(d, 0, size)
    return Gradients(x_grad, result.weight)


def _evened(geometry: ConvGeometry) -> tuple[ConvAxis, ...]:
    return tuple(
        ConvAxis(a.size_in + a.pad_end - a.pad, a.size_out, a.kernel, a.stride, a.dilation, a.pad, a.pad)
        for a in geometry.axes
    )
