"""A CSV file that names pictures and their labels."""

from __future__ import annotations

import csv
from pathlib import Path

from ..errors import GradFilterError
from .request import Request
from .samples import Data, Pictures

__all__ = ["is_csv", "open_csv"]

_TRAIN, _TEST = ("train", "training"), ("test", "val", "valid", "validation")


def is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv" and path.is_file()


def open_csv(request: Request) -> Data:
    """Columns path and label, and split (train or test) if there is one; paths count from the CSV file on."""
    file = request.path
    rows = _rows(file)
    names = sorted({row["label"] for row in rows}, key=_numbers_by_value)
    items = [
        (_existing(file, row["path"], line), names.index(row["label"])) for line, row in enumerate(rows, 2)
    ]
    held_out = "split" not in rows[0]
    if not held_out:
        sides = [_is_test(file, row["split"], line) for line, row in enumerate(rows, 2)]
        train, test = ([item for item, s in zip(items, sides, strict=True) if s == t] for t in (False, True))
    else:
        train, test = request.split(items, [label for _, label in items])
    return Data(file.stem, "classify", tuple(names), Pictures(train), Pictures(test), held_out=held_out)


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GradFilterError(f"{file} cannot be read as a CSV file ({error}).") from error
    for name in ("path", "label"):
        if name not in columns:
            found = ", ".join(columns) or "none"
            raise GradFilterError(
                f"{file} has no column {name}: its first line must name path and label, not {found}."
            )
    if not rows:
        raise GradFilterError(f"{file} has no lines below its first.")
    for line, row in enumerate(rows, 2):
        if not row["path"] or not row["label"] or ("split" in columns and not row["split"]):
            raise GradFilterError(f"{file}, line {line}: a value is missing; fill it in or remove the line.")
    return rows


def _existing(file: Path, name: str, line: int) -> Path:
    path = file.parent / name
    if not path.is_file():
        raise GradFilterError(f"{file}, line {line}: the file {path} does not exist.")
    return path


def _is_test(file: Path, split: str, line: int) -> bool:
    if split.strip().lower() in _TRAIN:
        return False
    if split.strip().lower() in _TEST:
        return True
    raise GradFilterError(f"{file}, line {line}: split must be train or test, not {split!r}.")


def _numbers_by_value(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label
