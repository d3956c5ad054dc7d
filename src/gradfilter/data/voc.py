"""Pascal VOC 2012 segmentation: 20 kinds of objects and background; with the augmented masks if asked for."""

from __future__ import annotations

from pathlib import Path

from ..errors import GradFilterError
from .images import class_ids
from .request import Request, read_lines, subfolder
from .samples import Data, Masked

__all__ = ["has_voc", "has_voc_aug", "open_voc", "open_voc_aug"]

_CLASSES = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow dining-table dog horse motorbike "
    "person potted-plant sheep sofa train tv-monitor"
)


def has_voc(path: Path) -> bool:
    return (_root(path) / "ImageSets" / "Segmentation" / "train.txt").is_file()


def has_voc_aug(path: Path) -> bool:
    return has_voc(path) and (_aug(path) is not None or _sbd(path) is not None)


def _root(path: Path) -> Path:
    return subfolder(path, "VOCdevkit/VOC2012", "VOC2012") or path


def _aug(path: Path) -> Path | None:
    return subfolder(_root(path), "SegmentationClassAug")


def _sbd(path: Path) -> Path | None:
    return subfolder(path, "benchmark_RELEASE/dataset/cls", "SBD/cls", "sbd/cls", "cls")


def open_voc(request: Request) -> Data:
    """The official 1464 training and 1449 validation pictures."""
    root = _root(request.path)
    stems = _list(root, "train")
    return _open(request, "voc", [(stem, root / "SegmentationClass" / f"{stem}.png") for stem in stems])


def open_voc_aug(request: Request) -> Data:
    """Training on the 10582 pictures that SBD's masks (Hariharan et al. 2011) add up to; tests as ``voc``."""
    root, aug, sbd = _root(request.path), _aug(request.path), _sbd(request.path)
    tests = set(_list(root, "val"))
    if aug is not None:
        lists = [name for name in ("train_aug", "trainaug") if _list_file(root, name).is_file()]
        stems = _list(root, lists[0]) if lists else sorted({file.stem for file in aug.glob("*.png")} - tests)
        return _open(request, "voc-aug", [(stem, aug / f"{stem}.png") for stem in stems])
    if sbd is None:
        raise GradFilterError(
            f"{request.path} has no augmented masks: put SegmentationClassAug into {root}, or SBD's "
            f"benchmark_RELEASE into {request.path}, or use voc:PATH."
        )
    masks = {file.stem: file for file in sbd.glob("*.mat")}
    masks |= {stem: root / "SegmentationClass" / f"{stem}.png" for stem in _list(root, "train")}  # finer ones
    return _open(request, "voc-aug", [(stem, masks[stem]) for stem in sorted(masks.keys() - tests)])


def _list_file(root: Path, name: str) -> Path:
    return root / "ImageSets" / "Segmentation" / f"{name}.txt"


def _list(root: Path, name: str) -> list[str]:
    """The names of a list; some lists have paths instead."""
    return [Path(line.split()[0]).stem for line in read_lines(_list_file(root, name))]


def _open(request: Request, name: str, train: list[tuple[str, Path]]) -> Data:
    root, classes = _root(request.path), tuple(_CLASSES.split())
    test = [(stem, root / "SegmentationClass" / f"{stem}.png") for stem in _list(root, "val")]
    ids = class_ids(len(classes), request.ignore)
    sides = [
        Masked([(root / "JPEGImages" / f"{stem}.jpg", mask) for stem, mask in side], ids)
        for side in (train, test)
    ]
    return Data(name, "segment", classes, *sides)
