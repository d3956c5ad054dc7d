"""A trained run, opened again: its model with the best or the last weights."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from ..data.samples import Task
from ..data.transforms import Transform, test_transform
from ..errors import GradFilterError
from ..merging import merge_
from ..models import build
from ..surgery import apply_
from .building import plan_of
from .run_folder import RunFolder
from .settings import Config

__all__ = ["Saved", "open_run"]


@dataclass(frozen=True)
class Saved:
    """A model, plain, and what it was trained on."""

    config: Config
    model: nn.Module
    classes: tuple[str, ...]
    ignore: int

    @property
    def task(self) -> Task:
        return "segment" if self.config.task == "segment" else "classify"

    @property
    def transform(self) -> Transform:
        return test_transform(self.task, self.config.size, self.ignore)


def open_run(folder: str | os.PathLike[str], which: str = "best") -> Saved:
    """The run in a folder, with its best or its last weights."""
    run = RunFolder.open(folder)
    config, file = run.settings(), run.best if which == "best" else run.last
    if not file.exists():
        raise GradFilterError(
            f"{folder} has no weights yet: it was stopped in its first epoch; go on with it by "
            f"gradfilter train --resume {folder}."
        )
    classes = tuple(run.found["classes"])
    model = _adapted(config, file, len(classes)) or build(config.model, classes=len(classes), weights=file)
    model = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Saved(replace(config, out=str(Path(folder))), model, classes, run.found["ignore"])


def _adapted(config: Config, file: Path, classes: int) -> nn.Module | None:
    """A model that was trained with adapters, merged where that can be; None if it has none."""
    state = load_file(file)
    if not any("gradfilter_" in name for name in state):
        return None
    model = build(config.model, classes=classes)
    apply_(model, plan_of(config, model)).load_state_dict(state)
    with suppress(GradFilterError):  # one that no plain model can do
        merge_(model)
    return model
