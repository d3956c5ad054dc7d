"""Fine-tune a model in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from torch import nn

from ..cache import FeatureCache
from ..errors import GradFilterError, nearest
from ..locking import held
from ..methods import Method
from ..plans import Plan
from ..program import accelerate_if_possible_
from ..progress import Tell, silent
from ..surgery import apply_
from .given import check_parts, checked_set, place_of
from .history import History
from .loop import Samples, Task, Training
from .processes import is_first, settle
from .relay import begin_alike_
from .settings import Loop

__all__ = ["fit"]


def fit(
    model: nn.Module,
    train: Samples,
    test: Samples | None,
    task: Task,
    plan: Plan | Method | Mapping[str, Method] | None = None,
    layers: str | Sequence[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    cache: bool = False,
    workers: int = 0,
    tell: Tell = silent,
    **settings: Any,
) -> History:
    """Fine-tune the planned layers of a model on ``train``, judged on ``test`` after every epoch.

    ``plan`` and ``layers`` are what ``gf.apply_`` takes; without them, what has been applied before trains.

    Sets are map-style and give (image, target), or dictionaries of the two, as Hugging Face's do. The plan
    stays applied, and the frozen part accelerated; ``gf.restore_(model)`` takes both away and leaves the
    trained weights.

    >>> import torch, gradfilter as gf
    >>> model = gf.models.build("tiny", classes=2)
    >>> images = torch.randn(16, 3, 32, 32) + torch.arange(16).view(-1, 1, 1, 1) % 2
    >>> data = [(image, index % 2) for index, image in enumerate(images)]
    >>> history = gf.fit(model, data, None, gf.Classification(2), gf.GradientFilter(2), epochs=4, batch=8)
    >>> history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    True

    Args:
        folder: where checkpoints go, and with ``resume`` come from: then the training goes on as if it had
            never stopped, bit by bit. Without ``resume``, one that holds a checkpoint is refused.
        cache: compute the features of the frozen part once, and train from those; exact where ``train`` gives
            an image the same way each time, without augmentation.
        workers: processes that read the sets.
        settings: fields of ``Loop``: epochs, batch, lr, ..., but for label_smoothing, which the task has.
    """
    known = [field.name for field in fields(Loop)]
    for name in settings:
        if name not in known:
            raise GradFilterError(f"fit has no setting {name}.{nearest(name, known)}")
    loop = Loop(**settings)
    if cache and loop.precision == "bf16":
        raise GradFilterError("fit's cache keeps features of float32; leave precision='bf16' or cache out.")
    check_parts(model, task, loop, workers, has_test=test is not None)
    train = checked_set(train, "train", model, task, loop.precision)
    test = None if test is None else checked_set(test, "test", model, task, loop.precision)
    place = place_of(folder, resume)
    begin_alike_(model)  # a method may look at the weights
    if plan is not None:
        apply_(model, plan, layers)
    elif layers is not None:
        raise GradFilterError("fit's layers need a method to train with, such as gf.GradientFilter(patch=2).")
    accelerate_if_possible_(model)
    forward = None
    if cache:
        kept = FeatureCache(model, train, batch=loop.batch, workers=workers, tell=tell)
        train, forward = kept, kept.tail
        test = (
            None if test is None else FeatureCache(model, test, batch=loop.batch, workers=workers, tell=tell)
        )
    training = Training(
        model, train, test, task, loop, forward=forward, folder=place, workers=workers, tell=tell
    )
    with held(place) if place is not None and is_first() else nullcontext():
        if resume:
            training.resume()
        history = training.run()
    settle()
    return history
