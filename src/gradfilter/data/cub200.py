"""Caltech-UCSD Birds 200 (2011), with its official split."""

from __future__ import annotations

from pathlib import Path

from ..errors import GradFilterError
from .request import Request, read_lines
from .samples import Data, Pictures

__all__ = ["has_cub", "open_cub"]


def has_cub(path: Path) -> bool:
    return (_root(path) / "train_test_split.txt").is_file() and (_root(path) / "images.txt").is_file()


def _root(path: Path) -> Path:
    inside = path / "CUB_200_2011"  # as the archive unpacks
    return inside if inside.is_dir() else path


def open_cub(request: Request) -> Data:
    root = _root(request.path)
    names = _table(root / "classes.txt")
    classes = [names[number] for number in sorted(names, key=int)]
    labels, trains = _table(root / "image_class_labels.txt"), _table(root / "train_test_split.txt")
    sides: tuple[list[tuple[Path, int]], list[tuple[Path, int]]] = [], []
    for number, name in _table(root / "images.txt").items():
        if number not in labels or number not in trains or labels[number] not in names:
            raise GradFilterError(f"{root / 'images.txt'} names {name}, which has no known label or split.")
        label = classes.index(names[labels[number]])
        sides[trains[number] != "1"].append((root / "images" / name, label))
    return Data("cub200", "classify", tuple(_readable(name) for name in classes), *map(Pictures, sides))


def _table(file: Path) -> dict[str, str]:
    """Lines of a number, a blank and a value."""
    return dict(line.split(maxsplit=1) for line in read_lines(file))


def _readable(name: str) -> str:
    """Without the number in front.

    >>> _readable("001.Black_footed_Albatross")
    'Black footed Albatross'
    """
    return name.partition(".")[2].replace("_", " ") or name
