"""HOSVD: keep the leading directions of every mode of the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..geometry import ConvGeometry
from ..ops.exact_conv import Want
from ..ops.storage import Store
from ..ops.subspace import by_variance, can_decompose, leading
from ..ops.tucker import compress, contraction_macs, is_smaller, tucker_weight_gradient
from ..ops.unfolding import at_least_float32, mode_product
from .base import Memory, Method
from .settings import check_variance

__all__ = ["HOSVD"]


@dataclass(frozen=True)
class HOSVD(Method):
    """Keep the input as a Tucker core and one factor per mode; the input gradient is exact.

    variance: the share of the input's energy (sum of squares) that each mode's factor keeps; its rank is the
        smallest that does. At 1.0, and wherever factors would not be smaller, the input itself is kept.
    sequential: take each mode's factor from what the earlier factors have left (ST-HOSVD), which is cheaper;
        by default from the input itself, as published.
    store: how what is kept is stored: "same", "bf16" or "int8".

    >>> HOSVD(variance=0.9)
    HOSVD(variance=0.9, sequential=False, store='same')
    """

    bytes_depend_on_data: ClassVar[bool] = True

    variance: float = 0.8
    sequential: bool = False
    store: Store = "same"

    def __post_init__(self) -> None:
        check_variance(self.variance)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        if self.variance == 1 or not can_decompose(x):
            return (x,)
        factors = self._factors(at_least_float32(x))
        if not is_smaller(x.shape, [factor.shape[1] for factor in factors]):
            return (x,)
        return compress(x, factors)

    def _factors(self, x: Tensor) -> list[Tensor]:
        enough, factors = by_variance(self.variance), []
        for mode in range(x.dim()):
            factors.append(leading(x, mode, enough))
            if self.sequential:
                x = mode_product(x, factors[mode].t(), mode)
        return factors

    def weight_gradient(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
    ) -> Tensor:
        if len(kept) == 1:
            return super().weight_gradient(grad, kept, weight, geometry)
        core, *factors = kept
        return tucker_weight_gradient(grad, core, factors, weight, geometry)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        """The most it can be: ranks depend on the data."""
        own = geometry.macs
        if self.variance < 1:
            own = max(own, contraction_macs(geometry, geometry.x_shape))
        return geometry.macs * want.x + own * want.weight
