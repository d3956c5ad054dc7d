"""From pictures, and masks with them, to the tensors that networks take; by torchvision's transforms v2.

All random numbers are torch's, which ``gf.fit`` seeds anew for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import GradFilterError
from ..models._torchvision import library
from ..pictures import MEAN, STD
from .samples import Samples, Task

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["MARGIN", "Transform", "Transformed", "test_transform", "train_transform"]

MARGIN = 1.15  # a picture's shorter side before the crop, by that of the crop
_GREY = [round(255 * mean) for mean in MEAN]  # what normalisation makes 0


def train_transform(
    task: Task, size: int, augment: bool = True, flip: bool = True, ignore: int = 255
) -> Transform:
    """For training: a random crop, mirrored half of the time, its colours changed a little.

    Without ``augment`` it is that of the test. ``flip=False`` is for what must not be mirrored.
    """
    return Transform(task, size, augment, flip, ignore)


def test_transform(task: Task, size: int, ignore: int = 255) -> Transform:  # noqa: PT028  no test
    """For the test: the middle of a picture to classify, all of one to segment, with ``ignore`` beside it."""
    return Transform(task, size, augment=False, ignore=ignore)


test_transform.__test__ = False  # type: ignore[attr-defined]  # pytest: not a test


@dataclass(frozen=True)
class Transform:
    """To a normalised float32 tensor (3, size, size), and the label as it is or the mask as int64."""

    task: Task
    size: int
    augment: bool = False
    flip: bool = True
    ignore: int = 255

    def __post_init__(self) -> None:
        if self.task not in ("classify", "segment"):
            raise GradFilterError(f"task must be classify or segment, not {self.task!r}.")
        if self.size < 1:
            raise GradFilterError(f"size must be at least 1, not {self.size}.")

    def __call__(self, picture: Image.Image, target: Any) -> tuple[Tensor, Any]:
        if self.task == "segment":
            target = _tv_tensors().Mask(_v2().functional.pil_to_tensor(target)[0])
        picture, target = self._geometry(picture, target)
        return _normalised(picture), target.as_subclass(Tensor).long() if self.task == "segment" else target

    def of_picture(self, picture: Image.Image) -> Tensor:
        """A picture without its label or mask."""
        return _normalised(self._geometry(picture, None)[0])

    def _geometry(self, picture: Image.Image, target: Any) -> tuple[Image.Image, Any]:
        if self.augment:
            changed: tuple[Image.Image, Any] = self._random(picture, target)
            return changed
        if self.task == "classify":
            return _middle(picture, self.size), target
        return _whole(picture, target, self.size, self.ignore)

    @cached_property
    def _random(self) -> Any:
        v2 = _v2()
        flip = [v2.RandomHorizontalFlip()] if self.flip else []
        colour = v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)
        if self.task == "classify":
            return v2.Compose([v2.RandomResizedCrop(self.size, scale=(0.35, 1.0)), *flip, colour])
        fill = {_tv_tensors().Mask: self.ignore, "others": _GREY}
        square = (self.size, self.size)
        crop = v2.RandomCrop(square, pad_if_needed=True, fill=fill)
        return v2.Compose([v2.ScaleJitter(square, scale_range=(0.75, 2.0)), crop, *flip, colour])

    def __getstate__(self) -> dict[str, Any]:
        # torchvision's objects are made anew in each process: unpickling them would import it by itself
        return {name: value for name, value in self.__dict__.items() if name != "_random"}


class Transformed(Dataset[tuple[Tensor, Any]]):
    """Samples, transformed when they are read."""

    def __init__(self, samples: Samples, transform: Transform) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.transform(*self.samples[index])


def _normalised(picture: Image.Image) -> Tensor:
    functional = _v2().functional
    image = functional.to_dtype(functional.pil_to_tensor(picture), torch.float32, scale=True)
    normalised: Tensor = functional.normalize(image, MEAN, STD, inplace=True)
    return normalised


def _middle(picture: Image.Image, size: int) -> Image.Image:
    """The middle, but all that a small picture has."""
    functional = _v2().functional
    shorter = round(MARGIN * size) if min(picture.size) > size else size
    cropped: Image.Image = functional.center_crop(functional.resize(picture, [shorter]), [size])
    return cropped


def _whole(picture: Image.Image, mask: Any, size: int, ignore: int) -> tuple[Image.Image, Any]:
    """All of a picture and its mask, if any, as large as a square holds them, in its upper left corner."""
    functional = _v2().functional
    width, height = picture.size
    scale = size / max(width, height)
    shape = [max(1, round(height * scale)), max(1, round(width * scale))]
    border = [0, 0, size - shape[1], size - shape[0]]
    fitted = functional.pad(functional.resize(picture, shape), border, fill=_GREY)
    return fitted, None if mask is None else functional.pad(
        functional.resize(mask, shape), border, fill=ignore
    )


def _v2() -> Any:
    return library("torchvision.transforms.v2", "train")


def _tv_tensors() -> Any:
    return library("torchvision.tv_tensors", "train")
