"""The spectral gradient: a tensor that autograd takes for full size, stored as coefficients of patches.

Sums and factors by channel are the same for coefficients as for pixels, so those stay as they are. Any other
operator receives the dense tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .coarse import Compact, elementwise
from .ops.walsh import Basis

__all__ = ["SpectralGradient"]

aten = torch.ops.aten


class SpectralGradient(Compact):
    """``coefficients`` (N, C, 1, count) of a gradient whose channels are dimension ``channel``."""

    coefficients: Tensor
    basis: Basis
    channel: int

    @staticmethod
    def __new__(
        cls, coefficients: Tensor, basis: Basis, size: Sequence[int], channel: int = 1
    ) -> SpectralGradient:
        self: SpectralGradient = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=coefficients.dtype, device=coefficients.device
        )
        self.coefficients, self.basis, self.channel = coefficients, basis, channel
        return self

    def dense(self) -> Tensor:
        """The plain tensor of full size.

        >>> basis = Basis((4,), (4,), order=2)
        >>> SpectralGradient(torch.ones(1, 1, 1, 2), basis, (1, 1, 4)).dense()
        tensor([[[1., 1., 0., 0.]]])
        """
        return self.basis.synthesise(self.coefficients).movedim(1, self.channel)

    def changed(self, change: Callable[[Tensor], Tensor]) -> SpectralGradient:
        return SpectralGradient(change(self.coefficients), self.basis, self.shape, self.channel)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpectralGradient(shape={tuple(self.shape)}, {self.basis}, dtype={self.dtype})"


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if not (isinstance(a, SpectralGradient) and isinstance(b, SpectralGradient)):
        return NotImplemented
    if (a.shape, a.basis, a.channel) != (b.shape, b.basis, b.channel):
        return NotImplemented
    return a.changed(lambda numbers: torch.add(numbers, b.coefficients, alpha=alpha))


def _scale(op: Callable[..., Tensor]) -> Callable[..., Any]:
    """Multiply or divide by a number, or by one number per channel."""

    def apply(a: Any, b: Any) -> Any:
        if not isinstance(a, SpectralGradient) or isinstance(b, SpectralGradient):
            return NotImplemented
        if isinstance(b, Tensor) and b.dim() > 0:
            if b.dim() != a.dim() or any(n != 1 for d, n in enumerate(b.shape) if d != a.channel):
                return NotImplemented
            b = b.reshape(1, -1, 1, 1)
        return a.changed(lambda numbers: op(numbers, b))

    return apply


def _permute(a: SpectralGradient, dims: Sequence[int]) -> Any:
    dims = [d % a.dim() for d in dims]
    others = [d for d in dims if d != a.channel]
    if dims[0] != 0 or others != sorted(others):
        return NotImplemented
    size = [a.shape[d] for d in dims]
    return SpectralGradient(a.coefficients, a.basis, size, dims.index(a.channel))


def _sum(a: SpectralGradient, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over everything but channels, as a bias asks for it."""
    others = [d for d in range(a.dim()) if d != a.channel]
    if keepdim or dtype is not None or sorted(d % a.dim() for d in dim or ()) != others:
        return NotImplemented
    return a.basis.sums(a.coefficients)


SpectralGradient.known = {
    aten.add.Tensor: _add,
    aten.mul.Tensor: _scale(torch.mul),
    aten.mul.Scalar: _scale(torch.mul),
    aten.div.Tensor: _scale(torch.div),
    aten.div.Scalar: _scale(torch.div),
    aten.permute.default: _permute,
    aten.sum.dim_IntList: _sum,
    aten.neg.default: elementwise(torch.neg),
    aten.detach.default: elementwise(torch.detach),
    aten.alias.default: elementwise(aten.alias.default),
    aten.clone.default: elementwise(torch.clone),
    aten._to_copy.default: elementwise(aten._to_copy.default),
}
