"""Samples: map-style sets of (picture, label) or (picture, mask), from files or from arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ..errors import GradFilterError
from .images import read_mask, read_picture

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Arrays", "Data", "Masked", "Pictures", "Samples", "Task", "hold_out"]

Task = Literal["classify", "segment"]


class Samples(Protocol):
    """What ``Data`` holds: an RGB picture, and its label or a mask of class ids (mode L) of the same size."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Image.Image, Any]: ...

    def files(self, index: int) -> tuple[Path, ...]:
        """The files that a sample is read from; none if it is in memory."""


@dataclass(frozen=True)
class Data:
    """Training and test samples of one data set.

    Args:
        ignore: the class id of mask pixels that do not count.
        flip: whether a mirrored picture shows the same class; not so for digits.
        held_out: whether the test samples were taken from those for training, as there were no others.
        left_out: a sentence on files that may be pictures, but are not among the samples.
    """

    name: str
    task: Task
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    _: KW_ONLY
    ignore: int = 255
    flip: bool = True
    held_out: bool = False
    left_out: str = ""


@dataclass(frozen=True)
class Pictures:
    """Picture files with a label each."""

    items: Sequence[tuple[Path, int]]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.items[index]
        return read_picture(path), label

    def files(self, index: int) -> tuple[Path, ...]:
        return (self.items[index][0],)

    @property
    def labels(self) -> list[int]:
        return [label for _, label in self.items]


@dataclass(frozen=True)
class Masked:
    """Picture files with a mask file each; ``classes_of`` makes class ids of a mask's values."""

    items: Sequence[tuple[Path, Path]]
    classes_of: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Image.Image, Image.Image]:
        path, mask = self.items[index]
        picture = read_picture(path)
        return picture, read_mask(mask, picture.size, self.classes_of)

    def files(self, index: int) -> tuple[Path, ...]:
        return self.items[index]


@dataclass(frozen=True)
class Arrays:
    """Pictures in memory: uint8 (N, H, W) or (N, H, W, 3), with labels (N) or masks (N, H, W)."""

    images: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        from PIL import Image

        picture = Image.fromarray(np.ascontiguousarray(self.images[index])).convert("RGB")
        if self.targets.ndim == 1:
            return picture, int(self.targets[index])
        return picture, Image.fromarray(np.ascontiguousarray(self.targets[index], np.uint8))

    def files(self, index: int) -> tuple[Path, ...]:
        return ()

    @property
    def labels(self) -> list[int]:
        if self.targets.ndim != 1:
            raise GradFilterError("Samples with masks have no labels.")
        return [int(label) for label in self.targets]


def hold_out(names: Sequence[str], labels: Sequence[Any], part: float, seed: int) -> list[bool]:
    """Which samples are for the test: ``part`` of every class, by names and seed alone.

    Of a class with two samples or more at least one is held out, and at least one stays.

    >>> hold_out(["a1", "a2", "a3", "a4", "b1"], "aaaab", part=0.5, seed=0)
    [True, False, False, True, False]
    """
    if not 0 < part < 1:
        raise GradFilterError(f"holdout must lie between 0 and 1, but is {part}.")
    groups: dict[Any, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    held = [False] * len(names)
    for members in groups.values():
        drawn = sorted(members, key=lambda i: hashlib.blake2b(f"{seed}|{names[i]}".encode()).digest())
        count = min(max(1, round(part * len(members))), len(members) - 1)
        for index in drawn[:count]:
            held[index] = True
    return held
