"""What a user asked for when opening a data set, and what all readers share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import GradFilterError
from .samples import Task, hold_out

__all__ = ["Request", "check_labels", "read_lines", "shortened", "subfolder"]

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """Where the data lies, and how to read it."""

    path: Path
    task: Task | None = None
    holdout: float = 0.2
    seed: int = 0
    ignore: int = 255

    def split(self, items: Sequence[tuple[Path, T]], labels: Sequence[Any]) -> list[list[tuple[Path, T]]]:
        """Items for training, and those held out, by their labels and the names of their files."""
        root = self.path if self.path.is_dir() else self.path.parent
        names = [Path(os.path.relpath(path, root)).as_posix() for path, _ in items]
        held = hold_out(names, labels, self.holdout, self.seed)
        return [
            [item for item, out in zip(items, held, strict=True) if out == side] for side in (False, True)
        ]


def check_labels(labels: Any, classes: int, where: object) -> None:
    """Refuse labels that no class has."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        raise GradFilterError(
            f"{where} has the label {wrong}, out of range: its {classes} classes are 0 to {classes - 1}."
        )


def shortened(path: object) -> str:
    """A path as a sentence can bear it.

    >>> shortened("a" * 50 + "b" * 5000 + "c" * 50)[40:70]
    'aaaaaaaaaa ... bbbbbbbbbbbbbbb'
    """
    text = str(path)
    return text if len(text) <= 1000 else f"{text[:50]} ... {text[-100:]}"


def subfolder(path: Path, *names: str) -> Path | None:
    """The first of these folders that is there."""
    return next((path / name for name in names if (path / name).is_dir()), None)


def read_lines(file: Path) -> list[str]:
    """The lines of a list that a data set has, without empty ones."""
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise GradFilterError(f"{file} cannot be read ({error}); unpack the data set again.") from error
