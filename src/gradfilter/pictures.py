"""A batch of pictures from a folder, for commands that look at a model with the user's own data."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from .errors import GradFilterError
from .models._torchvision import torchvision

__all__ = ["batch_from_folder"]

# what torchvision's and timm's ImageNet networks expect
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def batch_from_folder(folder: str | os.PathLike[str], count: int, size: int) -> tuple[Tensor, Tensor]:
    """``count`` pictures, spread evenly over a folder that has one folder per class, and their classes."""
    if not Path(folder).is_dir():
        raise GradFilterError(f"{folder} is not a folder; give one that has a folder of pictures per class.")
    vision = torchvision()
    transforms = vision.transforms
    steps = [
        transforms.Resize(size),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    try:
        found = vision.datasets.ImageFolder(folder, transforms.Compose(steps))
    except FileNotFoundError as error:  # its message tells which classes have no pictures
        raise GradFilterError(f"{folder} must have a folder of pictures per class: {error}") from error
    samples = [found[i * len(found) // count] for i in range(count)]
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
