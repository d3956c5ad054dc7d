"""The scores of a saved run on a set."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from ..data.samples import Samples
from ..data.transforms import Transformed
from ..progress import Tell, silent
from .saved import Saved
from .tasks import task_of

__all__ = ["scores_of_run"]


@torch.no_grad()
def scores_of_run(saved: Saved, samples: Samples, tell: Tell = silent) -> dict[str, float]:
    """The same scores that the training told after its epochs."""
    task = task_of(saved.task, len(saved.classes), saved.ignore)
    loader = DataLoader(
        Transformed(samples, saved.transform),
        batch_size=saved.config.batch,
        num_workers=saved.config.workers,
    )

    def outputs():  # type: ignore[no-untyped-def]
        for number, (images, targets) in enumerate(loader, 1):
            tell("testing", number, len(loader))
            yield saved.model(images.to(memory_format=torch.channels_last)), targets

    return task.score(outputs())
