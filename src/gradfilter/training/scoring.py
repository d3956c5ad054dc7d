"""The scores of a saved run on a set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader

from ..data.samples import Samples
from ..data.transforms import Transformed
from ..loading import read
from ..progress import Tell, silent
from .saved import Saved
from .sets import as_read
from .tasks import task_of

__all__ = ["scores_of_run"]


@torch.no_grad()
def scores_of_run(saved: Saved, parts: Sequence[Samples], tell: Tell = silent) -> dict[str, float]:
    """The same scores that the training told after its epochs, of all the parts together."""
    task = task_of(saved.task, len(saved.classes), saved.ignore)
    sets = [Transformed(as_read(part, saved.config.size), saved.transform) for part in parts]
    loader: DataLoader[Any] = DataLoader(
        ConcatDataset(sets),
        batch_size=saved.config.batch,
        num_workers=saved.config.workers,
    )

    def outputs():  # type: ignore[no-untyped-def]
        for number, (images, targets) in enumerate(read(loader), 1):
            tell("testing", number, len(loader))
            yield saved.model(images.to(memory_format=torch.channels_last)), targets

    return task.score(outputs())
