"""Several processes that train one model: who they are, and what they tell each other.

Without ``torch.distributed`` there is one process, and nothing here costs anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "added_up",
    "any_of",
    "from_first",
    "from_process",
    "is_first",
    "rank",
    "settle",
    "together",
]

T = TypeVar("T")


def together() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if together() > 1 else 0


def is_first() -> bool:
    """Whether this is the process that writes and tells."""
    return rank() == 0


def added_up(*numbers: int) -> list[int]:
    """The sums of the processes' numbers, one by one."""
    if together() == 1:
        return list(numbers)
    totals = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(totals)
    return [int(total) for total in totals]


def any_of(*flags: bool) -> list[bool]:
    """Whether any process says so, flag by flag: what one of them does alone, the others would wait for."""
    return [bool(votes) for votes in added_up(*map(int, flags))]


def settle() -> None:
    """Give gloo's threads time to let go of the last message: a Python that ends before that is aborted."""
    if together() > 1:
        time.sleep(0.1)


def from_first(value: T) -> T:
    """What the first process has found, for all."""
    return _told(0, value)


class _Form(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def from_process(owner: int, values: Sequence[Any]) -> Sequence[Any]:
    """The values that one of the processes has, for all; tensors laid out in memory as they are there."""
    if together() == 1:
        return values
    is_owner = rank() == owner
    told = _told(owner, [_form_or_value(value) for value in values] if is_owner else [])
    if is_owner:
        found = list(values)
    else:
        found = [torch.empty_strided(*t[:2], dtype=t.dtype) if isinstance(t, _Form) else t for t in told]
    for value, form in zip(found, told, strict=True):
        if isinstance(form, _Form) and value.numel():
            dist.broadcast(_memory_of(value), owner)
    return found


def _form_or_value(value: Any) -> Any:
    return _Form(tuple(value.shape), value.stride(), value.dtype) if type(value) is Tensor else value


def _memory_of(tensor: Tensor) -> Tensor:
    """The bytes from its first number to its last one, with those in between that are not its own."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1,), (1,)).view(torch.uint8)


def _told(owner: int, value: T) -> T:
    if together() == 1:
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told, owner)
    return told[0]  # type: ignore[no-any-return]
