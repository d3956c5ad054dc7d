"""Dropout of processes that share a batch: together they drop what one process would."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..native import is_channels_last
from ..region import region
from .processes import Share, together

__all__ = ["SharedDropout"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class SharedDropout:
    """While it is entered, dropout layers draw for all of a batch, and keep the rows that are theirs.

    share: what this process takes of the batch in the next forward. One process needs none of this.
    """

    def __init__(self, model: nn.Module) -> None:
        self.share: Share | None = None
        self._layers = [m for m in model.modules() if _is_dropout(m)] if together() > 1 else []

    def __enter__(self) -> SharedDropout:
        for layer in self._layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.__dict__["forward"]

    def _forward(self, layer: Any, input: Tensor) -> Tensor:
        x = input  # callers may name it as torch does
        share = self.share
        if share is None or share.is_whole or not layer.training or len(x) != len(share.rows):
            return _plain(layer, x)  # where rows are no samples: to each process its own
        layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        shape = (len(share.batch), *x.shape[1:])
        whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
        noise = _plain(layer, whole.fill_(1.0))
        with region():
            return x * noise.index_select(0, share.rows.to(x.device))


def _is_dropout(module: nn.Module) -> bool:
    """Not one to which its owner gave another forward: that stays."""
    return getattr(module, "gradfilter_base", type(module)) in _DROPOUTS and "forward" not in module.__dict__


def _plain(layer: Any, x: Tensor) -> Tensor:
    made: Tensor = type(layer).forward(layer, x)
    return made
