"""How kept tensors are stored until the backward: as they are, or in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .blocks import Blocks, Encoded, Layout, decode, encode

__all__ = ["STORES", "Store", "packed", "unpacked"]

Store = Literal["same", "bf16", "int8"] | Blocks
STORES = ("same", "bf16", "int8")  # by name; int8 is Blocks()

Layouts = list[Layout | None]  # by tensor that was to be kept; None where one is kept as one


def packed(
    tensors: Sequence[Tensor], store: Store, memory: dict[str, Tensor]
) -> tuple[list[Tensor], Layouts]:
    """The tensors as they are to be kept, and what else ``unpacked`` has to know.

    memory: a layer's, where rounding at random counts its draws.

    >>> kept, _ = packed([torch.zeros(2), torch.zeros(2, dtype=torch.uint8)], "bf16", {})
    >>> [t.dtype for t in kept]
    [torch.bfloat16, torch.uint8]
    """
    blocks = _blocks(store)
    kept: list[Tensor] = []
    layouts: Layouts = []
    for tensor in tensors:
        layout = None
        if store == "same" or not tensor.is_floating_point():
            kept.append(tensor)
        elif blocks is None:
            kept.append(tensor.bfloat16())
        else:
            *parts, layout = encode(tensor, blocks, _next_draw(memory))
            kept += parts
        layouts.append(layout)
    return kept, layouts


def unpacked(tensors: Sequence[Tensor], store: Store, layouts: Layouts, dtype: torch.dtype) -> list[Tensor]:
    """The tensors again, in the dtype of the backward."""
    if store == "same":
        return list(tensors)
    blocks, left = _blocks(store), iter(tensors)
    found = []
    for layout in layouts:
        tensor = next(left)
        if blocks is not None and layout is not None:
            tensor = decode(Encoded(tensor, next(left), layout), blocks, dtype)
        found.append(tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return found


def _blocks(store: Store) -> Blocks | None:
    return Blocks() if store == "int8" else store if isinstance(store, Blocks) else None


def _next_draw(memory: dict[str, Tensor]) -> int:
    """A number that is never given twice: not to a layer called twice in a step, nor after a resume."""
    draw = int(memory["draws"]) if "draws" in memory else 0
    memory["draws"] = torch.tensor(
        draw + 1, device="cpu"
    )  # a new tensor: states already saved stay as they are
    return draw
