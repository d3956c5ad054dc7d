"""The folder of a run, as docs/training.md describes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import GradFilterError
from ..exports import write_safetensors
from ..files import write
from ..locking import LOCK, held
from ..merging import without_adapters
from . import checkpoint
from .report import Report, plain, write_report
from .settings import Config

__all__ = ["RunFolder"]

_CONFIG, _METRICS, _BEST, _REPORT = "config.json", "metrics.jsonl", "best.json", "report.json"
_FOUND = {"classes", "ignore", "samples"}


class RunFolder:
    """What a run leaves behind. ``create`` makes a new one, ``open`` goes back to one that is there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder.create(f"{folder}/first", {"epochs": 2})
    ...     run.append({"epoch": 1, "loss": 0.7})
    ...     RunFolder.open(f"{folder}/first").config, run.epochs()
    ({'epochs': 2}, [{'epoch': 1, 'loss': 0.7}])
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, is_new: bool = False) -> None:
        self.path, self.config, self.is_new = path, dict(config), is_new

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> RunFolder:
        """A folder for a new run; refused where there is a run already, so that none is ever written over."""
        folder = Path(path)
        is_new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
        if any((folder / name).exists() for name in (_CONFIG, _METRICS, "checkpoint")):
            raise _taken(folder)
        run = cls(folder, plain(config), is_new=is_new)
        try:
            (folder / _CONFIG).open("x").close()  # of two that begin at once, one is the first
        except FileExistsError:
            raise _taken(folder) from None
        except OSError as error:
            raise _unwritable(folder, error) from None
        try:
            write(folder / _CONFIG, json.dumps(run.config, indent=1) + "\n")
        except GradFilterError:
            run.discard()
            raise
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that was begun."""
        folder = Path(path)
        try:
            config = json.loads((folder / _CONFIG).read_text())
        except OSError:
            raise GradFilterError(f"{folder} holds no run: it has no {_CONFIG} that can be read.") from None
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise GradFilterError(f"{folder / _CONFIG} is damaged; start the run anew under another name.")
        return cls(folder, config)

    def held(self) -> AbstractContextManager[None]:
        """Train in it, alone."""
        return held(self.path)

    def check_resumable(self) -> None:
        """That it goes on from a checkpoint, or from the start only where none can have been written yet."""
        seen = len(self.epochs())
        if (seen > 1 or (self.path / _REPORT).exists()) and not (self.checkpoint / checkpoint.INDEX).exists():
            raise GradFilterError(
                f"{self.path} has results of {seen} epochs, but no checkpoint to go on from; start a new run "
                f"on top of it: --weights {self.path}."
            )

    def discard(self) -> None:
        """Take the run away again, if nothing was trained yet: else it would be in the next one's way."""
        with suppress(OSError):  # it may hold what is not ours, or be gone with its disk
            if self.checkpoint.exists() or self.epochs():
                return
            for name in (_CONFIG, _METRICS, LOCK):
                (self.path / name).unlink(missing_ok=True)
            if self.is_new:
                shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
                self.path.rmdir()

    @property
    def found(self) -> dict[str, Any]:
        """What the run found out about its data, and decided by it."""
        facts = self.config.get("found")
        if not isinstance(facts, dict) or not facts.keys() >= _FOUND:
            raise GradFilterError(f"{self.path / _CONFIG} is damaged; start the run anew under another name.")
        return facts

    def note(self, **facts: Any) -> None:
        """Add to what the run found out."""
        self.config["found"] = self.found | facts
        write(self.path / _CONFIG, json.dumps(plain(self.config), indent=1) + "\n")

    def settings(self) -> Config:
        """The settings of the run, all of them spelled out."""
        values = {name: value for name, value in self.config.items() if name != "found"}
        return Config.of(values, f"{self.path / _CONFIG}")

    @property
    def checkpoint(self) -> Path:
        """Where the loop puts what it needs to go on."""
        return self.path / "checkpoint"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    def append(self, epoch: Mapping[str, Any]) -> None:
        """Add an epoch to the metrics, as one line that is on its way to the disk when this returns."""
        line = json.dumps(plain(epoch), allow_nan=False) + "\n"
        try:
            with (self.path / _METRICS).open("a") as stream:
                stream.write(line)
        except OSError as error:
            raise _unwritable(self.path / _METRICS, error) from None

    def epochs(self) -> list[dict[str, Any]]:
        """The metrics so far; a line that a kill left unfinished does not count."""
        try:
            lines = (self.path / _METRICS).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [entry for entry in map(_entry, lines) if entry is not None]

    def go_back(self, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Make the metrics those of a checkpoint's epochs: later lines go, a missing one comes back.

        A line that is there stays as it is: it may say more than the checkpoint does.
        """
        there = {entry["epoch"]: entry for entry in self.epochs()}
        kept = [there.get(epoch["epoch"], plain(epoch)) for epoch in epochs]
        write(self.path / _METRICS, "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in kept))

    def save(self, model: nn.Module, *, best: bool) -> None:
        """Write the weights, for the plain model, as the last ones, and as the best if they are."""
        whole = without_adapters(model)
        for file in (self.last, self.best) if best else (self.last,):
            write_safetensors(whole, file)

    def note_best(self, epoch: Mapping[str, Any], confusion: Sequence[Sequence[int]] | None) -> None:
        """Write down the scores of the best epoch, and the confusion matrix if there is one."""
        write(self.path / _BEST, json.dumps(plain({**epoch, "confusion": confusion})) + "\n")

    def best_noted(self) -> dict[str, Any]:
        """What ``note_best`` wrote; nothing if it did not."""
        try:
            noted = json.loads((self.path / _BEST).read_text())
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def write_report(self, report: Report) -> None:
        write_report(self.path, report)


def _entry(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "epoch" in found else None


def _taken(folder: Path) -> GradFilterError:
    return GradFilterError(
        f"{folder} holds a run already; go on with it by --resume {folder}, or give another name."
    )


def _unwritable(path: Path, error: OSError) -> GradFilterError:
    return GradFilterError(
        f"{path} cannot be written ({error.strerror or error}); make room, or give the run another folder."
    )
