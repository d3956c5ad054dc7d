"""Gradient filtering; tests/test_conv_oracle.py has many more of its shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradfilter as gf
from oracle import Gradients, conv_gradients

from . import Problem, Sample


def filtered(problem: Problem, patch: int, taps: str, input_gradient: str) -> Gradients:
    p, sides = problem, (patch,) * len(problem.layer.kernel)
    return conv_gradients(p.layer, p.x, p.w, p.g, sides, taps, input_gradient)


SETTINGS: list[tuple[int, Any, Any]] = [
    (2, "overlap", "coarse"),
    (3, "collapse", "coarse"),
    (2, "overlap", "exact"),
]
SAMPLES = [
    Sample(gf.GradientFilter(*s), partial(filtered, patch=s[0], taps=s[1], input_gradient=s[2]))
    for s in SETTINGS
]
