"""Gradient filtering in int8, simulated in float64. There is no setting in which it is exact.

Both sides divide by the same scale and round halves to even, so the numbers agree unless a patch mean lies
within rounding of a half, which the usual tolerance would show.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import gradfilter as gf
from oracle import Gradients, conv_gradients, padded_input, patch_mean

from . import Array, Problem, Sample
from .exact import exact


def int8(values: Array, by_row: bool) -> Array:
    """Rounded to 127 steps either way of the largest; a scale for all, or one per row."""
    made = np.empty_like(values)
    for part, out in zip(values, made, strict=True) if by_row else [(values, made)]:
        scale = max(np.abs(part).max(), np.finfo(np.float64).tiny) / 127
        out[...] = np.rint(part / scale) * scale
    return made


def rounded(problem: Problem, patch: int, taps: str, scaling: str) -> Gradients:
    p, plain = problem, exact(problem)
    if p.x.size == 0:
        return plain
    x, layer = padded_input(p.layer, p.x)
    g = p.g if p.g.ndim == x.ndim else p.g[None]
    sides, w = (patch,) * len(layer.kernel), int8(p.w, True)
    x_means = int8(patch_mean(x, layer.in_patch(sides) if patch > 1 else sides), scaling == "sample")
    g_means = int8(patch_mean(g, sides), scaling == "sample")
    of_x = conv_gradients(p.layer, p.x, w, g_means, sides, taps).x
    return Gradients(of_x, conv_gradients(layer, x_means, w, g_means, sides, taps).w, plain.b)


SETTINGS: list[tuple[int, Any, Any]] = [
    (2, "overlap", "tensor"),
    (2, "collapse", "sample"),
    (1, "overlap", "sample"),
    (3, "collapse", "tensor"),
]
SAMPLES = [
    Sample(gf.Int8Gradients(*s), partial(rounded, patch=s[0], taps=s[1], scaling=s[2])) for s in SETTINGS
]
