"""The user's own pictures: a folder per class, or a folder of pictures beside one of masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GradFilterError
from .images import SUFFIXES, ClassIds, class_ids, is_picture, is_unread, read_mask, read_picture
from .request import Request, read_lines, subfolder
from .samples import Data, Masked, Pictures

__all__ = ["has_class_folders", "has_masks", "has_splits", "open_folder", "open_imagenet", "open_masks"]

_TRAIN, _TEST = "train", ("test", "val", "valid", "validation")


def has_class_folders(path: Path) -> bool:
    return len(_class_folders(path)) > 0


def has_splits(path: Path) -> bool:
    """Whether there are a training and a test folder, both with folders in them."""
    return _part(path, _TRAIN) is not None and _part(path, *_TEST) is not None


def _part(path: Path, *names: str) -> Path | None:
    """The first folder of such a name, in capitals or not, that has class folders."""
    folders = {folder.name.casefold(): folder for folder in _class_folders(path)}
    return next((folders[name] for name in names if name in folders and _class_folders(folders[name])), None)


def has_masks(path: Path) -> bool:
    roots = [path, *([path / "train"] if (path / "train").is_dir() else [])]
    return any((root / "images").is_dir() and (root / "masks").is_dir() for root in roots)


def open_folder(request: Request) -> Data:
    """Class folders, under train/ and test/ if these are there, else with a part of each class held out."""
    path = request.path
    if has_splits(path):
        return _open_splits(request, _TEST)
    half = _part(path, _TRAIN, *_TEST)
    if half is not None:
        raise GradFilterError(
            f"{half} has class folders, but {path} lacks the other part: it needs train and one of "
            f"{', '.join(_TEST)}, each with a folder per class. Or give {half}: part of it is then held out."
        )
    classes = [folder.name for folder in _class_folders(path)]
    unread: Counter[str] = Counter()
    items = _labelled(path, classes, unread)
    train, test = request.split(items, [label for _, label in items])
    parts = (Pictures(train), Pictures(test))
    return Data(
        path.resolve().name,
        "classify",
        tuple(classes),
        *parts,
        held_out=True,
        left_out=_left_out(unread),
    )


def open_imagenet(request: Request) -> Data:
    """ImageNet: train/ and val/ with a folder per class; sorted by name these are in the official order."""
    return _open_splits(request, ("val",))


def _open_splits(request: Request, tests: Sequence[str]) -> Data:
    path, train, test = request.path, _part(request.path, _TRAIN), _part(request.path, *tests)
    if test is None or train is None:
        raise GradFilterError(f"{path} must have the folders train and {tests[0]}, each with class folders.")
    classes = [folder.name for folder in _class_folders(train)]
    for folder in _class_folders(test):
        if folder.name not in classes:
            raise GradFilterError(f"{folder} is a class that {train} does not have; move or remove it.")
    unread: Counter[str] = Counter()
    parts = [Pictures(_labelled(part, classes, unread)) for part in (train, test)]
    return Data(path.resolve().name, "classify", tuple(classes), *parts, left_out=_left_out(unread))


def _class_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and folder.name[0] not in "._")


def _labelled(path: Path, classes: Sequence[str], unread: Counter[str]) -> list[tuple[Path, int]]:
    return [
        (file, label)
        for label, name in enumerate(classes)
        if (path / name).is_dir()  # a test need not have them all
        for file in _pictures_of_class(path / name, unread)
    ]


def _pictures_of_class(folder: Path, unread: Counter[str]) -> list[Path]:
    files = _pictures(folder, unread)
    if not files:
        raise GradFilterError(
            f"The class folder {folder} has no pictures ({', '.join(s[1:] for s in SUFFIXES)}); "
            "add some or remove it."
        )
    return files


def _pictures(folder: Path, unread: Counter[str]) -> list[Path]:
    """The pictures in a folder; the suffixes of what may be others are counted in ``unread``."""
    pictures = []
    for file in folder.rglob("*"):
        if is_picture(file):
            pictures.append(file)
        elif is_unread(file):
            unread[file.suffix.lower()] += 1
    return sorted(pictures)


def _left_out(unread: Counter[str]) -> str:
    if not unread:
        return ""
    counts = ", ".join(f"{unread[suffix]} {suffix or 'without suffix'}" for suffix in sorted(unread))
    return f"Files left out: {counts}; save them as JPEG or PNG if they are pictures."


def open_masks(request: Request) -> Data:
    """images/ and masks/ with the same stems, under train/ and test/ if these are there."""
    path, test = request.path, subfolder(request.path, *_TEST)
    held_out = not (path / "train").is_dir() or test is None
    unread: Counter[str] = Counter()
    if test is not None and not held_out:
        train_items, test_items = _pairs(path / "train", unread), _pairs(test, unread)
    else:
        pairs = _pairs(path, unread)
        train_items, test_items = request.split(pairs, [0] * len(pairs))
    named = path / "classes.txt"
    if named.is_file():
        names = read_lines(named)
        if not names:
            raise GradFilterError(f"{named} is empty; name the classes in it, one a line, or remove it.")
    else:
        names = _numbered_classes([*train_items, *test_items], request.ignore)
    ids = class_ids(len(names), request.ignore)
    parts = (Masked(train_items, ids), Masked(test_items, ids))
    return Data(
        path.resolve().name,
        "segment",
        tuple(names),
        *parts,
        held_out=held_out,
        left_out=_left_out(unread),
    )


def _pairs(root: Path, unread: Counter[str]) -> list[tuple[Path, Path]]:
    for name in ("images", "masks"):
        if not (root / name).is_dir():
            raise GradFilterError(f"{root / name} is missing: masks of pictures in images/ are in masks/.")
    found = _pictures(root / "masks", Counter())
    masks = {file.relative_to(root / "masks").with_suffix(""): file for file in found}
    pairs = []
    for file in _pictures(root / "images", unread):
        mask = masks.get(file.relative_to(root / "images").with_suffix(""))
        if mask is None:
            raise GradFilterError(f"{file} has no mask of the same name in {root / 'masks'}.")
        pairs.append((file, mask))
    if not pairs:
        raise GradFilterError(f"{root / 'images'} has no pictures.")
    return pairs


def _numbered_classes(pairs: Sequence[tuple[Path, Path]], ignore: int) -> list[str]:
    """As many classes as the masks have, which must all be read for it."""
    anything = class_ids(255, ignore)
    highest = max(_highest(picture, mask, anything) for picture, mask in pairs)
    if highest < 0:
        raise GradFilterError(
            f"No pixel is labelled in the masks beside {pairs[0][1]}: all values are 255, which does not "
            "count; save the classes as 0, 1 and so on."
        )
    if highest == 0:
        raise GradFilterError(
            f"The masks beside {pairs[0][1]} have the class 0 only (255 does not count); "
            "save the second class as 1."
        )
    return [f"class {label}" for label in range(highest + 1)]


def _highest(picture: Path, mask: Path, ids: ClassIds) -> int:
    """The highest class of a mask; -1 if no pixel has one."""
    values: Any = np.asarray(read_mask(mask, read_picture(picture).size, ids))
    return int(values[values != 255].astype(np.int16).max(initial=-1))
