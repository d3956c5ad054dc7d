"""Several processes that train one model: each takes its share of every step, gradients are added up.

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
    "Share",
    "add_up_",
    "added_up",
    "any_of",
    "from_first",
    "from_process",
    "is_first",
    "my_shares",
    "rank",
    "settle",
    "together",
    "whole",
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


class Share(NamedTuple):
    """What a process takes of one batch of a step.

    number: of the batch in its step
    batch: the indices of all its samples
    rows: which of them are this process's
    counts: False for a stand-in
    """

    number: int
    batch: Tensor
    rows: Tensor
    counts: bool = True

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == len(self.batch)


def whole(step: Sequence[Tensor]) -> list[Share]:
    """All of the batches of a step."""
    return [Share(n, batch, torch.arange(len(batch))) for n, batch in enumerate(step)]


def my_shares(step: Sequence[Tensor], accumulate: int) -> list[Share]:
    """This process's part of the batches of a step, of which a full one has ``accumulate``.

    Whole batches if every process gets as many: then no sum within a batch differs from one process's.
    Else some samples of every batch. A process that would have none takes a batch that does not count: all
    of them take every step.
    """
    if accumulate % together() == 0:
        mine = whole(step)[rank() :: together()]
    else:
        rows = (torch.arange(len(batch))[rank() :: together()] for batch in step)
        mine = [Share(n, batch, r) for n, (batch, r) in enumerate(zip(step, rows, strict=True)) if len(r)]
    return mine or [whole(step)[0]._replace(counts=False)]


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
