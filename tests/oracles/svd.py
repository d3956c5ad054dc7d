"""Truncated singular value decomposition of a batch."""

from __future__ import annotations

from functools import partial

import numpy as np

import gradfilter as gf

from . import Array, Sample, exact
from ._low_rank import unfolded, with_seen_input


def truncated(x: Array, variance: float) -> Array:
    left, values, right = np.linalg.svd(unfolded(x, 0), full_matrices=False)
    explained = np.cumsum(values**2) / np.sum(values**2)
    rank = int(np.argmax(explained >= variance)) + 1
    if rank * (left.shape[0] + right.shape[1]) >= x.size:
        return x
    return (left[:, :rank] * values[:rank] @ right[:rank]).reshape(x.shape)


SAMPLES = [
    *(Sample(gf.SVD(v), with_seen_input(partial(truncated, variance=v))) for v in (0.8, 0.4)),
    Sample(gf.SVD(1.0), exact),
]
