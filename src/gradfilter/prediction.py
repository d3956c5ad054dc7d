"""Pictures in, labels or masks out."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from .data.samples import Task
from .errors import GradFilterError
from .files import replacing
from .masks import mask_image
from .training.tasks import class_scores

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Label", "Mask", "predict", "read_pictures", "write_labels", "write_masks"]

_AT_ONCE = 2**24  # numbers that a mask's scores may take at a time: phone pictures are large


@dataclass(frozen=True)
class Label:
    """The likeliest class of a picture."""

    name: str
    label: str
    probability: float


@dataclass(frozen=True)
class Mask:
    """The class number of every pixel of a picture, at the picture's own size."""

    name: str
    classes: Tensor


def predict(
    model: nn.Module,
    images: Iterable[tuple[str, Image]],
    transform: Callable[[Image], Tensor],
    classes: Sequence[str],
    task: Task,
    *,
    batch: int = 8,
) -> Iterator[Label | Mask]:
    """Labels, or for segmentation masks, of named pictures, in their order; the model stays as it is.

    The transform makes of a picture what the model reads, (C, H, W). For masks it must show all of the
    picture, in the upper left corner of a square, as ``test_transform`` does. Pictures that it makes equally
    large run together, at most ``batch``.

    >>> from PIL import Image
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2, bias=False)).requires_grad_(False)
    >>> _ = model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 12))
    >>> grey = lambda picture: torch.full((3, 2, 2), picture.getpixel((0, 0))[0] / 255 - 0.5)
    >>> pictures = [("day", Image.new("RGB", (4, 4), "white")), ("night", Image.new("RGB", (4, 4)))]
    >>> [found.label for found in predict(model, pictures, grey, ["bright", "dark"], "classify")]
    ['bright', 'dark']
    """
    if task not in ("classify", "segment"):
        raise GradFilterError(f"task must be 'classify' or 'segment', not {task!r}.")
    for names, sizes, inputs in _batches(images, transform, batch):
        with _evaluating(model), torch.inference_mode():
            scores = class_scores(model(inputs), len(classes)).float()
        if (scores.dim() == 4) != (task == "segment"):
            what, other = ("masks", "segment") if scores.dim() == 4 else ("labels", "classify")
            raise GradFilterError(f"The model gives {what}; use task={other!r}.")
        for name, size, own in zip(names, sizes, scores, strict=True):
            if task == "segment":
                side = max(size)
                yield Mask(name, _largest(own, (side, side))[: size[0], : size[1]])
            else:
                probability, number = own.softmax(0).max(0)
                yield Label(name, classes[int(number)], float(probability))


def _batches(
    images: Iterable[tuple[str, Image]], transform: Callable[[Image], Tensor], most: int
) -> Iterator[tuple[list[str], list[tuple[int, int]], Tensor]]:
    waiting: list[tuple[str, tuple[int, int], Tensor]] = []
    for name, picture in images:
        own = transform(picture)
        if waiting and (len(waiting) == most or own.shape != waiting[0][2].shape):
            yield _stacked(waiting)
            waiting = []
        waiting.append((name, (picture.height, picture.width), own))
    if waiting:
        yield _stacked(waiting)


def _stacked(
    entries: list[tuple[str, tuple[int, int], Tensor]],
) -> tuple[list[str], list[tuple[int, int]], Tensor]:
    names, sizes, inputs = zip(*entries, strict=True)
    return list(names), list(sizes), torch.stack(inputs)


def _largest(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """The class with the highest score of every pixel, a few classes at a time."""
    step = max(1, _AT_ONCE // (size[0] * size[1]))
    best = found = None
    for first in range(0, len(scores), step):
        part = interpolate(scores[None, first : first + step], size, mode="bilinear", align_corners=False)[0]
        highest, number = part.max(0)
        number += first
        if best is None or found is None:
            best, found = highest, number
        else:
            better = highest > best
            best, found = torch.where(better, highest, best), torch.where(better, number, found)
    assert found is not None  # noqa: S101  a model without classes was refused
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """As ``model.eval()``, and back: each module may have had a mode of its own."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)


def read_pictures(
    files: Iterable[str | os.PathLike[str]], unreadable: Callable[[str], None] = _warn
) -> Iterator[tuple[str, Image]]:
    """Files as RGB pictures, upright. One that cannot be read is named to ``unreadable`` and left out.

    If none can be read, that is an error.
    """
    read = seen = 0
    for file in files:
        seen += 1
        try:
            picture = _upright(file)
        except Exception as error:  # a damaged file can break its reader anywhere, and with any error
            reason = "no picture" if type(error).__name__ == "UnidentifiedImageError" else str(error)
            unreadable(f"{file} cannot be read ({reason}) and is left out.")
            continue
        read += 1
        yield os.fspath(file), picture
    if not read:
        raise GradFilterError(f"None of the {seen} files can be read as a picture." if seen else "No files.")


def _upright(file: str | os.PathLike[str]) -> Image:
    from PIL import Image

    from .data.images import upright_rgb

    with Image.open(file) as opened:
        return upright_rgb(opened)


def write_labels(file: str | os.PathLike[str], labels: Iterable[Label]) -> int:
    """A CSV of file, label and probability, whole or not at all; returns how many."""
    count = 0
    with replacing(file) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["path", "label", "probability"])
        for found in labels:
            writer.writerow([found.name, found.label, f"{found.probability:.6f}"])
            count += 1
    return count


def write_masks(
    folder: str | os.PathLike[str], masks: Iterable[Mask], *, replace: bool = False
) -> list[Path]:
    """A PNG with a palette per mask, named as its picture; its pixels are class numbers.

    Of two pictures that differ only in folder or suffix, the second's mask has a number behind its name.
    Without ``replace`` a file that is there is never written over: it may be a mask that somebody drew.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradFilterError(f"{folder} cannot be made ({error.strerror}).") from None
    written: list[Path] = []
    for found in masks:
        file = _free(place, PurePath(found.name).stem, written)
        if file.exists() and not replace:
            raise GradFilterError(f"{file} is there already; give a folder without masks of these pictures.")
        with replacing(file) as partial:
            mask_image(found.classes).save(partial, "PNG")
        written.append(file)
    return written


def _free(place: Path, stem: str, taken: list[Path]) -> Path:
    file, number = place / f"{stem}.png", 1
    while file in taken:
        number += 1
        file = place / f"{stem}-{number}.png"
    return file
