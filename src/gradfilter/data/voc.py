"""Pascal VOC 2012 segmentation: 20 kinds of objects and background; with the augmented masks if asked for."""

from __future__ import annotations

from pathlib import Path

from ..errors import GradFilterError
from .images import class_ids
from .request import Request, read_lines
from .samples import Data, Masked

__all__ = ["has_voc", "has_voc_aug", "open_voc", "open_voc_aug"]

_CLASSES = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow dining-table dog horse motorbike "
    "person potted-plant sheep sofa train tv-monitor"
)
_AUG_LISTS = ("train_aug.txt", "trainaug.txt")


def has_voc(path: Path) -> bool:
    return (_root(path) / "ImageSets" / "Segmentation" / "train.txt").is_file()


def has_voc_aug(path: Path) -> bool:
    return has_voc(path) and (_root(path) / "SegmentationClassAug").is_dir()


def _root(path: Path) -> Path:
    inside = path / "VOCdevkit" / "VOC2012", path / "VOC2012"
    return next((folder for folder in inside if folder.is_dir()), path)


def open_voc(request: Request) -> Data:
    """The official 1464 training and 1449 validation pictures."""
    lists = _root(request.path) / "ImageSets" / "Segmentation"
    return _open(request, "voc", lists / "train.txt", "SegmentationClass")


def open_voc_aug(request: Request) -> Data:
    """Training on the 10582 pictures that SBD's masks (Hariharan et al. 2011) add up to; tests as ``voc``."""
    root = _root(request.path)
    if not (root / "SegmentationClassAug").is_dir():
        raise GradFilterError(
            f"{root / 'SegmentationClassAug'} is missing: put the augmented masks there, or use voc:PATH."
        )
    places = [root / "ImageSets" / "Segmentation" / name for name in _AUG_LISTS]
    found = next((file for file in places if file.is_file()), None)
    return _open(request, "voc-aug", found, "SegmentationClassAug")


def _open(request: Request, name: str, train_list: Path | None, masks: str) -> Data:
    root = _root(request.path)
    tests = read_lines(root / "ImageSets" / "Segmentation" / "val.txt")
    if train_list is None:  # no list: all masks but those of the test
        trains = sorted({file.stem for file in (root / masks).glob("*.png")} - set(tests))
    else:
        trains = [Path(line.split()[0]).stem for line in read_lines(train_list)]
    classes = tuple(_CLASSES.split())
    ids = class_ids(len(classes), request.ignore)
    train, test = (
        Masked([(root / "JPEGImages" / f"{stem}.jpg", root / folder / f"{stem}.png") for stem in stems], ids)
        for stems, folder in ((trains, masks), (tests, "SegmentationClass"))
    )
    return Data(name, "segment", classes, train, test)
