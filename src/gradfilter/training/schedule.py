"""The learning rate as a pure function of how far a training has come."""

from __future__ import annotations

import math

__all__ = ["rate_at"]


def rate_at(
    step: int, steps: int, warmup: int, peak: float, shape: str = "cosine", end: float = 0.0
) -> float:
    """A line up from a small part of ``peak`` over the warm-up steps, then a cosine to ``end``, or ``peak``.

    >>> [round(rate_at(step, steps=8, warmup=2, peak=1.0), 3) for step in (0, 1, 2, 5, 7)]
    [0.5, 1.0, 1.0, 0.5, 0.067]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    return end + (peak - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
