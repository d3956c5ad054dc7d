"""What ``gf.fit`` is given, looked at before anything long begins."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..errors import GradFilterError
from ..seeding import seeded
from . import checkpoint
from .items import as_pairs
from .processes import any_of
from .settings import Loop, check_kind, shown
from .tasks import Classification, Segmentation

__all__ = ["check_parts", "checked_set", "place_of"]


def check_parts(model: Any, task: Any, loop: Loop, workers: Any, has_test: bool) -> None:
    """That they are what they are called."""
    if not isinstance(model, nn.Module):
        raise GradFilterError(f"model must be a torch.nn.Module, not {shown(model)}.")
    needed = ("loss", "count", *(["score"] if has_test else []))
    if isinstance(task, type) or not all(callable(getattr(task, name, None)) for name in needed):
        raise GradFilterError(
            "task must be gf.Classification(classes) or gf.Segmentation(classes), or have "
            f"{', '.join(needed)} as they do; it is {shown(task)}."
        )
    if loop.label_smoothing:
        raise GradFilterError(
            "fit leaves label_smoothing to the task; give it there, as in gf.Classification(classes, "
            f"label_smoothing={loop.label_smoothing})."
        )
    check_kind("workers", workers, int)
    if workers < 0:
        raise GradFilterError(f"workers must be at least 0, not {workers}.")


def place_of(folder: Any, resume: bool) -> Path | None:
    """Where checkpoints go, if nobody else's is there."""
    if not isinstance(folder, str | os.PathLike | None):
        raise GradFilterError(f"folder must be a path, not {shown(folder)}.")
    if folder is None and resume:
        raise GradFilterError("resume needs the folder of the training to go on with.")
    place = None if folder is None else Path(folder)
    for path in () if place is None else (place, *place.parents):
        if path.is_file():
            raise GradFilterError(f"{folder} cannot be a folder, as {path} is a file; give another one.")
    is_there = place is not None and (place / checkpoint.INDEX).exists()
    if resume and not is_there:
        raise GradFilterError(f"There is no checkpoint in {folder} to go on from; leave resume out.")
    is_taken = is_there and not resume
    if any(any_of(is_taken)):  # asked together: the first of several processes may soon write one
        raise GradFilterError(
            f"{folder or 'The folder'} holds the checkpoint of an earlier training; go on with it "
            "by resume=True, or give another folder."
        )
    return place


def checked_set(samples: Any, name: str, model: nn.Module, task: Any, precision: str) -> Any:
    """A set as pairs, if the model can take its first image, and the task its first target."""
    pairs, (image, target) = as_pairs(samples, name)
    _check_image(image, name, model, precision)
    if type(task) in (Classification, Segmentation):  # other tasks may learn from anything
        try:
            task.targets(_batch_of(target), training=name == "train")
        except GradFilterError as error:
            raise GradFilterError(f"{name}: {error}") from None
    return pairs


def _check_image(image: Any, name: str, model: nn.Module, precision: str) -> None:
    batch = _batch_of(image)
    own = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if isinstance(batch, Tensor):
        if batch.dtype in own or _takes(model, batch, precision):
            return
        seen = f"of {_named(batch.dtype)}"
    elif batch is image:  # in no batch
        seen = shown(image)
    else:
        return
    raise GradFilterError(
        f"An image of {name} is {seen}; give the set a transform that makes "
        f"{_named((own or [torch.float32])[0])} tensors."
    )


def _batch_of(value: Any) -> Any:
    """A batch of it alone, as a DataLoader makes it; itself where that cannot be."""
    try:
        return default_collate([value])
    except TypeError:
        return value


def _takes(model: nn.Module, batch: Tensor, precision: str) -> bool:
    """Whether a model does something with numbers of another kind than its own, such as pictures of bytes."""
    is_training = model.training
    mixed = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    try:
        with torch.no_grad(), seeded(0), mixed:
            model.eval()(batch)
    except Exception:
        return False
    finally:
        model.train(is_training)
    return True


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
