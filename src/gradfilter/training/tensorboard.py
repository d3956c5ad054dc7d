"""The lines of metrics.jsonl as scalars for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ..optional import import_optional

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes each epoch's numbers to event files in a folder; of several processes, the first has one.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TensorBoard(folder) as board:
    ...         board.append({"epoch": 1, "loss": 0.7, "accuracy": 71.0})
    ...     len(list(Path(folder).glob("events.out.tfevents.*")))
    1

    Args:
        epochs: those that a resumed training goes on from. What the folder has beyond them goes, so that each
            epoch is there once. The last of them is written again: a kill may have come before it was.
    """

    def __init__(self, folder: str | os.PathLike[str], epochs: Sequence[Mapping[str, Any]] = ()) -> None:
        import_optional("tensorboard", "tensorboard")
        last = epochs[-1:]
        first_new = last[0]["epoch"] if last else 0
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(os.fspath(folder), purge_step=first_new)
        for epoch in last:
            self.append(epoch)

    def append(self, epoch: Mapping[str, Any]) -> None:
        """Add an epoch, a line of the metrics; it is on its way to the disk when this returns."""
        for name, value in epoch.items():
            if name != "epoch" and isinstance(value, int | float):  # null is what was not finite
                self._writer.add_scalar(name, value, epoch["epoch"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
