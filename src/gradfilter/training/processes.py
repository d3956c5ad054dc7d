"""Several processes that train one model: each takes its share of every batch, gradients are added up.

Without ``torch.distributed`` there is one process, and nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["add_up_", "added_up", "any_of", "from_first", "is_first", "my_share", "together"]

T = TypeVar("T")


def together() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the process that writes and tells."""
    return together() == 1 or dist.get_rank() == 0


def my_share(indices: Tensor) -> Tensor:
    """Those of a batch's samples that are this process's, maybe none; the shares of all make up the batch."""
    return indices if together() == 1 else indices[dist.get_rank() :: together()]


def add_up_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in one message."""
    if together() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def added_up(number: float) -> float:
    """The sum of the processes' numbers."""
    if together() == 1:
        return number
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def any_of(*flags: bool) -> list[bool]:
    """Whether any process says so, flag by flag: what one of them does alone, the others would wait for."""
    if together() == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int64)
    dist.all_reduce(votes)
    return [bool(vote) for vote in votes]


def from_first(value: T) -> T:
    """What the first process has found, for all."""
    if together() == 1:
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told)
    return told[0]  # type: ignore[no-any-return]
