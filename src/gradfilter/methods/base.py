"""What a method is: how a layer keeps its input, and how it forms gradients from what it kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from ..geometry import ConvGeometry
from ..ops.exact_conv import Gradients, Want

__all__ = ["Method"]


class Method(ABC):
    """A value (frozen dataclass) that says what a convolution or linear layer keeps and computes.

    Layers are seen as convolutions of (N, C, spatial...); a linear layer over maps is a 1x1 convolution.
    """

    tokens: tuple[int, int] | None = None

    def __str__(self) -> str:
        """Short: the first setting, and those that differ from their defaults."""
        shown = [
            f"{f.name}={getattr(self, f.name)}"
            for i, f in enumerate(fields(self))  # type: ignore[arg-type]
            if i == 0 or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def for_layer(self, name: str) -> Method:
        """The method of the layer called ``name``; differs from self where settings are given by layer."""
        return self

    def refuses(self, geometry: ConvGeometry) -> str | None:
        """Why this layer must stay exact, or None."""
        return None

    @abstractmethod
    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        """The patch per spatial axis on which the gradient of the output is wanted; ones mean dense."""

    @abstractmethod
    def keep(self, x: Tensor, geometry: ConvGeometry) -> tuple[Tensor, ...]:
        """What the forward keeps of the input for the weight gradient."""

    @abstractmethod
    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        """Gradients of input and weight; ``grad`` and the input gradient may be coarse or dense."""

    @abstractmethod
    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        """Multiply-adds of ``gradients``."""
