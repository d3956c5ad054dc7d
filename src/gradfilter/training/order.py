"""The order in which samples are seen: a pure function of (seed, epoch), so that nothing need be saved."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["batches", "random_seed"]


def random_seed(*parts: int | str) -> int:
    """A seed for torch's generators that depends on all the parts, and hardly ever is that of others.

    >>> random_seed(0, "augment", 3, 7) == random_seed(0, "augment", 3, 7) != random_seed(0, "augment", 37)
    True
    """
    text = "|".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def batches(count: int, batch: int, seed: int, epoch: int) -> list[Tensor]:
    """The indices of one epoch's batches, shuffled.

    >>> [b.tolist() for b in batches(5, 2, seed=0, epoch=0)]
    [[2, 3], [4, 1], [0]]
    """
    generator = torch.Generator().manual_seed(random_seed(seed, "order", epoch))
    return list(torch.randperm(count, generator=generator).split(batch))
