"""Truncated higher-order singular value decomposition, plain and sequential."""

from __future__ import annotations

from functools import partial

import gradfilter as gf
from oracle import _along

from . import Array, Sample, exact
from ._low_rank import directions, onto, with_seen_input


def plain(x: Array, variance: float) -> Array:
    return onto(x, [directions(x, mode, variance) for mode in range(x.ndim)])


def sequential(x: Array, variance: float) -> Array:
    factors, left = [], x
    for mode in range(x.ndim):
        factors.append(directions(left, mode, variance))
        left = _along(factors[mode].T, left, mode)
    return onto(x, factors)


SAMPLES = [
    *(Sample(gf.HOSVD(v), with_seen_input(partial(plain, variance=v))) for v in (0.7, 0.3)),
    Sample(gf.HOSVD(0.6, sequential=True), with_seen_input(partial(sequential, variance=0.6))),
    Sample(gf.HOSVD(1.0), exact),
]
