"""Gradient filtering in int8: activations, weights and gradients all have 8 bits, the forward's too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from torch import Tensor

from ..coarse import CoarseGradient, densify, onto
from ..errors import PlanError
from ..geometry import ConvGeometry
from ..grid import per_axis
from ..ops.coarse_conv import coarse_backward, coarse_macs, weight_factor
from ..ops.collapsed import every_tap
from ..ops.exact_conv import Gradients, Want, exact_backward
from ..ops.int8 import Int8, dequantized, has_integer_products, integer_product, quantized, rounded
from ..ops.layout import rows
from ..ops.means import patch_means
from .base import Memory, Method

__all__ = ["Int8Gradients"]


@dataclass(frozen=True)
class Int8Gradients(Method):
    """Gradient filtering with int8 activations, weights and gradients: the forward is not exact.

    patch: side of the patch; 1 filters nothing, and rounds only.
    taps: as of GradientFilter.
    scaling: one scale for all of a tensor, or one for each sample of a batch; a weight has one per channel.

    >>> Int8Gradients(patch=4)
    Int8Gradients(patch=4, taps='overlap', scaling='tensor')
    """

    patch: int = 2
    taps: Literal["overlap", "collapse"] = "overlap"
    scaling: Literal["tensor", "sample"] = "tensor"

    forward_is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.patch, int) or self.patch < 1:
            raise PlanError(f"patch must be a whole number of at least 1, not {self.patch!r}; 2 is usual.")
        if self.taps not in ("overlap", "collapse"):
            raise PlanError(f"taps must be 'overlap' or 'collapse', not {self.taps!r}.")
        if self.scaling not in ("tensor", "sample"):
            raise PlanError(f"scaling must be 'tensor' or 'sample', not {self.scaling!r}.")

    @property
    def products(self) -> Literal["integer", "simulated"]:
        """Whether weight gradients that are one product of matrices run on integers; all else is in float."""
        return "integer" if self.scaling == "tensor" and has_integer_products() else "simulated"

    @property
    def warns(self) -> str:
        return f"the forward is rounded to int8; int8 products: {self.products}"

    def refuses(self, geometry: ConvGeometry) -> str | None:
        if geometry.transposed:
            return "no int8 for transposed convolutions"
        if self.patch > 1 and geometry.spatial == 0:
            return "plain features have no map"
        if self.patch > 1 and not geometry.is_map:
            return f"the map behind {geometry.x_shape[2]} tokens is not known; use patch=1"
        return None

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        return per_axis(self.patch, geometry.spatial)

    def forward(self, run: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return run(rounded(x, self._by_sample), rounded(weight, True), bias)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        sides = self.patches(geometry)
        return quantized(
            x if prod(sides) == 1 else patch_means(x, geometry.input_grid(sides)), self._by_sample
        )

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        sides = self.patches(geometry)
        dense = prod(sides) == 1
        means = quantized(
            densify(grad) if dense else onto(grad, geometry.output_grid(sides)), self._by_sample
        )
        weight_grad = self._integer_weight_gradient(means, kept, weight, geometry) if want.weight else None
        if weight_grad is not None:
            want = want._replace(weight=False)
        x = dequantized(Int8(*kept), grad.dtype) if want.weight else None
        g, w = dequantized(means, grad.dtype), rounded(weight, True)
        if dense:
            x_grad, simulated = exact_backward(g, x, w, geometry, want)
        else:
            x_grad, simulated = coarse_backward(g, x, w, geometry, sides, self.taps, want)
        if x_grad is not None and not dense:
            x_grad = CoarseGradient(x_grad, geometry.input_grid(sides))
        return Gradients(x_grad, simulated if weight_grad is None else weight_grad)

    def _integer_weight_gradient(
        self, means: Int8, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
    ) -> Tensor | None:
        """Of layers whose weight gradient is one product of matrices, where such products run on integers."""
        factor = weight_factor(geometry, self.patches(geometry), self.taps)
        if factor is None or self.products == "simulated" or means.values.numel() == 0:
            return None
        g, x = (Int8(rows(q.values), q.scale) for q in (means, Int8(*kept)))
        made = integer_product(g, x, factor)
        return None if made is None else every_tap(made.to(weight.dtype), weight)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        sides = self.patches(geometry)
        each = geometry.macs if prod(sides) == 1 else coarse_macs(geometry, sides, self.taps)
        return each * (want.x + want.weight)

    @property
    def _by_sample(self) -> bool:
        return self.scaling == "sample"
