"""The coarse gradient: a tensor that autograd takes for full size, stored as one value per patch.

Autograd adds coarse gradients where branches join, and slices, permutes and scales them; those stay on the
grid here. Any other operator receives the dense tensor, which is always correct, and is counted.

Gradients may be stored in other ways (spectral.py); to operators and counters all compact ones are alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map

from .grid import Grid, common_patches, expand, pixels, pool, regrid

__all__ = ["CoarseGradient", "Compact", "count_fallbacks", "densify", "elementwise", "leave_grid", "onto"]

aten = torch.ops.aten


class Compact(Tensor):
    """A gradient of full size that is stored in fewer numbers; ``known`` are the operators it stays so in."""

    known: ClassVar[dict[Any, Callable[..., Any]]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @abstractmethod
    def dense(self) -> Tensor:
        """The plain tensor of full size."""

    @abstractmethod
    def changed(self, change: Callable[[Tensor], Tensor]) -> Compact:
        """The gradient whose stored numbers are what ``change`` makes of these."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = cls.known.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _fall_back(func, args, kwargs or {})


class CoarseGradient(Compact):
    """A gradient that is constant on each patch of ``grid``; ``means`` holds one number per patch.

    ``gated_means``: what the gated term of a residual join gets instead (see ops/join.py).
    """

    means: Tensor
    grid: Grid
    gated_means: Tensor | None

    @staticmethod
    def __new__(cls, values: Tensor, grid: Grid, gated_means: Tensor | None = None) -> CoarseGradient:
        self: CoarseGradient = torch.Tensor._make_wrapper_subclass(
            cls, grid.shape, dtype=values.dtype, device=values.device
        )
        self.means = values
        self.grid = grid
        self.gated_means = gated_means
        return self

    def dense(self) -> Tensor:
        """The plain tensor of full size.

        >>> CoarseGradient(torch.ones(1, 1, 2), Grid((1, 1, 3), (1, 1, 2))).dense()
        tensor([[[1., 1., 1.]]])
        """
        return expand(self.means, self.grid)

    def changed(self, change: Callable[[Tensor], Tensor]) -> CoarseGradient:
        return CoarseGradient(change(self.means), self.grid)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CoarseGradient(shape={self.grid.shape}, patches={self.grid.patches}, dtype={self.dtype})"


_counters: list[Counter[str]] = []


@contextmanager
def count_fallbacks() -> Iterator[Counter[str]]:
    """Count, by operator, how often a compact gradient had to become dense inside the ``with`` block.

    >>> with count_fallbacks() as seen:
    ...     _ = CoarseGradient(torch.ones(1, 1, 1, 1), Grid((1, 1, 2, 2), (1, 1, 2, 2))).exp()
    >>> dict(seen)
    {'aten.exp.default': 1}
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def _fall_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _count(str(func))
    return func(*tree_map(densify, args), **tree_map(densify, kwargs))


def _count(operator: str) -> None:
    for counter in _counters:
        counter[operator] += 1


def leave_grid(gradient: Tensor, operator: str | None) -> Tensor:
    """The dense gradient; counted as a fallback if an operator that knows no grid is why."""
    if operator is not None and isinstance(gradient, Compact):
        _count(operator)
    dense: Tensor = densify(gradient)
    return dense


def densify(value: Any) -> Any:
    """The dense tensor of a compact gradient; anything else as it is."""
    return value.dense() if isinstance(value, Compact) else value


def onto(gradient: Tensor, grid: Grid) -> Tensor:
    """The means of any gradient, coarse or dense, on the patches of ``grid``."""
    if isinstance(gradient, CoarseGradient):
        return regrid(gradient.means, gradient.grid, grid)
    return pool(densify(gradient), grid)


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if not (isinstance(a, CoarseGradient) and isinstance(b, CoarseGradient) and a.shape == b.shape):
        return NotImplemented
    grid = a.grid.common(b.grid)
    left, right = regrid(a.means, a.grid, grid), regrid(b.means, b.grid, grid)
    gated = None
    if a.gated_means is not None or b.gated_means is not None:
        terms = [t.means if t.gated_means is None else t.gated_means for t in (a, b)]
        gated = torch.add(regrid(terms[0], a.grid, grid), regrid(terms[1], b.grid, grid), alpha=alpha)
    return CoarseGradient(torch.add(left, right, alpha=alpha), grid, gated)


def _scale(op: Callable[..., Tensor]) -> Callable[..., Any]:
    """Multiply or divide by a number, or by a tensor that does not vary inside a patch's dimensions."""

    def apply(a: Any, b: Any) -> Any:
        if isinstance(b, CoarseGradient):
            if op is torch.div or isinstance(a, CoarseGradient):
                return NotImplemented
            a, b = b, a
        if isinstance(b, Tensor) and not _constant_along(b, a.grid):
            return NotImplemented
        return CoarseGradient(op(a.means, b), a.grid)

    return apply


def _constant_along(other: Tensor, grid: Grid) -> bool:
    missing = len(grid.shape) - other.dim()
    return missing >= 0 and all(d < missing or other.shape[d - missing] == 1 for d in grid.pooled)


def _permute(a: CoarseGradient, dims: Sequence[int]) -> CoarseGradient:
    dims = [d % a.dim() for d in dims]
    return CoarseGradient(a.means.permute(dims), a.grid.permute(dims))


def _transpose(a: CoarseGradient, dim0: int, dim1: int) -> CoarseGradient:
    dims = list(range(a.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(a, dims)


def _slice(
    a: CoarseGradient, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if a.grid.patches[dim] != 1:
        return NotImplemented
    values = aten.slice.Tensor(a.means, dim, start, end, step)
    shape = list(a.grid.shape)
    shape[dim] = values.shape[dim]
    return CoarseGradient(values, Grid(tuple(shape), a.grid.patches))


def _slice_backward(a: Any, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    if a.grid.patches[dim] != 1:
        return NotImplemented
    coarse = list(a.means.shape)
    coarse[dim] = sizes[dim]
    return CoarseGradient(
        aten.slice_backward(a.means, coarse, dim, start, end, step), Grid(tuple(sizes), a.grid.patches)
    )


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    if tree_any(lambda t: not isinstance(t, CoarseGradient), list(tensors)):
        return NotImplemented
    if any(t.grid.patches[dim] != 1 for t in tensors):
        return NotImplemented
    patches = tensors[0].grid.patches
    for t in tensors[1:]:
        patches = common_patches(t.grid.shape, patches, t.grid.patches)
    shape = list(tensors[0].grid.shape)
    shape[dim] = sum(t.grid.shape[dim] for t in tensors)
    values = torch.cat([regrid(t.means, t.grid, Grid.of(t.grid.shape, patches)) for t in tensors], dim)
    return CoarseGradient(values, Grid(tuple(shape), patches))


def _view(a: CoarseGradient, size: Sequence[int]) -> Any:
    """Regroup leading dimensions (as channel shuffle does) while the pooled ones stay as they are."""
    if a.grid.is_dense:
        return a.means.reshape(size)
    first = a.grid.pooled[0]
    tail = a.dim() - first
    size = list(size)
    if len(size) < tail or tuple(size[-tail:]) != a.grid.shape[first:]:
        return NotImplemented
    lead = size[:-tail]
    values = a.means.reshape(*lead, *a.means.shape[first:])
    shape = (*values.shape[: len(lead)], *a.grid.shape[first:])
    return CoarseGradient(values, Grid(shape, (1,) * len(lead) + a.grid.patches[first:]))


def _sum(a: CoarseGradient, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = [d % a.dim() for d in dim or range(a.dim())]
    if any(d not in dims for d in a.grid.pooled):
        return NotImplemented
    return (a.means * pixels(a.grid, a.means)).expand_as(a.means).sum(dims, keepdim=keepdim, dtype=dtype)


def elementwise(op: Callable[..., Tensor]) -> Callable[..., Compact]:
    """An operator on full size that is the same one on the stored numbers."""

    def apply(a: Compact, *args: Any, **kwargs: Any) -> Compact:
        kwargs.pop("memory_format", None)
        return a.changed(lambda numbers: op(numbers, *args, **kwargs))

    return apply


CoarseGradient.known = {
    aten.add.Tensor: _add,
    aten.mul.Tensor: _scale(torch.mul),
    aten.mul.Scalar: _scale(torch.mul),
    aten.div.Tensor: _scale(torch.div),
    aten.div.Scalar: _scale(torch.div),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.cat.default: _cat,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.sum.dim_IntList: _sum,
    aten.neg.default: elementwise(torch.neg),
    aten.detach.default: elementwise(torch.detach),
    aten.alias.default: elementwise(aten.alias.default),
    aten.clone.default: elementwise(torch.clone),
    aten._to_copy.default: elementwise(aten._to_copy.default),
}
