"""MNIST and its relatives: four idx files, gzipped or not; Debian's packages are found by themselves."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GradFilterError
from ..models._torchvision import torchvision
from .request import Request, check_labels
from .samples import Arrays, Data

__all__ = ["has_idx", "open_fashion_mnist", "open_mnist"]

_BYTES = 8  # the idx format's number for unsigned bytes
_PLACES = ("", "raw", "MNIST/raw", "FashionMNIST/raw")  # the latter as torchvision unpacks them


def has_idx(path: Path) -> bool:
    return path.is_dir() and _folder(path) is not None


def open_mnist(request: Request) -> Data:
    return _open(request, "mnist", tuple("0123456789"), flip=False)


def open_fashion_mnist(request: Request) -> Data:
    return _open(request, "fashion-mnist", tuple(torchvision().datasets.FashionMNIST.classes), flip=True)


def _open(request: Request, name: str, classes: tuple[str, ...], flip: bool) -> Data:
    folder = _folder(request.path)
    if folder is None:
        raise GradFilterError(f"{request.path} has no train-images-idx3-ubyte(.gz), so it is not {name}.")
    train, test = (_side(folder, side, len(classes)) for side in ("train", "t10k"))
    return Data(name, "classify", classes, train, test, flip=flip)


def _folder(path: Path) -> Path | None:
    return next((path / place for place in _PLACES if _find(path / place, "train-images-idx3-ubyte")), None)


def _find(folder: Path, name: str) -> Path | None:
    names = name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz"
    return next((folder / each for each in names if (folder / each).is_file()), None)


def _side(folder: Path, side: str, classes: int) -> Arrays:
    images, labels = (
        _read(folder, f"{side}-images-idx3-ubyte", 3),
        _read(folder, f"{side}-labels-idx1-ubyte", 1),
    )
    if len(images) != len(labels):
        raise GradFilterError(f"{folder} has {len(images)} {side} pictures, but {len(labels)} labels.")
    check_labels(labels, classes, folder / f"{side}-labels-idx1-ubyte")
    return Arrays(images, labels.astype(np.int64))


def _read(folder: Path, name: str, dimensions: int) -> Any:
    file = _find(folder, name)
    if file is None:
        raise GradFilterError(f"{folder / name} is missing (with or without .gz).")
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if content[:4] != bytes([0, 0, _BYTES, dimensions]):
            raise ValueError(f"it does not begin as idx of bytes in {dimensions} dimensions does")
        start = 4 + 4 * dimensions
        shape = np.frombuffer(content[4:start], ">u4").tolist()
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise GradFilterError(f"{file} is damaged ({error}); fetch it again.") from error
