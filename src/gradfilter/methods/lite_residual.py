"""Lite residuals (TinyTL): a small branch on a pooled map trains beside a layer that stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod, sqrt
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import ConvGeometry
from ..ops.exact_conv import Want
from ..ops.pointwise import pointwise
from ..ops.pooled import pooled
from .base import Method

__all__ = ["LiteResidual"]

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


@dataclass(frozen=True)
class LiteResidual(Method):
    """Train the bias of a convolution, and a residual beside it that sees a pooled input.

    The residual pools its input, runs a grouped convolution, a group norm, a ReLU and a 1x1 convolution that
    starts as zero, and is scaled up to the output's size. Only pooled maps are kept. Linear layers, and
    convolutions that pad with other than zeros, stay exact.

    reduction: side of the pooling window. groups: of convolution and norm, as far as they divide channels.
    kernel: side of the convolution, an odd number.

    >>> import gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
    >>> print(gf.plan(model, gf.LiteResidual(kernel=3)))
    layer  kind    action  method                               reason
    0      Conv2d  train   LiteResidual(reduction=2, kernel=3)
    3      Linear  train   Exact()                              is no convolution
    """

    reduction: int = 2
    groups: int = 2
    kernel: int = 5

    trains = frozenset({"bias"})
    adds_parameters = True

    def __post_init__(self) -> None:
        for name in ("reduction", "groups", "kernel"):
            value = getattr(self, name)
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                raise PlanError(f"{name} must be a whole number of at least 1, not {value!r}.")
        if self.kernel % 2 == 0:
            raise PlanError(f"kernel must be odd, not {self.kernel}; use {self.kernel + 1}.")

    def misfits(self, module: Any) -> str | None:
        if isinstance(module, nn.Linear):
            return "is no convolution"
        return None if module.padding_mode == "zeros" else f"pads with padding_mode={module.padding_mode!r}"

    def added(self, name: str, module: Any) -> dict[str, Tensor]:
        weight, channels, taps = module.weight, module.in_channels, len(module.kernel_size)
        shape = (channels, channels // self._groups(channels), *[self.kernel] * taps)
        own = torch.Generator().manual_seed(crc32(name.encode()))  # the same at every start
        conv = torch.randn(shape, generator=own) * sqrt(2 / prod(shape[1:]))
        return {
            "conv": conv.to(weight),
            "scale": weight.new_ones(channels),
            "shift": weight.new_zeros(channels),
            "up": weight.new_zeros(module.out_channels, channels, *[1] * taps),
        }

    def adapt(self, y: Tensor, x: Tensor, run: Callable[..., Tensor], module: Any) -> Tensor:
        groups, pad = self._groups(x.shape[1]), self.kernel // 2
        convolve = _CONVOLUTIONS[x.dim()]
        found = convolve(pooled(x, self.reduction), module.gradfilter_conv, None, 1, pad, 1, groups)
        found = torch.group_norm(found, groups, module.gradfilter_scale, module.gradfilter_shift)
        small = pointwise(-F.relu(found), module.gradfilter_up)
        # Taking +0.0 away leaves every bit as it is, -0.0 too; adding it would not.
        return y - F.interpolate(small, tuple(y.shape[2:]), mode=_MODES[x.dim()])

    def forward_macs(self, geometry: ConvGeometry) -> int:
        return geometry.macs + sum(self._macs(geometry))

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        conv, up = self._macs(geometry)
        return want.x * (geometry.macs + conv) + want.weight * geometry.macs + conv + 2 * up

    def _macs(self, geometry: ConvGeometry) -> tuple[int, int]:
        batch, channels, *sizes = geometry.x_shape
        pixels = batch * prod(-(-size // self.reduction) for size in sizes)
        taps = self.kernel ** len(sizes)
        conv = pixels * channels * (channels // self._groups(channels)) * taps
        return conv, pixels * channels * geometry.y_shape[1]

    def _groups(self, channels: int) -> int:
        return gcd(self.groups, channels)
