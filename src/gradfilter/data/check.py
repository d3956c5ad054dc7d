"""What is looked at before a training, so that nothing ends it hours later: files and classes."""

from __future__ import annotations

from ..errors import GradFilterError
from ..progress import Tell, silent
from .images import open_header
from .samples import Data, Samples

__all__ = ["check", "check_classes"]

_SHOWN = 5


def check(data: Data, tell: Tell = silent) -> None:
    """Open every file's header once, and refuse the data if some are broken; it names the first of them.

    A file whose header is whole can still be cut short: that is found, and named, when it is read.
    """
    total, done = len(data.train) + len(data.test), 0
    problems: list[str] = []
    for samples in (data.train, data.test):
        for index in range(len(samples)):
            problem = _problem(samples, index)
            if problem:
                problems.append(problem)
            done += 1
            tell("checking files", done, total)
    if problems:
        more = f" And {len(problems) - _SHOWN} more." if len(problems) > _SHOWN else ""
        shown = " ".join(problems[:_SHOWN])
        raise GradFilterError(f"{len(problems)} of {total} samples cannot be read: {shown}{more}")


def check_classes(data: Data, where: object) -> None:
    """Refuse classes that are tested, but have no samples to train on."""
    if data.task != "classify":
        return
    trained, tested = (set(getattr(samples, "labels", ())) for samples in (data.train, data.test))
    names = [data.classes[label] for label in sorted(tested - trained)]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise GradFilterError(
            f"{where} has test samples of {', '.join(map(repr, names[:_SHOWN]))}{more}, but none to train "
            "on; give each class training samples, or leave it out."
        )


def _problem(samples: Samples, index: int) -> str:
    files = samples.files(index)
    try:
        sizes = [open_header(file) for file in files]
    except GradFilterError as error:
        return str(error)
    if len(set(sizes)) > 1:
        (width, height), (mask_width, mask_height) = sizes
        return (
            f"The mask {files[1]} has {mask_width}x{mask_height} pixels, but its picture {width}x{height}; "
            "make them the same size."
        )
    return ""
