"""SVD: keep the leading directions of a batch of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..geometry import ConvGeometry
from ..ops.exact_conv import Want
from ..ops.low_rank import batch_factors, factors_weight_gradient, most_macs
from ..ops.storage import Store
from ..ops.subspace import by_variance, can_decompose
from .base import Memory, Method
from .settings import check_variance

__all__ = ["SVD"]


@dataclass(frozen=True)
class SVD(Method):
    """Keep a batch of inputs as a few maps and each sample's share of them; the input gradient is exact.

    variance: the share of the input's energy (sum of squares) to keep; the rank is the smallest that does. At
        1.0, and wherever factors would not be smaller, the input itself is kept.
    store: how what is kept is stored: "same", "bf16" or "int8".

    >>> SVD(variance=0.9)
    SVD(variance=0.9, store='same')
    """

    bytes_depend_on_data: ClassVar[bool] = True

    variance: float = 0.8
    store: Store = "same"

    def __post_init__(self) -> None:
        check_variance(self.variance)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        if self.variance == 1 or not can_decompose(x):
            return (x,)
        return batch_factors(x, by_variance(self.variance)) or (x,)

    def weight_gradient(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
    ) -> Tensor:
        if len(kept) == 1:
            return super().weight_gradient(grad, kept, weight, geometry)
        shares, maps = kept
        return factors_weight_gradient(grad, shares, maps, weight, geometry)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        """The most it can be: the rank depends on the data."""
        own = geometry.macs if self.variance == 1 else most_macs(geometry)
        return geometry.macs * want.x + own * want.weight
