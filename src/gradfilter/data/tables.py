"""A CSV file that names pictures and their labels."""

from __future__ import annotations

import csv
import io
from contextlib import suppress
from pathlib import Path

from ..errors import GradFilterError
from .request import Request, shortened
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
        reader = csv.DictReader(io.StringIO(_text(file), newline=""))
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        rows = list(reader)
    except (OSError, csv.Error) as error:
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
        for name in ("path", "label", "split"):
            if name in columns:
                row[name] = row[name] or ""
                if name != "path":  # a file's name may begin or end with a blank
                    row[name] = row[name].strip()
                if not row[name].strip():
                    raise GradFilterError(
                        f"{file}, line {line}: a value is missing; fill it in or remove the line."
                    )
    return rows


def _text(file: Path) -> str:
    content = file.read_bytes()
    with suppress(UnicodeDecodeError):
        if b"\0" not in content:  # as UTF-16 has it
            return content.decode("utf-8-sig")
    raise GradFilterError(f"{file} is not text in UTF-8; save it as UTF-8 (CSV UTF-8 in spreadsheets).")


def _existing(file: Path, name: str, line: int) -> Path:
    path = file.parent / name.strip()
    try:
        for found in (file.parent / name, path):
            if found.is_file():
                return found
        why = "does not exist"
    except OSError as error:  # a name that is too long, a folder without permission
        why = f"cannot be opened ({error.strerror})"
    raise GradFilterError(
        f"{file}, line {line}: the file {shortened(path)} {why}; correct its path or remove the line."
    )


def _is_test(file: Path, split: str, line: int) -> bool:
    if split.lower() in _TRAIN:
        return False
    if split.lower() in _TEST:
        return True
    raise GradFilterError(f"{file}, line {line}: split must be train or test, not {split!r}.")


def _numbers_by_value(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label
