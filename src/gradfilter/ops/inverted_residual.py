"""A frozen inverted residual in one native pass, so that its wide hidden maps never reach memory.

Expand (1x1) and its activation, depthwise and its activation, project (1x1), and a residual sum. Where the pass
does not serve, its convolutions run one after the other. Results differ by rounding.
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

__all__ = ["InvertedResidual", "can_be_depthwise", "is_pointwise", "is_native"]

_BOUNDED, _LEAKY, _HARDSWISH = range(3)  # as inverted_residual.cpp numbers them
_ENDLESS = float("inf")


def is_pointwise(conv: nn.Conv2d) -> bool:
    """Whether each output pixel is a product of the same input pixel."""
    return conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1


def can_be_depthwise(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and conv.dilation == (1, 1)
        and conv.stride in ((1, 1), (2, 2))
    )


def is_native(activation: Activation) -> bool:
    return _numbers(activation) is not None


def _numbers(activation: Activation) -> tuple[float, ...] | None:
    """Kind, and two numbers, as inverted_residual.cpp reads them."""
    return {
        "none": (_BOUNDED, -_ENDLESS, _ENDLESS),
        "relu": (_BOUNDED, 0.0, _ENDLESS),
        "hardtanh": (_BOUNDED, *activation.numbers),
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
        self._shapes: dict[tuple[int, ...], tuple[tuple[int, ...], Any]] = {}
        first, second = (() if s is None else _numbers(s.activation) or () for s in (expand, depthwise))
        self._activations = (ctypes.c_float * 6)(*(first or second), *second)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if not self._serves(x):
            return self._one_by_one(x, other)
        y_shape, shape = self._shape(tuple(x.shape))
        weights = self._weights()
        if weights is None or not _is_plain(other, y_shape):
            return self._one_by_one(x, other)
        return native.run(x, other, weights, y_shape, shape, self._activations)

    def _one_by_one(self, x: Tensor, other: Tensor | None) -> Tensor:
        return self.one_by_one(x) if other is None else self.one_by_one(x, other)

    def _serves(self, x: Tensor) -> bool:
        conv = self.depthwise.conv
        return (
            native.is_built()
            and _is_plain(x, None)
            and x.shape[1] == self.stages[0].conv.in_channels
            and all(n + 2 * int(p) >= k for n, p, k in zip(x.shape[2:], conv.padding, conv.kernel_size, strict=True))
        )

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
        return native.pack(None if self.expand is None else stages[0], *stages[-2:])

    def _shape(self, x_shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
        """The output's shape, and all sizes as inverted_residual.cpp reads them."""
        if x_shape not in self._shapes:
            n, inputs, *sizes = x_shape
            conv, outputs = self.depthwise.conv, self.project.conv.out_channels
            settings = zip(sizes, conv.kernel_size, conv.stride, map(int, conv.padding), strict=True)
            axes = [(size, (size + 2 * pad - k) // stride + 1, k, stride, pad) for size, k, stride, pad in settings]
            numbers = [n, inputs, conv.in_channels, outputs, self.expand is not None, *axes[0], *axes[1]]
            self._shapes[x_shape] = (
                (n, outputs, axes[0][1], axes[1][1]),
                (ctypes.c_int64 * len(numbers))(*numbers),
            )
        return self._shapes[x_shape]


def _is_plain(maps: Tensor | None, shape: tuple[int, ...] | None) -> bool:
    """Whether the native pass can read these maps; it takes None for nothing to add."""
    return maps is None or (
        type(maps) is Tensor
        and maps.dtype == torch.float32
        and maps.device.type == "cpu"
        and maps.numel() > 0
        and is_channels_last(maps)
        and (shape is None or tuple(maps.shape) == shape)
    )
