"""Oxford Flowers-102. The official training and validation parts, ten pictures a class each, both train."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import GradFilterError
from ..models._torchvision import torchvision
from .matlab import read_mat
from .request import Request, check_labels
from .samples import Data, Pictures

__all__ = ["has_flowers", "open_flowers"]


def has_flowers(path: Path) -> bool:
    return (_root(path) / "setid.mat").is_file()


def _root(path: Path) -> Path:
    inside = path / "flowers-102"  # as torchvision unpacks it
    return inside if inside.is_dir() else path


def open_flowers(request: Request) -> Data:
    root = _root(request.path)
    classes = tuple(torchvision().datasets.Flowers102.classes)
    parts, labels = read_mat(root / "setid.mat"), read_mat(root / "imagelabels.mat")["labels"].ravel()
    check_labels(labels.astype(np.int64) - 1, len(classes), root / "imagelabels.mat")
    sides = []
    for names in (("trnid", "valid"), ("tstid",)):
        numbers = np.concatenate([parts[name].ravel() for name in names]).astype(np.int64)
        if numbers.min() < 1 or numbers.max() > len(labels):
            raise GradFilterError(
                f"{root / 'setid.mat'} names pictures that imagelabels.mat has no label for."
            )
        files = [root / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
        sides.append(Pictures([(f, int(labels[n - 1]) - 1) for f, n in zip(files, numbers, strict=True)]))
    return Data("flowers102", "classify", classes, *sides)
