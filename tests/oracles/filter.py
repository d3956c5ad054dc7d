"""Gradient filtering; tests/test_conv_oracle.py has many more of its shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradfilter as gf
from oracle import Gradients, conv_gradients

from . import Problem, Sample
from .exact import exact


def filtered(
    problem: Problem,
    patch: int,
    taps: str = "overlap",
    input_gradient: str = "coarse",
    weight_patch: int | None = None,
    weight_taps: str | None = None,
) -> Gradients:
    """Each gradient by definition with the patches and taps of its own."""
    p, axes = problem, len(problem.layer.kernel)
    of_x = conv_gradients(p.layer, p.x, p.w, p.g, (patch,) * axes, taps, input_gradient)
    of_w = conv_gradients(p.layer, p.x, p.w, p.g, (weight_patch or patch,) * axes, weight_taps or taps)
    return Gradients(of_x.x, of_w.w, of_x.b)


SETTINGS: list[dict[str, Any]] = [
    {"patch": 2},
    {"patch": 3, "taps": "collapse"},
    {"patch": 2, "input_gradient": "exact"},
    {"patch": 2, "weight_patch": 4, "weight_taps": "collapse"},
    {"patch": 3, "weight_patch": 2, "input_gradient": "exact"},
]
SAMPLES = [Sample(gf.GradientFilter(**settings), partial(filtered, **settings)) for settings in SETTINGS]
SAMPLES += [Sample(gf.GradientFilter(patch=1), exact)]
