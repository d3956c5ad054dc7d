"""Low-pass Walsh-Hadamard coefficients: a few smooth functions per patch stand for the maps (LBP-WHT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ..coarse import densify
from ..errors import PlanError
from ..geometry import ConvGeometry
from ..grid import per_axis
from ..ops.exact_conv import Gradients, Want, exact_backward
from ..ops.storage import Store
from ..ops.walsh import Basis
from ..spectral import SpectralGradient
from .base import Memory, Method
from .settings import check_tokens, frozen

__all__ = ["WalshHadamard"]


@dataclass(frozen=True)
class WalshHadamard(Method):
    """Of each patch keep the coefficients of its smoothest Walsh functions; gradients are formed from those.

    For 1x1 convolutions and linear layers over maps. order=1 is the gradient filter of the same patch, and
    the sum of the patch's sides less 1 (15 for a patch of 8 x 8) is exact.

    patch: side of the patch, or one per axis; powers of two.
    order: of the functions, numbered by their sign changes, those products r, c are kept with r + c < order.
    tokens: height and width of the map behind a linear layer's (N, L, C) tokens.
    extra_tokens: how many tokens before those of the map, such as a class token, are kept whole.
    store: how what is kept is stored: "same", "bf16" or "int8".

    >>> str(WalshHadamard(patch=4))
    'WalshHadamard(patch=4)'
    """

    patch: int | tuple[int, ...] = 8
    order: int = 3
    tokens: tuple[int, int] | None = None
    extra_tokens: int = 0
    store: Store = "same"

    def __post_init__(self) -> None:
        for name in ("patch", "tokens"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        sides = self.patch if isinstance(self.patch, tuple) else (self.patch,)
        if not sides or not all(_is_whole(side, 1) and side & (side - 1) == 0 for side in sides):
            raise PlanError(
                f"patch must be powers of two, not {self.patch!r}; use 4 or 8, or GradientFilter for others."
            )
        check_tokens(self.tokens)
        if not _is_whole(self.order, 1):
            raise PlanError(f"order must be a whole number of at least 1, not {self.order!r}; 3 is usual.")
        if not _is_whole(self.extra_tokens, 0) or (self.extra_tokens and self.tokens is None):
            raise PlanError(
                f"extra_tokens={self.extra_tokens!r} must be a whole number, with tokens=(H, W) of the rest."
            )

    def refuses(self, geometry: ConvGeometry) -> str | None:
        axes = geometry.axes
        if not axes:
            return "plain features have no map; use Exact"
        if geometry.transposed or not all(axis.is_pointwise and axis.stride == 1 for axis in axes):
            return "Walsh functions fit 1x1 convolutions of stride 1 without padding; use GradientFilter"
        if not geometry.is_map and not self._has_extra(geometry):
            count = geometry.x_shape[2]
            return (
                f"the map behind {count} tokens is not known; set tokens=(H, W), and extra_tokens for others"
            )
        size = self._map(geometry)
        if prod(size) == 0:
            return "the map is empty; use Exact"
        if isinstance(self.patch, tuple) and len(self.patch) != len(size):
            return f"patch {self.patch} has {len(self.patch)} numbers but the map has {len(size)} axes"
        return None

    def basis(self, geometry: ConvGeometry) -> Basis:
        size = self._map(geometry)
        extra = 0 if geometry.is_map else self.extra_tokens
        return Basis(size, per_axis(self.patch, len(size)), self.order, extra)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        return (self.basis(geometry).analyse(x),)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        basis = self.basis(geometry)
        kernel = weight.reshape(*weight.shape[:2], 1, 1)
        x = kept[0] if kept else None
        found = exact_backward(_coefficients(grad, basis), x, kernel, basis.geometry(geometry), want)
        x_grad = None if found.x is None else SpectralGradient(found.x, basis, geometry.x_shape)
        return Gradients(x_grad, None if found.weight is None else found.weight.view(weight.shape))

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        basis = self.basis(geometry)
        batch, outputs, inputs = geometry.y_shape[0], geometry.y_shape[1], geometry.x_shape[1]
        transformed = batch * (outputs + inputs * want.x) * basis.transform_macs
        return basis.geometry(geometry).macs * (want.x + want.weight) + transformed * any(want)

    def _map(self, geometry: ConvGeometry) -> tuple[int, ...]:
        if not geometry.is_map and self.tokens:
            return self.tokens
        return tuple(axis.size_in for axis in geometry.axes)

    def _has_extra(self, geometry: ConvGeometry) -> bool:
        """Whether the tokens are the extra ones and those of the map."""
        return self.tokens is not None and geometry.x_shape[2:] == (self.extra_tokens + prod(self.tokens),)


def _coefficients(grad: Tensor, basis: Basis) -> Tensor:
    if isinstance(grad, SpectralGradient) and grad.basis == basis and grad.channel == 1:
        return grad.coefficients
    return basis.analyse(densify(grad))


def _is_whole(number: object, least: int) -> bool:
    return isinstance(number, int) and number >= least
