"""Random numbers for a while, and then the caller's own again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The random numbers of torch, random and, where it is in use, numpy, put back afterwards.

    >>> with seeded(7):
    ...     first = torch.rand(1), random.random()
    >>> with seeded(7):
    ...     first == (torch.rand(1), random.random())
    True
    """
    numpy = sys.modules.get("numpy")
    kept = torch.default_generator.get_state(), random.getstate()
    arrays = None if numpy is None else numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept[0])
        random.setstate(kept[1])
        if numpy is not None:
            numpy.random.set_state(arrays)
