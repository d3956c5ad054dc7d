"""What a convolution or linear layer asks of torch, read off the call it makes.

Looking at the call rather than at the module serves every subclass with a forward of its own: padding worked
out on the way, weights normalised or reparametrised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .geometry import ConvAxis, ConvGeometry
from .grid import per_axis

__all__ = ["Asked", "asked", "conv_geometry"]

PerAxis = int | tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """One call of a convolution function or ``F.linear``; ``run(x, weight, bias)`` is that call.

    x has its batch, and its map where that is known; ``undo`` gives the result its shape back. ``channel`` is
    the dimension of x that holds channels.
    """

    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: ConvGeometry
    channel: int = 1
    undo: Callable[[Tensor], Tensor] | None = None


def asked(func: Any, args: Any, kwargs: Any, tokens: tuple[int, int] | None = None) -> Asked | None:
    """What ``func`` is asked to do; None if it is no layer's function, or cannot do it."""
    if func is F.linear:
        return _linear(*args, **kwargs, tokens=tokens)
    reader = _READERS.get(func)
    return None if reader is None else reader(func, *args, **kwargs)


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, tokens: tuple[int, int] | None
) -> Asked:
    x, undo = input, None
    if x.dim() == 1:
        x, undo = x.unsqueeze(0), lambda y: y.squeeze(0)
    elif x.dim() == 3 and tokens and tokens[0] * tokens[1] == x.shape[1]:
        x, undo = x.view(x.shape[0], *tokens, x.shape[2]), lambda y: y.flatten(1, 2)
    geometry = ConvGeometry.pointwise((x.shape[0], x.shape[-1], *x.shape[1:-1]), len(weight))
    return Asked(F.linear, x, weight, bias, geometry, x.dim() - 1, undo)


def _convolution(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Asked | None:
    run = partial(func, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return _asked(run, input, weight, bias, stride, padding, dilation, groups)


def _transposed(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Asked | None:
    run = partial(
        func, stride=stride, padding=padding, output_padding=output_padding, groups=groups, dilation=dilation
    )
    return _asked(run, input, weight, bias, stride, padding, dilation, groups, output_padding)


def _asked(
    run: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    output_padding: Any = None,
) -> Asked | None:
    batched = x.dim() == weight.dim()
    x = x if batched else x.unsqueeze(0)
    if x.dim() != weight.dim():
        return None
    channels = weight.shape[0] if output_padding is None else weight.shape[1] * groups
    geometry = conv_geometry(
        tuple(x.shape),
        channels,
        tuple(weight.shape[2:]),
        _setting(stride),
        _setting(padding),
        _setting(dilation),
        groups,
        _setting(output_padding),
    )
    return Asked(run, x, weight, bias, geometry, undo=None if batched else lambda y: y.squeeze(0))


def _setting(value: Any) -> Any:
    """A number or a tuple with one per axis; torch takes lists too, and one number in a list for all axes."""
    if not isinstance(value, list | tuple):
        return value
    return value[0] if len(value) == 1 else tuple(value)


@lru_cache(maxsize=4096)
def conv_geometry(
    x_shape: tuple[int, ...],
    channels: int,
    kernel: tuple[int, ...],
    stride: PerAxis,
    padding: str | PerAxis,
    dilation: PerAxis,
    groups: int,
    output_padding: PerAxis | None = None,
) -> ConvGeometry:
    """The geometry of a convolution of a batched input; of a transposed one if it has an output padding."""
    axes, transposed, count = [], output_padding is not None, len(kernel)
    steps, spreads = per_axis(stride, count), per_axis(dilation, count)
    extras = per_axis(output_padding or 0, count)
    ends = _padding_ends(padding, kernel, spreads)
    settings = zip(x_shape[2:], kernel, steps, spreads, extras, ends, strict=True)
    for size, k, s, d, extra, (pad, pad_end) in settings:
        if transposed:
            made = (size - 1) * s - 2 * pad + d * (k - 1) + 1 + extra
            axes.append(ConvAxis(made, size, k, s, d, pad, pad - extra))
        else:
            made = (size + pad + pad_end - d * (k - 1) - 1) // s + 1
            axes.append(ConvAxis(size, made, k, s, d, pad, pad_end))
    outputs = [axis.size_in if transposed else axis.size_out for axis in axes]
    return ConvGeometry(x_shape, (x_shape[0], channels, *outputs), tuple(axes), groups, transposed)


def _padding_ends(
    padding: str | PerAxis, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    sides = per_axis(0 if isinstance(padding, str) else padding, len(kernel))
    return [(p, p) for p in sides]


_READERS: dict[Any, Callable[..., Asked | None]] = {
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _transposed,
    F.conv_transpose2d: _transposed,
    F.conv_transpose3d: _transposed,
}
