"""CamVid with 11 classes: as SegNet prepared it, with coloured masks as published, or as fastai packed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GradFilterError
from .images import class_ids, is_picture
from .request import Request, read_lines, subfolder
from .samples import Data, Masked

__all__ = ["has_camvid", "open_camvid"]

CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)
_VOID = 255
# the 32 kinds of the publication: colour, and which of the 11 classes they belong to
_KINDS = {
    "Animal": ((64, 128, 64), "pedestrian"),
    "Archway": ((192, 0, 128), "building"),
    "Bicyclist": ((0, 128, 192), "bicyclist"),
    "Bridge": ((0, 128, 64), "building"),
    "Building": ((128, 0, 0), "building"),
    "Car": ((64, 0, 128), "car"),
    "CartLuggagePram": ((64, 0, 192), "pedestrian"),
    "Child": ((192, 128, 64), "pedestrian"),
    "Column_Pole": ((192, 192, 128), "pole"),
    "Fence": ((64, 64, 128), "fence"),
    "LaneMkgsDriv": ((128, 0, 192), "road"),
    "LaneMkgsNonDriv": ((192, 0, 64), "road"),
    "Misc_Text": ((128, 128, 64), "sign"),
    "MotorcycleScooter": ((192, 0, 192), "bicyclist"),
    "OtherMoving": ((128, 64, 64), "car"),
    "ParkingBlock": ((64, 192, 128), "pavement"),
    "Pedestrian": ((64, 64, 0), "pedestrian"),
    "Road": ((128, 64, 128), "road"),
    "RoadShoulder": ((128, 128, 192), "pavement"),
    "Sidewalk": ((0, 0, 192), "pavement"),
    "SignSymbol": ((192, 128, 128), "sign"),
    "Sky": ((128, 128, 128), "sky"),
    "SUVPickupTruck": ((64, 128, 192), "car"),
    "TrafficCone": ((0, 0, 64), "pole"),
    "TrafficLight": ((0, 64, 64), "sign"),
    "Train": ((192, 64, 128), "car"),
    "Tree": ((128, 128, 0), "tree"),
    "Truck_Bus": ((192, 128, 192), "car"),
    "Tunnel": ((64, 0, 64), "building"),
    "VegetationMisc": ((192, 192, 0), "tree"),
    "Void": ((0, 0, 0), ""),
    "Wall": ((64, 192, 0), "building"),
}


def has_camvid(path: Path) -> bool:
    root = _root(path)
    return (
        (root / "trainannot").is_dir()
        or (root / "train_labels").is_dir()
        or (root / "LabeledApproved_full").is_dir()
        or ((root / "codes.txt").is_file() and (root / "labels").is_dir())
    )


def _root(path: Path) -> Path:
    return subfolder(path, "CamVid", "camvid") or path


def open_camvid(request: Request) -> Data:
    root = _root(request.path)
    if (root / "trainannot").is_dir():
        ids: Any = class_ids(11, request.ignore, {**{i: i for i in range(11)}, 11: _VOID})
        train, test = _pairs(root / "train", root / "trainannot"), _pairs(root / "test", root / "testannot")
    elif (root / "train_labels").is_dir():
        ids = _of_colour
        train, test = (
            _pairs(root / "train", root / "train_labels"),
            _pairs(root / "test", root / "test_labels"),
        )
    elif (root / "LabeledApproved_full").is_dir():
        ids = _of_colour
        train, test = _by_sequence(_pairs(root / "701_StillsRaw_full", root / "LabeledApproved_full"))
    else:
        ids = class_ids(11, request.ignore, _of_codes(root / "codes.txt"))
        train, test = _by_sequence(_pairs(root / "images", root / "labels"))
    return Data("camvid", "segment", CLASSES, Masked(train, ids), Masked(test, ids))


def _pairs(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Pictures and masks of the same name, the mask's with _L or _P at its end where it is so."""
    for folder in (images, masks):
        if not folder.is_dir():
            raise GradFilterError(f"{folder} is missing; unpack CamVid again.")
    known = {
        file.stem.removesuffix("_L").removesuffix("_P"): file for file in masks.iterdir() if is_picture(file)
    }
    pairs = []
    for file in sorted(file for file in images.iterdir() if is_picture(file)):
        if file.stem not in known:
            raise GradFilterError(f"{file} has no mask in {masks}; unpack CamVid again.")
        pairs.append((file, known[file.stem]))
    return pairs


def _by_sequence(pairs: list[tuple[Path, Path]]) -> tuple[list[tuple[Path, Path]], list[tuple[Path, Path]]]:
    """SegNet's split, 367 for training and 233 for the test; its 101 for validation serve neither."""
    sides = [_side_of(image.stem) for image, _ in pairs]
    train, test = ([p for p, s in zip(pairs, sides, strict=True) if s == side] for side in ("train", "test"))
    return train, test


def _side_of(stem: str) -> str:
    """The side of a frame, by its film and number.

    >>> [_side_of(stem) for stem in ("0001TP_008520", "0001TP_008550", "0016E5_07959", "Seq05VD_f00000")]
    ['train', 'test', 'val', 'test']
    """
    film, _, frame = stem.partition("_")
    number = int(frame.lstrip("f") or 0) if frame.lstrip("f").isdigit() else 0
    if film == "Seq05VD" or (film == "0001TP" and number >= 8550):
        return "test"
    return "val" if film == "0016E5" and 7959 <= number <= 8159 else "train"


def _class_of(kind: str) -> int:
    name = _KINDS[kind][1]
    return CLASSES.index(name) if name else _VOID


def _of_codes(file: Path) -> dict[int, int]:
    return {i: _class_of(kind) if kind in _KINDS else _VOID for i, kind in enumerate(read_lines(file))}


def _of_colour(values: Any) -> Any:
    """Class ids of a mask in the publication's colours; all others are void."""
    if values.ndim != 3:
        raise ValueError("has no colours, though CamVid's masks are published in colours")
    code = values[..., :3].astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    ids = np.full(code.shape, _VOID, np.uint8)
    for kind, ((red, green, blue), _) in _KINDS.items():
        ids[code == (red << 16 | green << 8 | blue)] = _class_of(kind)
    return ids
