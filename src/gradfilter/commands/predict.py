"""gradfilter predict: labels or masks of pictures, by a trained run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GradFilterError
from .options import add_command, add_run

if TYPE_CHECKING:
    from ..prediction import Label, Mask

__all__ = ["add"]

EXAMPLES = """\
examples:
  gradfilter predict runs/1 photo.jpg
  gradfilter predict runs/1 new_pictures/ --out labels.csv
  gradfilter predict runs/2 street/*.png --out masks/
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands, "predict", "label pictures, or make their masks, with a trained run", EXAMPLES
    )
    add_run(parser)
    parser.add_argument("pictures", nargs="+", help="files, or folders of them")
    parser.add_argument(
        "--out", help="a CSV file for labels (default: print them), a folder for masks (default: RUN/masks)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from ..prediction import predict, read_pictures, write_labels, write_masks
    from ..progress import Progress
    from ..training.saved import open_run

    files = list(_files(arguments.pictures))
    saved = open_run(arguments.folder, arguments.weights)
    out = arguments.out
    if saved.task == "classify" and out and Path(out).suffix.lower() != ".csv":
        raise GradFilterError(f"Labels are written as CSV, so --out must end in .csv, unlike {out}.")
    with Progress() as tell:
        pictures = read_pictures(files, lambda sentence: print(f"warning: {sentence}", file=sys.stderr))
        found = predict(saved.model, pictures, saved.transform.of_picture, saved.classes, saved.task)
        told: Any = _told(found, len(files), tell)
        if saved.task == "segment":
            folder = out or Path(arguments.folder, "masks")
            written = write_masks(folder, told, replace=not out)
            tell.say(f"{len(written)} masks in {folder}; their pixels are the numbers of the classes.")
        elif out:
            tell.say(f"{write_labels(out, told)} labels in {out}.")
        else:
            for label in list(told):
                print(f"{label.name}\t{label.label}\t{label.probability:.3f}")
    sys.stdout.flush()


def _told(found: Iterable[Label | Mask], count: int, tell: Any) -> Iterator[Label | Mask]:
    for number, one in enumerate(found, 1):
        tell("predicting", number, count)
        yield one


def _files(given: list[str]) -> Iterator[Path]:
    """Files as they are; of folders, the pictures in them."""
    from ..data.images import is_picture

    for name in given:
        path = Path(name)
        if not path.exists():
            raise GradFilterError(f"There is no file or folder {name}.")
        if not path.is_dir():
            yield path
            continue
        inside = sorted(file for file in path.rglob("*") if is_picture(file))
        if not inside:
            raise GradFilterError(f"The folder {name} has no pictures.")
        yield from inside
