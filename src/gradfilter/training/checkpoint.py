"""Checkpoints that a kill at any instant leaves whole: tensors as safetensors, all else as JSON.

``step-N.safetensors`` is written and synced first; ``checkpoint.json``, which names it with its checksum, is
then put in place in one stroke, and only then the file before is removed. No pickle is ever read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import GradFilterError
from ..files import sync
from ..state import load_method_state_, method_state

__all__ = ["INDEX", "Checkpoint", "load_training_", "read", "training_tensors", "write"]

INDEX = "checkpoint.json"


class Checkpoint(NamedTuple):
    """Tensors by name, and facts that JSON can hold."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Put a checkpoint in the place of the one that is there; ``facts`` has the ``step``."""
    file = folder / f"step-{facts['step']}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".tmp")
        save_file({name: _apart(tensor) for name, tensor in tensors.items()}, partial)
        sync(partial)
        checksum = _checksum(partial)
        partial.replace(file)
        index = folder / f"{INDEX}.tmp"
        index.write_text(json.dumps({"file": file.name, "sha256": checksum, "facts": dict(facts)}))
        sync(index)
        index.replace(folder / INDEX)
        sync(folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
        before = " The one before it is whole." if (folder / INDEX).exists() else ""
        raise GradFilterError(
            f"The checkpoint {file} cannot be written: {why}.{before} Make room and go on with --resume."
        ) from error
    for old in folder.glob("step-*"):
        if old != file:
            old.unlink(missing_ok=True)


def read(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None if there is none."""
    try:
        index = json.loads((folder / INDEX).read_text())
        file, checksum, facts = folder / index["file"], index["sha256"], index["facts"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GradFilterError(f"{folder / INDEX} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GradFilterError(f"{folder / INDEX} is damaged ({error}); start the run anew.") from error
    try:
        if _checksum(file) != checksum:
            raise GradFilterError(
                f"{file} is not what was written: its checksum differs; start the run anew."
            )
        return Checkpoint(load_file(file), facts)
    except (OSError, SafetensorError) as error:
        raise GradFilterError(f"{file} cannot be read ({error}); start the run anew.") from error


def training_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that a training changes: the model, what its methods remember, and the optimizer."""
    return {
        **{f"model/{name}": value for name, value in model.state_dict().items()},
        **{f"method/{name}": value for name, value in method_state(model).items()},
        **{f"optimizer/{name}": value for name, value in _optimizer_tensors(optimizer)},
    }


def load_training_(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give a model and an optimizer back what ``training_tensors`` found in them."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "method": {}, "optimizer": {}}
    for path, value in tensors.items():
        part, _, name = path.partition("/")
        parts[part][name] = value
    state = optimizer.state_dict()
    state["state"] = {}
    for path, value in parts["optimizer"].items():
        index, _, name = path.partition("/")
        state["state"].setdefault(int(index), {})[name] = value
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    buffers = ((int(path.partition("/")[0]), value) for path, value in parts["optimizer"].items())
    try:
        if any(value.dim() and value.shape != shapes[index] for index, value in buffers):
            raise ValueError
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError):
        raise GradFilterError(
            "The checkpoint is of another model, or other layers trained; go on with those, or start anew."
        ) from None
    load_method_state_(model, parts["method"])


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor | int | float):  # None is what torch starts with
                yield f"{index}/{name}", torch.as_tensor(value)


def _apart(tensor: Tensor) -> Tensor:
    """A copy: safetensors refuses tensors that share memory, as tied weights do."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
