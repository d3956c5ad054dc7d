"""Whether tensors that something was made of are still the same, with the same numbers in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["hold", "state_of"]


def state_of(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Differs when any of them has been replaced or written to, as long as those of before are held.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> state, held = state_of([x]), hold([x])
    >>> state == state_of([x]), state == state_of([x.add_(1)])
    (True, False)
    """
    return [None if t is None else (id(t), t.data_ptr(), t.stride(), _version(t)) for t in tensors]


def hold(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """What to keep beside their state, lest another tensor gets their place in memory, and so their state.

    ``model.half().float()`` does such a thing: the last weights may lie where the first ones did.
    """
    return [part for t in tensors if t is not None for part in (t, t.detach())]


def _version(tensor: Tensor) -> object:
    """How often it was written to. Those made in inference mode do not count that: never twice the same."""
    return object() if tensor.is_inference() else tensor._version
