"""Cityscapes with fine masks: the 19 classes that count; tested on the official validation part."""

from __future__ import annotations

from pathlib import Path

from ..errors import GradFilterError
from ..models._torchvision import torchvision
from .images import class_ids
from .request import Request
from .samples import Data, Masked

__all__ = ["has_cityscapes", "open_cityscapes"]


def has_cityscapes(path: Path) -> bool:
    unpacked = (path / "leftImg8bit" / "train").is_dir() and (path / "gtFine").is_dir()
    return unpacked or (path / "leftImg8bit_trainvaltest.zip").is_file()


def open_cityscapes(request: Request) -> Data:
    reader = torchvision().datasets.Cityscapes
    known = [kind for kind in reader.classes if kind.id >= 0]
    counted = sorted(
        (kind for kind in known if kind.train_id not in (-1, 255)), key=lambda kind: kind.train_id
    )
    ids = class_ids(len(counted), request.ignore, {kind.id: kind.train_id for kind in known})
    sides = []
    for split in ("train", "val"):
        try:
            found = reader(str(request.path), split=split, mode="fine", target_type="semantic")
        except (RuntimeError, OSError) as error:
            raise GradFilterError(
                f"{request.path} needs leftImg8bit/{split} and gtFine/{split}, or their zip files ({error})."
            ) from error
        pairs = sorted(
            (Path(image), Path(mask)) for image, (mask,) in zip(found.images, found.targets, strict=True)
        )
        sides.append(Masked(pairs, ids))
    return Data("cityscapes", "segment", tuple(kind.name for kind in counted), *sides)
