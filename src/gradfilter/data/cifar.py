"""CIFAR-10 and CIFAR-100: the official archives, for Python and binary, packed or unpacked."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GradFilterError
from .request import Request, check_labels
from .samples import Arrays, Data

__all__ = ["has_cifar10", "has_cifar100", "open_cifar10", "open_cifar100"]

_TEN = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "batches.meta", "label_names"
_HUNDRED = ["train"], ["test"], "meta", "fine_label_names"


def has_cifar10(path: Path) -> bool:
    return _holds(path, "cifar-10-", "data_batch_1")


def has_cifar100(path: Path) -> bool:
    return _holds(path, "cifar-100-", "fine_label_names.txt") or (path / "meta").is_file()


def open_cifar10(request: Request) -> Data:
    return _open(request, "cifar10", *_TEN, label_bytes=1)


def open_cifar100(request: Request) -> Data:
    return _open(request, "cifar100", *_HUNDRED, label_bytes=2)  # a coarse label before the fine one


def _holds(path: Path, archive: str, member: str) -> bool:
    if path.is_file():
        return path.name.startswith(archive) and path.name.endswith((".tar.gz", ".tgz", ".tar"))
    if any((path / name).is_file() for name in (member, f"{member}.bin")):
        return True
    return path.is_dir() and any(child.name.startswith(archive) for child in path.iterdir())


def _open(
    request: Request, name: str, train: list[str], test: list[str], meta: str, key: str, *, label_bytes: int
) -> Data:
    archive = "cifar-100-" if name == "cifar100" else "cifar-10-"
    files = _files(request.path, archive)
    if train[0] in files:
        classes = [str(c) for c in _unpickle(files, meta, request.path)[key]]
        sides = [[_pickled(files, part, request.path) for part in parts] for parts in (train, test)]
    elif f"{train[0]}.bin" in files:
        text = f"{meta}.txt" if meta != "meta" else "fine_label_names.txt"
        classes = _get(files, text, request.path).decode().split()
        sides = [
            [_binary(_get(files, f"{part}.bin", request.path), label_bytes, request.path) for part in parts]
            for parts in (train, test)
        ]
    else:
        raise GradFilterError(
            f"{request.path} has neither {train[0]} nor {train[0]}.bin, so it is not {name}."
        )
    made = []
    for parts in sides:
        images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        check_labels(labels, len(classes), request.path)
        made.append(Arrays(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels))
    return Data(name, "classify", tuple(classes), *made)


def _files(path: Path, archive: str) -> dict[str, Any]:
    """The files of a data set by name, each as a function that reads it."""
    if path.is_dir():
        inside = sorted(child for child in path.iterdir() if child.name.startswith(archive))
        if inside:  # folders before archives, which are not unpacked then
            return _files(min(inside, key=lambda child: not child.is_dir()), archive)
        return {file.name: file.read_bytes for file in path.iterdir() if file.is_file()}
    try:
        with tarfile.open(path) as tar:
            return {name: io.BytesIO(content).read for name, content in _members(tar)}
    except (OSError, EOFError, tarfile.TarError) as error:
        raise GradFilterError(f"{path} is not a whole tar archive; fetch it again.") from error


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        stream = tar.extractfile(member)
        if stream is not None:
            yield Path(member.name).name, stream.read()


def _get(files: dict[str, Any], name: str, path: Path) -> bytes:
    if name not in files:
        raise GradFilterError(f"{path} lacks the file {name}; unpack the archive again.")
    content: bytes = files[name]()
    return content


def _binary(content: bytes, label_bytes: int, path: Path) -> tuple[Any, Any]:
    row = label_bytes + 3072
    if not content or len(content) % row:
        raise GradFilterError(
            f"{path} has a file of {len(content)} bytes, not of pictures of {row}; fetch it again."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return rows[:, label_bytes:], rows[:, label_bytes - 1].astype(np.int64)


def _pickled(files: dict[str, Any], name: str, path: Path) -> tuple[Any, Any]:
    batch = _unpickle(files, name, path)
    labels = batch["fine_labels"] if "fine_labels" in batch else batch["labels"]
    return batch["data"], np.asarray(labels, np.int64)


class _PlainUnpickler(pickle.Unpickler):
    """Pickles of numpy arrays in plain containers, and nothing else: others could run any code."""

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "_frombuffer", "encode", "scalar"})

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def _unpickle(files: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    try:
        found = _PlainUnpickler(io.BytesIO(_get(files, name, path)), encoding="latin1").load()
        return {key if isinstance(key, str) else key.decode(): value for key, value in found.items()}
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise GradFilterError(f"{path}: {name} is not a file of CIFAR ({error}); fetch it again.") from error
