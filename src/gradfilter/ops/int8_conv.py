"""A frozen convolution in int8, by oneDNN: a scale per channel of the weight, bytes with one scale for maps.

The norm is folded into the weight before it is rounded; activation and residual sum run with it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fused import NONE, Activation, FusedConv
from .int8 import has_integer_products, quantized

__all__ = ["Bytes", "Int8Conv", "has_dot_products", "is_available", "weight_steps"]

_DOT_PRODUCTS = {"avx512_vnni", "avx_vnni", "asimddp"}  # as Linux calls them
_FUSED = ("none", "relu", "hardtanh", "hardswish", "swish")  # activations that oneDNN runs on the way
_FUSED_BEHIND_SUMS = ("none", "relu")


class Bytes(NamedTuple):
    """How a map is kept in bytes: a byte stands for (byte - zero) * scale; 0.0, which pads maps, is exact."""

    scale: float
    zero: int

    @classmethod
    def between(cls, low: float, high: float) -> Bytes:
        """For numbers from low to high, and zero.

        >>> Bytes.between(-5.0, 250.0)
        Bytes(scale=1.0, zero=5)
        """
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max((high - low) / 255, 1e-30)
        return cls(scale, round(-low / scale))

    def packed(self, x: Tensor) -> Tensor:
        """Floats to bytes, what is out of range to the nearest one."""
        shift = x.new_tensor(self.zero + 0.5)  # bytes are cut off, not rounded
        return torch.add(shift, x, alpha=1 / self.scale).clamp_(0, 255).to(torch.uint8)

    def unpacked(self, x: Tensor) -> Tensor:
        return x.float().sub_(self.zero).mul_(self.scale)


class Int8Conv:
    """What a ``FusedConv`` does, with its weights as they are now, in int8.

    x, y, other: how the input, the result and the other term of a sum are kept in bytes. The result is in
    float if y is None; what is given may be in float too. may_write: whether ``other`` is read for the last
    time, so that the sum may be written to it.
    """

    def __init__(
        self,
        fused: FusedConv,
        x: Bytes,
        y: Bytes | None = None,
        other: Bytes | None = None,
        may_write: bool = False,
    ) -> None:
        self.fused, self.x, self.y, self.other, self.may_write = fused, x, y, other, may_write
        padding, stride, dilation, groups = fused.settings
        self._settings = (stride, padding, dilation, groups)
        weight, self._bias = fused.folded()
        self._weight, scale = quantized(weight, by_row=True, steps=weight_steps())
        self._scale = scale.flatten()
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """All of it, with ``other`` added before the activation."""
        x = x if x.dtype == torch.uint8 else self.x.packed(x)
        activation = self.fused.activation
        if other is None:
            return self._alone(x, activation)
        if activation.name in _FUSED_BEHIND_SUMS and other.shape == self.fused.geometry(x).y_shape:
            return self._summed(x, other)
        y = self._run(x, None, NONE) + self._in_float(other)
        return self._result(activation.run_(y))

    def _alone(self, x: Tensor, activation: Activation) -> Tensor:
        if activation.name in _FUSED:
            return self._run(x, self.y, activation)
        return self._result(activation.run_(self._run(x, None, NONE)))

    def _summed(self, x: Tensor, other: Tensor) -> Tensor:
        """In bytes if the other term and the result are, else in float; oneDNN writes to the term."""
        last = torch.channels_last
        if other.dtype != torch.uint8 or self.y is None:
            return self._result(self._add(x, self._in_float(other).clone(memory_format=last), None))
        copied = other.contiguous if self.may_write else other.clone
        return self._add(x, copied(memory_format=last), self.y)

    def _in_float(self, other: Tensor) -> Tensor:
        if other.dtype != torch.uint8 or self.other is None:
            return other
        return self.other.unpacked(other)

    def _result(self, y: Tensor) -> Tensor:
        return y if self.y is None else self.y.packed(y)

    def _run(self, x: Tensor, y: Bytes | None, activation: Activation) -> Tensor:
        call = (*self._operands(x), self._bias, *self._settings, *_kept_as(y))
        made: Tensor = torch.ops.onednn.qconv2d_pointwise(
            *call, activation.name, list(activation.numbers), ""
        )
        return made

    def _add(self, x: Tensor, term: Tensor, y: Bytes | None) -> Tensor:
        call = (*self._operands(x), term, self._bias, *self._settings, *_kept_as(y))
        scale, zero = self.other if y is not None and self.other is not None else (1.0, 0)
        name = self.fused.activation.name
        made: Tensor = torch.ops.onednn.qconv2d_pointwise.binary(
            *call, scale, zero, "sum", 1.0, name if name == "relu" else None, [], ""
        )
        return made

    def _operands(self, x: Tensor) -> tuple[Any, ...]:
        """The input, and the weight in the layout that oneDNN wants for inputs like the first."""
        if self._packed is None:
            prepack = torch.ops.onednn.qconv_prepack
            self._packed = prepack(self._weight, self._scale, *self.x, *self._settings, list(x.shape))
        return x, *self.x, self._packed, self._scale, self._zeros


def _kept_as(y: Bytes | None) -> tuple[float, int, torch.dtype]:
    return (1.0, 0, torch.float32) if y is None else (*y, torch.uint8)


def is_available() -> bool:
    """Whether torch was built with oneDNN, and may use it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


@cache
def has_dot_products() -> bool:
    """Whether the processor has instructions that sum products of int8 in 32 bits."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        told = ""
    return not _DOT_PRODUCTS.isdisjoint(told.split()) or has_integer_products()


@cache
def weight_steps() -> int:
    """How many steps a weight may be: 127, or 64 where two products are first summed in 16 bits, cut off.

    x86 without VNNI does that, and says nothing. So it is tried out, with the largest sums there are.
    """
    return 127 if all(_sums_are_exact(kernel, groups) for kernel in (1, 3) for groups in (1, 4)) else 64


def _sums_are_exact(kernel: int, groups: int) -> bool:
    x = torch.full((1, 16, 5, 5), 255, dtype=torch.uint8)
    weight = torch.full((16, 16 // groups, kernel, kernel), 127, dtype=torch.int8)
    scale, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
    settings = ((1, 1), (0, 0), (1, 1), groups)
    packed = torch.ops.onednn.qconv_prepack(weight, scale, 1.0, 0, *settings, list(x.shape))
    call = (x, 1.0, 0, packed, scale, zeros, None, *settings, *_kept_as(None))
    sums = torch.ops.onednn.qconv2d_pointwise(*call, "none", [], "")
    return bool((sums == 255 * 127 * weight[0].numel()).all())
