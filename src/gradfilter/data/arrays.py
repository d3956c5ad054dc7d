"""Pictures as plain arrays: the embedded digits, and .npz files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ..errors import GradFilterError
from .request import Request, check_labels
from .samples import Arrays, Data, hold_out

__all__ = ["is_npz", "open_arrays", "open_digits"]

# the names that a part of an array's name may have; those on the right are of x_train, y_train, m_train
_IMAGES, _LABELS, _MASKS = ("images", "x"), ("labels", "y"), ("masks", "m")


def open_digits(request: Request) -> Data:
    """1797 handwritten digits of 8x8 pixels (UCI, as in scikit-learn), the same fifth always the test."""
    found = load_file(Path(__file__).with_name("digits.safetensors"))
    images = (found["images"].astype(np.float32) * (255 / 16)).round().astype(np.uint8)
    labels = found["labels"].astype(np.int64)
    held = np.array(hold_out([str(i) for i in range(len(labels))], labels.tolist(), part=0.2, seed=0))
    train, test = (Arrays(images[side], labels[side]) for side in (~held, held))
    return Data("digits", "classify", tuple("0123456789"), train, test, flip=False)


def is_npz(path: Path) -> bool:
    return path.suffix == ".npz" and path.is_file()


def open_arrays(request: Request) -> Data:
    """An .npz file with train_images, train_labels or train_masks, and the same with test_."""
    file = request.path
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GradFilterError(f"{file} cannot be read as an .npz file of plain arrays ({error}).") from error
    segment = request.task == "segment" or (request.task is None and _has_masks_only(found))
    names = [str(name) for name in found.get("classes", ())]
    sides = [_targets(file, found, side, segment) for side in ("train", "test")]
    ignore = int(found.get("ignore", request.ignore))
    if segment:
        sides = [np.where(targets == ignore, 255, targets) for targets in sides]
    counted = [targets[targets != 255] if segment else targets for targets in sides]
    count = len(names) or 1 + max((int(targets.max(initial=0)) for targets in counted), default=0)
    for targets in counted:
        check_labels(targets.ravel(), count, file)
    train, test = (
        Arrays(_images(file, found, side, targets), targets)
        for side, targets in zip(("train", "test"), sides, strict=True)
    )
    return Data(
        file.stem,
        "segment" if segment else "classify",
        tuple(names or map(str, range(count))),
        train,
        test,
    )


def _has_masks_only(found: dict[str, Any]) -> bool:
    labels = _get(found, "train", _LABELS)
    return labels is None or labels.ndim > 1


def _get(found: dict[str, Any], side: str, kinds: tuple[str, str]) -> Any:
    long, short = kinds
    return found.get(f"{side}_{long}", found.get(f"{short}_{side}"))


def _images(file: Path, found: dict[str, Any], side: str, targets: Any) -> Any:
    images = _get(found, side, _IMAGES)
    if (
        images is None
        or images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or images.shape[3:] not in ((), (3,))
    ):
        got = "nothing" if images is None else f"{images.dtype} {images.shape}"
        raise GradFilterError(f"{file} must have {side}_images as uint8 (N, H, W, 3), but has {got}.")
    same = len(images) == len(targets) and (targets.ndim == 1 or images.shape[:3] == targets.shape)
    if not same:
        raise GradFilterError(
            f"{file}: {side}_images are {images.shape}, but their labels or masks {targets.shape}; "
            "there must be one of the same size for each."
        )
    return images


def _targets(file: Path, found: dict[str, Any], side: str, segment: bool) -> Any:
    targets = _get(found, side, _MASKS if segment else _LABELS)
    if targets is None and segment:  # y_train may be masks
        targets = _get(found, side, _LABELS)
    want = f"{side}_masks as (N, H, W)" if segment else f"{side}_labels as (N)"
    if targets is None or targets.ndim != (3 if segment else 1) or targets.dtype.kind not in "iu":
        got = "nothing" if targets is None else f"{targets.dtype} {targets.shape}"
        raise GradFilterError(f"{file} must have {want} of whole numbers, but has {got}.")
    return targets
