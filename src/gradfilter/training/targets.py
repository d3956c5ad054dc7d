"""Targets of a batch: classes as whole numbers, in the range that there is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import GradFilterError
from .settings import shown

__all__ = ["labels_in", "masks_in"]

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def labels_in(targets: Any, classes: int, ignore: int | None = None) -> Tensor:
    """The labels of a batch as int64, if each is a class, or ``ignore``.

    >>> labels_in(torch.tensor([0, 5]), 2)
    Traceback (most recent call last):
    gradfilter.errors.GradFilterError: A label is 5, but there are 2 classes, 0 to 1; correct the ...
    """
    labels = _whole(targets, range(1, 2), "A label must be one whole number")
    for label in _outside(labels, classes, ignore):
        raise GradFilterError(
            f"A label is {label}, but there are {classes} classes, 0 to {classes - 1}; correct the labels, "
            "or give task and model as many classes as there are."
        )
    return labels


def masks_in(targets: Any, classes: int, ignore: int) -> Tensor:
    """The masks of a batch as int64, if each pixel is of a class, or ``ignore``."""
    masks = _whole(targets, range(2, 6), "A mask must be a tensor (H, W) of whole numbers")
    for label in _outside(masks, classes, ignore):
        raise GradFilterError(
            f"A mask has {label}, but there are {classes} classes, 0 to {classes - 1}, and {ignore} for "
            "pixels that do not count; correct the masks, or give task and model as many classes as there "
            "are."
        )
    return masks


def _whole(targets: Any, dims: range, wanted: str) -> Tensor:
    if not isinstance(targets, Tensor) or targets.dtype not in _WHOLE or targets.dim() not in dims:
        raise GradFilterError(f"{wanted}, not {_first_of(targets)}.")
    return targets.long()


def _outside(found: Tensor, classes: int, ignore: int | None) -> list[int]:
    """One that is no class, if there are some."""
    wrong = (found < 0) | (found >= classes)
    if ignore is not None:
        wrong &= found != ignore
    return found[wrong][:1].tolist() if wrong.any() else []


def _first_of(targets: Any) -> str:
    if isinstance(targets, Tensor):
        kind, shape = str(targets.dtype).removeprefix("torch."), tuple(targets.shape[1:])
        return f"{kind} of shape {shape}" if shape else kind
    return shown(targets[0] if isinstance(targets, list | tuple) and targets else targets)
