"""A trained run, opened again: its model with the best or the last weights."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ..data.samples import Task
from ..data.transforms import Transform, test_transform
from ..errors import GradFilterError
from ..models import build
from ..surgery import apply_
from .building import plan_of
from .run_folder import RunFolder
from .settings import Config

__all__ = ["Saved", "holds_adapters", "open_run", "weights_of"]


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
    config, file, classes = run.settings(), weights_of(run, which), tuple(run.found["classes"])
    if holds_adapters(file):
        model = build(config.model, classes=len(classes))
        apply_(model, plan_of(config, model)).load_state_dict(load_file(file))
    else:
        model = build(config.model, classes=len(classes), weights=file)
    model = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Saved(replace(config, out=str(Path(folder))), model, classes, run.found["ignore"])


def weights_of(run: RunFolder, which: str) -> Path:
    """The file of a run's best or last weights."""
    file = run.best if which == "best" else run.last
    if not file.exists() and run.epochs():
        raise GradFilterError(f"{file} is gone; put it back, or train anew.")
    if not file.exists():
        raise GradFilterError(
            f"{run.path} has no weights yet: it was stopped in its first epoch; go on with it by "
            f"gradfilter train --resume {run.path}."
        )
    return file


def holds_adapters(file: Path) -> bool:
    """Whether weights have more than the plain model takes: adapters that could not be merged."""
    with suppress(SafetensorError), safe_open(file, "pt") as opened:  # what is damaged, its reader tells
        names = opened.keys()
        return any("gradfilter_" in name for name in names)
    return False
