"""An inverted residual in one native pass, so that its wide hidden maps never reach memory.

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
from .sources import hold, state_of
from .trained_block import Training, training_of

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

    one_by_one: the same, for where the native pass does not serve. Frozen weights are packed once, and again
    when they have changed.
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
        self._packed: tuple[list[Any], list[Tensor], Tensor | None] | None = None
        self._sizes: tuple[tuple[int, ...], native.Sizes | None] | None = None
        self._training: tuple[Any, Training | None] | None = None
        first, second = (() if s is None else _numbers(s.activation) or () for s in (expand, depthwise))
        self._activations = (ctypes.c_float * 6)(*(first or second), *second)

    def __call__(self, x: Tensor, *other: Tensor) -> Tensor:
        """The block of x, with ``other`` added if it is given."""
        with torch._C.DisableTorchFunction():  # the region has no part in what happens inside
            made = self._native(x, *other)
        return self.one_by_one(x, *other) if made is None else made

    def _native(self, x: Tensor, *other: Tensor) -> Tensor | None:
        sizes = self._sizes_for(tuple(x.shape)) if native.is_built() and _is_plain(x) else None
        if sizes is None or not all(_is_plain(o, sizes.y_shape) for o in other):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(stage.trains for stage in self.stages)):
            return None if other else self._trained(x, sizes)
        sources = [tensor for stage in self.stages for tensor in stage.sources()]
        state = state_of(sources)
        packed = self._packed  # once, here and below: other threads may replace it
        if packed is None or packed[0] != state:
            packed = self._packed = (state, hold(sources), self._pack(sizes))
        weights = packed[2]
        if weights is None:
            return None
        return native.run(x, other[0] if other else None, weights, sizes, self._activations)[0]

    def _trained(self, x: Tensor, sizes: native.Sizes) -> Tensor | None:
        training = self._training_for(x)
        weights = None if training is None else self._pack(sizes)
        if training is None or weights is None:
            return None
        y, kept = native.run(x, None, weights, sizes, self._activations, training.patches)
        return training.linked(x, y, kept)

    def _training_for(self, x: Tensor) -> Training | None:
        convs: list[Any] = [stage.conv for stage in self.stages]
        methods = [getattr(conv, "gradfilter_method", None) for conv in convs]
        key = (x.shape, methods, [conv.weight.requires_grad for conv in convs])
        known = self._training
        if known is None or known[0] != key:
            known = self._training = (key, training_of(self.stages, x))
        return None if any(stage.norm_trains for stage in self.stages) else known[1]

    def _pack(self, sizes: native.Sizes) -> Tensor | None:
        """The weights as they are now; None where the pass cannot read them."""
        parts = [native.Stage(*stage.parts()) for stage in self.stages]
        if not all(_is_readable(*pair) for pair in zip(self.stages, parts, strict=True)):
            return None
        expand = None if self.expand is None else parts[0]
        return native.pack(sizes, expand=expand, depthwise=parts[-2], project=parts[-1])

    def _sizes_for(self, x_shape: tuple[int, ...]) -> native.Sizes | None:
        """None where the convolutions cannot read such maps."""
        known = self._sizes
        if known is None or known[0] != x_shape:
            known = self._sizes = (x_shape, self._measure(*x_shape))
        return known[1]

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


def _is_readable(stage: FusedConv, part: native.Stage) -> bool:
    """Whether all are float32 on a CPU, and as large as the modules say: they may have been replaced."""
    conv = stage.conv
    shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    factors = [t for t in (part.scale, part.bias) if t is not None]
    return (
        tuple(part.weight.shape) == shape
        and all(tuple(t.shape) == shape[:1] for t in factors)
        and all(_is_plain_float(t) for t in (part.weight, *factors))
    )


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_plain(maps: Tensor, shape: tuple[int, ...] | None = None) -> bool:
    """Whether the native pass can read these maps."""
    return (
        type(maps) is Tensor
        and _is_plain_float(maps)
        and maps.numel() > 0
        and is_channels_last(maps)
        and (shape is None or tuple(maps.shape) == shape)
    )
