"""On which grid, or in which basis, does the layer that made a tensor want its gradient?

Layers of a region answer through their autograd node (``node.wanted``, the patches of their output, and
``node.basis``). Nodes of plain torch operators that only pass gradients on are looked through. Anything else
wants the dense gradient, so a compact gradient never reaches a node that would not expect it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .grid import Grid, common_patches
from .ops.walsh import Basis

__all__ = ["end_of_grid", "wanted_basis", "wanted_grid"]

Patches = tuple[int, ...]
Shape = tuple[int, ...]


def wanted_grid(x: Tensor) -> Grid:
    """The grid on which the gradient of ``x`` is wanted; dense where its origin is unknown."""
    shape = tuple(x.shape)
    patches = _patches(x.grad_fn, shape) if x.grad_fn is not None else None
    return Grid.dense(shape) if patches is None else Grid.of(shape, patches)


def wanted_basis(x: Tensor) -> Basis | None:
    """The basis in whose coefficients the gradient of ``x`` is wanted; None where pixels are."""
    return None if x.grad_fn is None else _basis(x.grad_fn)


def _basis(node: Any) -> Basis | None:
    own: Basis | None = getattr(node, "basis", None)
    if own is None and type(node).__name__ in _PASS_COEFFICIENTS:
        found = {_basis(edge) for edge, _ in node.next_functions if edge is not None}
        own = found.pop() if len(found) == 1 else None
    return own


def end_of_grid(x: Tensor) -> str | None:
    """The operator that made ``x``, if it parts us from an earlier layer that wants coarse gradients."""
    node = x.grad_fn
    if node is None or _patches(node, tuple(x.shape)) is not None:
        return None
    ahead, seen = [node], {node}
    while ahead:
        for edge, _ in ahead.pop().next_functions:
            if edge is None or edge in seen:
                continue
            seen.add(edge)
            patches = getattr(edge, "wanted", None)
            if patches is None:
                ahead.append(edge)
            elif max(patches) > 1:
                return type(node).__name__
    return None


def _patches(node: Any, shape: Shape) -> Patches | None:
    """The patches a node wants for its output of this shape; None for unknown."""
    own: Patches | None = getattr(node, "wanted", None)
    if own is None:
        look = _LOOK_THROUGH.get(type(node).__name__)
        own = look(node, shape) if look else None
    return None if own is None or len(own) != len(shape) else own


def _common(node: Any, shape: Shape) -> Patches | None:
    """Gradients pass unchanged to every input: the finest of what they want."""
    result: Patches | None = None
    for edge, _ in node.next_functions:
        if edge is None:  # an input that needs no gradient
            continue
        patches = _patches(edge, shape)
        if patches is None:
            return None
        result = patches if result is None else common_patches(shape, result, patches)
    return result


def _along(node: Any, shape: Shape) -> Patches | None:
    """Parts of a dimension have the patches of the whole only where that dimension has none."""
    whole = tuple(getattr(node, "_saved_self_sym_sizes", shape))
    patches = _common(node, whole)
    return None if patches is None or patches[_signed(node._saved_dim)] != 1 else patches


def _permuted(node: Any, shape: Shape) -> Patches | None:
    dims = [d % len(shape) for d in node._saved_dims]
    patches = _common(node, tuple(shape[dims.index(d)] for d in range(len(shape))))
    return None if patches is None else tuple(patches[d] for d in dims)


def _transposed(node: Any, shape: Shape) -> Patches | None:
    a, b = (_signed(d) for d in (node._saved_dim0, node._saved_dim1))
    patches = _common(node, _swapped(shape, a, b))
    return None if patches is None else _swapped(patches, a, b)


def _swapped(numbers: tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    swapped = list(numbers)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return tuple(swapped)


def _viewed(node: Any, shape: Shape) -> Patches | None:
    """A view that regroups leading dimensions and leaves the pooled ones as they are (channel shuffle)."""
    before = tuple(node._saved_self_sym_sizes)
    patches = _common(node, before)
    if patches is None or max(patches) == 1:
        return None
    first = next(d for d, p in enumerate(patches) if p > 1)
    tail = len(before) - first
    if len(shape) < tail or shape[-tail:] != before[-tail:]:
        return None
    return (1,) * (len(shape) - tail) + patches[first:]


def _signed(number: int) -> int:
    """autograd shows a negative dimension as an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number


_PASS_COEFFICIENTS = {"AddBackward0", "AliasBackward0", "CloneBackward0", "PermuteBackward0"}

_LOOK_THROUGH: dict[str, Callable[[Any, Shape], Patches | None]] = {
    "AddBackward0": _common,
    "SubBackward0": _common,
    "MulBackward0": _common,
    "DivBackward0": _common,
    "NegBackward0": _common,
    "RsubBackward1": _common,
    "CatBackward0": _along,
    "SliceBackward0": _along,
    "SplitBackward0": _along,
    "SplitWithSizesBackward0": _along,
    "AliasBackward0": _common,
    "CloneBackward0": _common,
    "ToCopyBackward0": _common,
    "ViewBackward0": _viewed,
    "UnsafeViewBackward0": _viewed,
    "ReshapeAliasBackward0": _viewed,
    "PermuteBackward0": _permuted,
    "TransposeBackward0": _transposed,
}
