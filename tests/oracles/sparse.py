"""Sparse updates: the weight gradient of the chosen input channels, and zeros."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gradfilter as gf
from oracle import Gradients

from . import Array, Oracle, Problem, Sample, exact

Choice = Callable[[Array], set[int]]  # from the size of each channel's weights


def sparse(choose: Choice) -> Oracle:
    def oracle(problem: Problem) -> Gradients:
        p, found = problem, exact(problem)
        groups, inputs = p.layer.groups, p.x.shape[1 if p.x.ndim == len(p.layer.kernel) + 2 else 0]
        of_group = inputs // groups
        sizes = np.zeros(of_group)
        for channel in range(inputs if p.layer.transposed else of_group):
            weights = p.w[channel] if p.layer.transposed else p.w[:, channel]
            sizes[channel % of_group] += np.abs(weights).sum()
        chosen, w = choose(sizes), found.w.copy()
        for channel in range(inputs if p.layer.transposed else of_group):
            if channel % of_group not in chosen:
                w[(channel,) if p.layer.transposed else (slice(None), channel)] = 0
        remembered = p.memory.get("channels")
        assert remembered is None or set(remembered.tolist()) == chosen
        return Gradients(found.x, w, found.b)

    return oracle


def largest(fraction: float) -> Choice:
    def choose(sizes: Array) -> set[int]:
        count = max(1, round(fraction * len(sizes)))
        return set(np.argsort(-sizes)[:count].tolist())

    return choose


def last(count: int) -> Choice:
    return lambda sizes: set(range(max(0, len(sizes) - count), len(sizes)))


SAMPLES = [
    Sample(gf.SparseUpdate(0.5), sparse(largest(0.5))),
    Sample(gf.SparseUpdate(2, "last"), sparse(last(2))),
    Sample(gf.SparseUpdate((0,)), sparse(lambda sizes: {0})),
    Sample(gf.SparseUpdate(1.0, "random"), exact),
]
