"""Low-rank adapters (LoRA): the weight stays, and a product of two small ones beside it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import ConvGeometry
from ..ops.exact_conv import Want
from ..ops.pointwise import pointwise
from .base import Method

__all__ = ["LowRankAdapter"]


@dataclass(frozen=True)
class LowRankAdapter(Method):
    """Train ``up(down(x)) * alpha / rank`` beside a layer that stays as it is.

    rank: channels between the two, of each group; no more than the group's weight can have as its rank.
        ``down`` is a layer like the adapted one, ``up`` a 1x1 convolution that starts as zero, so that the
        first forward is the plain one, bit by bit.
    alpha: the strength of the adapter, which is scaled by alpha / rank; the rank if not said.

    The two train as ``gradfilter_down`` and ``gradfilter_up`` of the layer; ``gf.merge_`` folds them into its
    weight. The input is kept for ``down``: parameters and optimizer state are saved, activations are not.

    >>> import gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), gf.LowRankAdapter(rank=2), "last:1")
    >>> [(name, *p.shape) for name, p in model.named_parameters() if p.requires_grad][2:]
    [('head.gradfilter_down', 2, 32), ('head.gradfilter_up', 10, 2)]
    """

    rank: int = 4
    alpha: float | None = None

    trains = frozenset()
    adds_parameters = True

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, int) and not isinstance(self.rank, bool) and self.rank >= 1):
            raise PlanError(f"rank must be a whole number of at least 1, not {self.rank!r}; 4 is usual.")
        if self.alpha is not None and not (isinstance(self.alpha, int | float) and self.alpha > 0):
            raise PlanError(f"alpha must be a number above 0, not {self.alpha!r}; leave it out for the rank.")

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def added(self, name: str, module: Any) -> dict[str, Tensor]:
        weight, groups = module.weight, getattr(module, "groups", 1)
        first, second, *taps = weight.shape
        transposed = _is_transposed(module)
        inputs, outputs = (first // groups, second) if transposed else (second, first // groups)
        rank = self._rank(inputs * prod(taps), outputs)
        shape = (first, rank, *taps) if transposed else (groups * rank, second, *taps)
        reads = prod(shape) // (groups * rank)
        own = torch.Generator().manual_seed(crc32(name.encode()))  # the same at every start
        down = torch.randn(shape, generator=own) / sqrt(max(1, reads))
        up = weight.new_zeros(groups * outputs, rank, *[1] * len(taps))
        return {"down": down.to(weight), "up": up}

    def _rank(self, reads: int, outputs: int) -> int:
        """Of a matrix of so many columns and rows."""
        return min(self.rank, max(1, reads), max(1, outputs))

    def adapt(self, y: Tensor, x: Tensor, run: Callable[..., Tensor], module: Any) -> Tensor:
        down, up = module.gradfilter_down, module.gradfilter_up
        # Taking +0.0 away leaves every bit as it is, -0.0 too; adding it would not.
        return y - pointwise(run(x, down, None) * -self.scale, up, getattr(module, "groups", 1))

    def merged(self, module: Any) -> Tensor:
        groups, weight = getattr(module, "groups", 1), module.weight.detach()
        precise = torch.promote_types(weight.dtype, torch.float32)
        down, up = (t.detach().to(precise) for t in (module.gradfilter_down, module.gradfilter_up))
        up = up.flatten(1).unflatten(0, (groups, -1))
        if _is_transposed(module):
            change = torch.einsum("gor,gcr...->gco...", up, down.unflatten(0, (groups, -1)))
        else:
            change = torch.einsum("gor,grc...->goc...", up, down.unflatten(0, (groups, -1)))
        merged: Tensor = weight.to(precise) + self.scale * change.flatten(0, 1)
        return merged.to(weight)

    def forward_macs(self, geometry: ConvGeometry) -> int:
        return geometry.macs + sum(self._macs(geometry))

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        down, up = self._macs(geometry)
        return want.x * (geometry.macs + down) + want.weight * geometry.macs + down + 2 * up

    def _macs(self, geometry: ConvGeometry) -> tuple[int, int]:
        """Those of ``down`` and ``up``."""
        inputs, outputs = (shape[1] // geometry.groups for shape in (geometry.x_shape, geometry.y_shape))
        rank = self._rank(inputs * geometry.taps, outputs)
        return geometry.macs // outputs * rank, prod(geometry.y_shape) * rank


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "transposed", False))
