"""What low-rank methods do to an input, by numpy's full singular value decompositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from oracle import Gradients, _along, _batched, _explicit_padding, conv_gradients

from . import Array, Oracle, Problem, exact

__all__ = ["directions", "onto", "unfolded", "with_seen_input"]


def with_seen_input(change: Callable[[Array], Array]) -> Oracle:
    """The weight gradient sees a changed input; changed is what the layer sees, with any padding by mode."""

    def oracle(problem: Problem) -> Gradients:
        p, plain = problem, exact(problem)
        if p.x.size == 0:
            return plain
        seen, layer, _ = _explicit_padding(p.layer, _batched(p.x, p.layer))
        g = _batched(p.g, p.layer)
        return Gradients(plain.x, conv_gradients(layer, change(seen), p.w, g, p.dense).w, plain.b)

    return oracle


def unfolded(x: Array, mode: int) -> Array:
    return np.moveaxis(x, mode, 0).reshape(x.shape[mode], -1)


def directions(x: Array, mode: int, variance: float) -> Array:
    """The left singular vectors of an unfolding that explain this share of its energy."""
    left, values, _ = np.linalg.svd(unfolded(x, mode), full_matrices=False)
    explained = np.cumsum(values**2) / np.sum(values**2)
    return left[:, : int(np.argmax(explained >= variance)) + 1]


def onto(x: Array, factors: Sequence[Array]) -> Array:
    """The projection onto what the factors span; the input itself where core and factors are no smaller."""
    elements = prod(f.shape[1] for f in factors) + sum(f.size for f in factors)
    if elements >= x.size:
        return x
    for mode, factor in enumerate(factors):
        x = _along(factor @ factor.T, x, mode)
    return x
