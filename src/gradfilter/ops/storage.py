"""How kept tensors are stored until the backward: as they are, or in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["STORES", "Store", "packed", "unpacked"]

Store = Literal["same", "bf16"]
STORES = ("same", "bf16")


def packed(tensors: Sequence[Tensor], store: Store) -> list[Tensor]:
    """The tensors as they are to be kept.

    >>> [t.dtype for t in packed([torch.zeros(2), torch.zeros(2, dtype=torch.uint8)], "bf16")]
    [torch.bfloat16, torch.uint8]
    """
    if store == "same":
        return list(tensors)
    return [t.bfloat16() if t.is_floating_point() else t for t in tensors]


def unpacked(tensors: Sequence[Tensor], store: Store, dtype: torch.dtype) -> list[Tensor]:
    """The tensors again, in the dtype of the backward."""
    if store == "same":
        return list(tensors)
    return [t.to(dtype) if t.is_floating_point() else t for t in tensors]
