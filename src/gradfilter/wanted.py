"""On which grid does the layer that made a tensor want its gradient?

Layers of a region answer through their autograd node (``node.wanted``, the patches of their output). Nodes of
plain torch operators that only pass gradients on are looked through. Anything else wants the dense gradient,
so a coarse gradient never reaches a node that would not expect it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from torch import Tensor

from .grid import Grid

__all__ = ["wanted_grid"]

Patches = tuple[int, ...]


def wanted_grid(x: Tensor) -> Grid:
    """The grid on which the gradient of ``x`` is wanted; dense where its origin is unknown."""
    patches = _patches(x.grad_fn) if x.grad_fn is not None else None
    shape = tuple(x.shape)
    if patches is None or len(patches) != len(shape):
        return Grid.dense(shape)
    return Grid.of(shape, patches)


def _patches(node: Any) -> Patches | None:
    """The patches a node wants for its output; None for unknown."""
    own: Patches | None = getattr(node, "wanted", None)
    if own is not None:
        return own
    look = _LOOK_THROUGH.get(type(node).__name__)
    return look(node) if look else None


def _common(node: Any) -> Patches | None:
    """Gradients pass unchanged to every input: the finest of what they want."""
    result: Patches | None = None
    for edge, _ in node.next_functions:
        if edge is None:  # an input that needs no gradient
            continue
        patches = _patches(edge)
        if patches is None or (result is not None and len(result) != len(patches)):
            return None
        result = patches if result is None else tuple(map(gcd, result, patches))
    return result


def _permuted(node: Any) -> Patches | None:
    patches = _common(node)
    if patches is None:
        return None
    return tuple(patches[d % len(patches)] for d in node._saved_dims)


def _transposed(node: Any) -> Patches | None:
    patches = _common(node)
    if patches is None:
        return None
    swapped = list(patches)
    a, b = (_signed(d) % len(swapped) for d in (node._saved_dim0, node._saved_dim1))
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return tuple(swapped)


def _viewed(node: Any) -> Patches | None:
    """A view that regroups leading dimensions and leaves the pooled ones as they are (channel shuffle)."""
    patches = _common(node)
    if patches is None or max(patches) == 1:
        return None
    first = next(d for d, p in enumerate(patches) if p > 1)
    before, after = tuple(node._saved_self_sym_sizes), tuple(node._input_metadata[0].shape)
    tail = len(before) - first
    if len(after) < tail or after[-tail:] != before[-tail:]:
        return None
    return (1,) * (len(after) - tail) + patches[first:]


def _signed(number: int) -> int:
    """autograd shows a negative dimension as an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number


_LOOK_THROUGH: dict[str, Callable[[Any], Patches | None]] = {
    "AddBackward0": _common,
    "SubBackward0": _common,
    "MulBackward0": _common,
    "DivBackward0": _common,
    "CatBackward0": _common,
    "SliceBackward0": _common,
    "SplitBackward0": _common,
    "AliasBackward0": _common,
    "CloneBackward0": _common,
    "ToCopyBackward0": _common,
    "ViewBackward0": _viewed,
    "UnsafeViewBackward0": _viewed,
    "PermuteBackward0": _permuted,
    "TransposeBackward0": _transposed,
}
