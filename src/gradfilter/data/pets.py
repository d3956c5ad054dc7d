"""Oxford-IIIT Pet: 37 breeds, or pet, background and border of every pixel."""

from __future__ import annotations

from pathlib import Path

from ..errors import GradFilterError
from .images import class_ids
from .request import Request, read_lines
from .samples import Data, Masked, Pictures

__all__ = ["has_pets", "open_pets"]

_PARTS = ("pet", "background", "border")


def has_pets(path: Path) -> bool:
    return (_root(path) / "annotations" / "trainval.txt").is_file()


def _root(path: Path) -> Path:
    inside = path / "oxford-iiit-pet"  # as torchvision unpacks it
    return inside if inside.is_dir() else path


def open_pets(request: Request) -> Data:
    root, breeds = _root(request.path), dict[int, str]()
    sides: list[list[tuple[str, int]]] = []
    for split in ("trainval", "test"):
        file, side = root / "annotations" / f"{split}.txt", []
        for line in read_lines(file):
            stem, label, *_ = line.split()
            if not 1 <= int(label) <= 37:
                raise GradFilterError(f"{file} has the label {label}, out of range: breeds are 1 to 37.")
            breeds[int(label) - 1] = stem.rpartition("_")[0].replace("_", " ")
            side.append((stem, int(label) - 1))
        sides.append(side)
    if request.task == "segment":
        ids = class_ids(3, request.ignore, {1: 0, 2: 1, 3: 2})
        trimaps = root / "annotations" / "trimaps"
        masked = [
            Masked([(root / "images" / f"{stem}.jpg", trimaps / f"{stem}.png") for stem, _ in side], ids)
            for side in sides
        ]
        return Data("pets", "segment", _PARTS, *masked)
    classes = tuple(breeds.get(label, f"breed {label + 1}") for label in range(max(breeds) + 1))
    labelled = [
        Pictures([(root / "images" / f"{stem}.jpg", label) for stem, label in side]) for side in sides
    ]
    return Data("pets", "classify", classes, *labelled)
