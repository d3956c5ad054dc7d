"""A frozen inverted residual in one native pass, so that its wide hidden maps never reach memory.

Expand (1x1) and its activation, depthwise and its activation, project (1x1), and a residual sum. Where the
pass does not serve, its convolutions run one after the other. Results differ by rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..native import inverted_residual as native
from ..native import is_channels_last
from .fused import Activation, FusedConv

__all__ = ["InvertedResidual", "is_depthwise", "is_native"]

_BOUNDED, _LEAKY, _HARDSWISH = range(3)  # as inverted_residual.cpp numbers them


def is_depthwise(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and conv.dilation == (1, 1)
        and conv.stride in ((1, 1), (2, 2))
    )


def is_native(activation: Activation) -> bool:
    return _numbers(activation) is not None


def _numbers(activation: Activation) -> tuple[float, ...] | None:
    """Kind, and two numbers, as inverted_residual.cpp reads them."""
    if activation.limits is not None:
        return (_BOUNDED, *activation.limits)
    return {
        "leaky_relu": (_LEAKY, *activation.numbers, 0.0),
        "hardswish": (_HARDSWISH, 0.0, 0.0),
    }.get(activation.name)


class InvertedResidual:
    """Two or three fused convolutions as one; ``expand`` is None where x is the hidden map.

    one_by_one: the same, for where the native pass does not serve. Weights are packed once, and again when
    they have changed.
    """

    def __init__(
        self,
        expand: FusedConv | None,
        depthwise: FusedConv,
        project: FusedConv,
        one_by_one: Callable[..., Tensor],
    ) -> None:
        self.expand, self.depthwise, self.project, self.one_by_one = expand, depthwise, project, one_by_one
        self.stages = [stage for stage in (expand, depthwise, project) if stage is not None]
        self._packed: tuple[list[Any], Tensor | None] | None = None
        self._sizes: tuple[tuple[int, ...], native.Sizes | None] | None = None
        first, second = (() if s is None else _numbers(s.activation) or () for s in (expand, depthwise))
        self._activations = (ctypes.c_float * 6)(*(first or second), *second)

    def __call__(self, x: Tensor, *other: Tensor) -> Tensor:
        """The block of x, with ``other`` added if it is given."""
        sizes = self._sizes_for(tuple(x.shape)) if native.is_built() and _is_plain(x) else None
        weights = None if sizes is None else self._weights()
        if sizes is None or weights is None or not all(_is_plain(o, sizes.y_shape) for o in other):
            return self.one_by_one(x, *other)
        return native.run(x, other[0] if other else None, weights, sizes, self._activations)

    def _weights(self) -> Tensor | None:
        """None where they are not all float32 on a CPU."""
        state = [part for stage in self.stages for part in stage.state()]
        if self._packed is None or self._packed[0] != state:
            self._packed = (state, self._pack())
        return self._packed[1]

    def _pack(self) -> Tensor | None:
        stages = [native.Stage(*stage.folded()) for stage in self.stages]
        tensors = [t for stage in stages for t in stage if t is not None]
        if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
            return None
        expand = None if self.expand is None else stages[0]
        return native.pack(expand=expand, depthwise=stages[-2], project=stages[-1])

    def _sizes_for(self, x_shape: tuple[int, ...]) -> native.Sizes | None:
        """None where the convolutions cannot read such maps."""
        if self._sizes is None or self._sizes[0] != x_shape:
            self._sizes = (x_shape, self._measure(*x_shape))
        return self._sizes[1]

    def _measure(self, n: int, inputs: int, *spatial: int) -> native.Sizes | None:
        conv: Any = self.depthwise.conv
        axes = []
        for size, kernel, stride, pad in zip(
            spatial, conv.kernel_size, conv.stride, conv.padding, strict=True
        ):
            axes.append((size, (size + 2 * pad - kernel) // stride + 1, kernel, stride, pad))
        if inputs != self.stages[0].conv.in_channels or min(outputs for _, outputs, *_ in axes) < 1:
            return None
        channels = (inputs, conv.in_channels, self.project.conv.out_channels)
        return native.sizes(n, channels, self.expand is not None, axes)


def _is_plain(maps: Tensor, shape: tuple[int, ...] | None = None) -> bool:
    """Whether the native pass can read these maps."""
    return (
        type(maps) is Tensor
        and maps.dtype == torch.float32
        and maps.device.type == "cpu"
        and maps.numel() > 0
        and is_channels_last(maps)
        and (shape is None or tuple(maps.shape) == shape)
    )
