"""One file per method, named as in METHODS: ``SAMPLES``, the settings that the conformance tests run.

A sample has an oracle: the gradients, worked out slowly and literally in float64 numpy, without gradfilter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from gradfilter import Method
from oracle import Gradients, Layer, conv_gradients

__all__ = ["Array", "Oracle", "Problem", "Sample", "exact", "with_input"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """One backward. kept and memory: what the method kept, and remembers, for oracles that check those first.

    x, w and g are as a convolution sees them, (N, C, spatial...), of a linear layer too.
    """

    layer: Layer
    x: Array
    w: Array
    g: Array
    kept: list[NDArray[np.generic]] = field(default_factory=list)
    memory: dict[str, Array] = field(default_factory=dict)

    @property
    def dense(self) -> tuple[int, ...]:
        return (1,) * len(self.layer.kernel)


Oracle = Callable[[Problem], Gradients]


@dataclass(frozen=True)
class Sample:
    """A method with settings. tolerance: relative, in float64."""

    method: Method
    oracle: Oracle
    tolerance: float = 1e-10


def exact(problem: Problem) -> Gradients:
    """Exact backpropagation."""
    p = problem
    return conv_gradients(p.layer, p.x, p.w, p.g, p.dense)


def with_input(change: Callable[[Problem], Array]) -> Oracle:
    """The weight gradient sees another input than the layer did; all else is exact."""

    def oracle(problem: Problem) -> Gradients:
        p, plain = problem, exact(problem)
        if p.x.size == 0:
            return plain
        return Gradients(plain.x, conv_gradients(p.layer, change(p), p.w, p.g, p.dense).w, plain.b)

    return oracle


# the file of that name would take the function's place when it is first imported
_function = exact
import_module(f"{__name__}.exact")
exact = _function
