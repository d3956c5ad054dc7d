"""The first call of subspace iteration: one step from the documented random start."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

import gradfilter as gf

from . import Array, Sample, exact
from ._low_rank import onto, unfolded, with_seen_input


def first_step(x: Array, rank: int) -> Array:
    factors = [np.linalg.svd(unfolded(x, 0), full_matrices=False)[0][:, :rank]]
    for mode in range(1, x.ndim):
        rows = unfolded(x, mode)
        columns = min(rank, *rows.shape)
        random = torch.Generator().manual_seed(len(rows))
        start = torch.randn(len(rows), columns, generator=random, dtype=torch.float64).numpy()
        factors.append(np.linalg.qr(rows @ (rows.T @ start))[0])
    return onto(x, factors)


SAMPLES = [
    *(
        Sample(gf.SubspaceIteration(k), with_seen_input(partial(first_step, rank=k)), tolerance=1e-8)
        for k in (1, 2)
    ),
    Sample(gf.SubspaceIteration(100), exact),
]
