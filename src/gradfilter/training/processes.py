"""Several processes that train one model: who they are, and what they tell each other.

Without ``torch.distributed`` there is one process, and nothing here costs anything.
"""

from __future__ import annotations

import math
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
    "is_plain",
    "rank",
    "settle",
    "together",
]

T = TypeVar("T")
_ALIGNED = 64  # as torch lays out what it allocates


def together() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if together() > 1 else 0


def is_first() -> bool:
    """Whether this is the process that writes and tells."""
    return rank() == 0


def added_up(*numbers: float) -> list[float]:
    """The sums of the processes' numbers, one by one."""
    if together() == 1:
        return list(numbers)
    totals = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(totals)
    return [float(total) for total in totals]


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
    offset: int  # from a border of _ALIGNED bytes: what lies otherwise may be added up in another order

    @property
    def span(self) -> int:
        """The bytes from its first number to its last one, with those in between that are not its own."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize if math.prod(self.shape) else 0

    @property
    def room(self) -> int:
        """The bytes it takes in a message."""
        return -(-(self.offset + self.span) // _ALIGNED) * _ALIGNED

    def bytes_in(self, room: Tensor) -> Tensor:
        return room[self.offset : self.offset + self.span]


def from_process(owner: int, values: Sequence[Any]) -> Sequence[Any]:
    """The values that one of the processes has, for all; tensors laid out in memory as they are there."""
    if together() == 1:
        return values
    is_owner = rank() == owner
    told = _told(owner, [_form_or_value(value) for value in values] if is_owner else [])
    forms = [form for form in told if isinstance(form, _Form)]
    rooms = [form.room for form in forms]
    message = torch.empty(sum(rooms), dtype=torch.uint8)
    parts = [form.bytes_in(room) for form, room in zip(forms, message.split(rooms), strict=True)]
    if is_owner:
        tensors = (value for value, form in zip(values, told, strict=True) if isinstance(form, _Form))
        for part, form, tensor in zip(parts, forms, tensors, strict=True):
            numbers = form.span // form.dtype.itemsize
            part.copy_(tensor.detach().as_strided((numbers,), (1,)).view(torch.uint8))
    if message.numel():
        dist.broadcast(message, owner)
    if is_owner:
        return list(values)
    received = (p.view(f.dtype).as_strided(f.shape, f.stride) for f, p in zip(forms, parts, strict=True))
    return [next(received) if isinstance(value, _Form) else value for value in told]


def is_plain(value: Any) -> bool:
    """Whether it is a tensor whose numbers lie in memory as they are."""
    is_strided = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
    is_as_it_lies = is_strided and not (value.is_quantized or value.is_conj() or value.is_neg())
    return is_as_it_lies and not (value.is_nested or value.data_ptr() % value.dtype.itemsize)


def _form_or_value(value: Any) -> Any:
    if not is_plain(value):
        return value
    return _Form(tuple(value.shape), value.stride(), value.dtype, value.data_ptr() % _ALIGNED)


def _told(owner: int, value: T) -> T:
    if together() == 1:
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told, owner)
    return told[0]  # type: ignore[no-any-return]
