"""Rows of bytes, one per image: how features lie in a row, and rows kept in memory or on disk.

On disk rows are a log that only grows: ``features.bin`` has the rows, ``images.bin`` the digest of the image
each row is of, ``cache.json`` what made them. A row counts once its digest is written, and that is after the
row itself has reached the disk: whenever a process is killed, what counts is whole, and the next one goes on.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from .errors import GradFilterError

__all__ = ["STORES", "DiskRows", "HeldRows", "MemoryRows", "RowLayout", "Rows", "RowsFull", "digest"]

STORES = ("float32", "float16", "bfloat16", "int8")
DIGEST = 16  # bytes
_LOGS = ("images.bin", "features.bin")
_ALIGN = 64  # bytes; a cache line, and a multiple of the size of any number
_WORTH_A_SCALE = 16  # values: where fewer would share a scale, scales would outweigh what int8 saves


def digest(*parts: str | Tensor) -> bytes:
    """Sixteen bytes that are different for different strings, shapes, types or numbers; strides do not count.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> (
    ...     digest(x) == digest(x.t().contiguous().t()),
    ...     digest(x) == digest(x.view(3, 2)),
    ...     digest(x) == digest(x + 1),
    ... )
    (True, False, False)
    """
    hasher = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        if isinstance(part, Tensor):
            plain = part.detach().cpu().contiguous()
            hasher.update(f"{plain.dtype} {tuple(plain.shape)};".encode())
            hasher.update(_memory(plain))
        else:
            hasher.update(f"{len(part)} {part};".encode())
    return hasher.digest()


def _memory(x: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous tensor, not copied; torch needs numpy for that, the package does not."""
    return (ctypes.c_char * x.nbytes).from_address(x.data_ptr() if x.nbytes else ctypes.addressof(_NOTHING))


_NOTHING = ctypes.c_char()


@dataclass(frozen=True)
class Field:
    """A tensor that every row has, at the same place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def of(self, rows: Tensor) -> Tensor:
        """The field of all rows, a view."""
        return rows[:, self.offset : self.end].view(self.dtype).view(len(rows), *self.shape)


@dataclass(frozen=True)
class FeatureLayout:
    """One feature in a row: its values, channels last if that is how they came, and for int8 their scales."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    values: Field
    scales: Field | None

    @classmethod
    def of(cls, feature: Tensor, store: str, offset: int) -> FeatureLayout:
        channels_last = _is_channels_last(feature)
        stored = feature.movedim(1, -1) if channels_last else feature
        narrow = feature.is_floating_point() and feature.dtype.itemsize > getattr(torch, store).itemsize
        narrow = narrow and feature.dim() > 1  # a number per image is not worth it
        # float32 is for "as it is": a float64 model loses nothing either
        dtype = getattr(torch, store) if narrow and store != "float32" else feature.dtype
        values = Field(tuple(stored.shape[1:]), dtype, offset)
        scales = None
        if dtype == torch.int8:
            shape = tuple(stored[:1].amax(_sharing(stored, channels_last), keepdim=True).shape[1:])
            scales = Field(shape, torch.float32, _aligned(values.end))
        return cls(tuple(feature.shape[1:]), feature.dtype, channels_last, values, scales)

    @property
    def fields(self) -> tuple[Field, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)

    def encode(self, feature: Tensor, rows: Tensor) -> None:
        stored = feature.movedim(1, -1) if self.channels_last else feature
        if self.scales is not None:
            peaks = stored.abs().amax(_sharing(stored, self.channels_last), keepdim=True).float()
            scales = self.scales.of(rows).copy_(peaks / 127)
            stored = (stored / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_()
        written = self.values.of(rows).copy_(stored)
        if self.values.dtype != self.dtype:
            self._check_range(feature, written if self.scales is None else scales)

    def _check_range(self, feature: Tensor, written: Tensor) -> None:
        if not written.isfinite().all():
            raise GradFilterError(
                f"A feature of {feature.abs().max().item():.3g} cannot be kept as "
                f"{str(self.values.dtype).removeprefix('torch.')}; cache with store='float32' or 'bfloat16'."
            )

    def decode(self, stored: Sequence[Tensor]) -> Tensor:
        feature = stored[0].to(self.dtype) if self.scales is None else torch.mul(*stored).to(self.dtype)
        return feature.movedim(-1, 1) if self.channels_last else feature


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() in (4, 5) and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _sharing(stored: Tensor, channels_last: bool) -> tuple[int, ...]:
    """The dimensions along which values share a scale: those of the map, or all where the map is small."""
    every = range(1, stored.dim())
    in_map = every[:-1] if channels_last else every[1:]
    return tuple(in_map if math.prod(stored.shape[d] for d in in_map) >= _WORTH_A_SCALE else every)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class RowLayout:
    """How the features of one image lie in a row.

    >>> maps = torch.rand(2, 8, 5, 5).to(memory_format=torch.channels_last)
    >>> layout = RowLayout.of([maps], "int8")
    >>> rows = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    >>> layout.encode([maps], rows)
    >>> [(tuple(x.shape), x.dtype) for x in layout.fields(rows)]
    [((2, 5, 5, 8), torch.int8), ((2, 1, 1, 8), torch.float32)]
    >>> again = layout.decode(layout.fields(rows))[0]
    >>> (
    ...     again.stride() == maps.stride(),
    ...     bool(((again - maps).abs() <= maps.amax((2, 3), True) / 254 + 1e-6).all()),
    ... )
    (True, True)
    """

    features: tuple[FeatureLayout, ...]

    @classmethod
    def of(cls, features: Sequence[Tensor], store: str) -> RowLayout:
        layouts, offset = [], 0
        for feature in features:
            layouts.append(FeatureLayout.of(feature, store, offset))
            offset = _aligned(layouts[-1].fields[-1].end)
        return cls(tuple(layouts))

    @property
    def row_bytes(self) -> int:
        return _aligned(max(1, self.features[-1].fields[-1].end))

    def encode(self, features: Sequence[Tensor], rows: Tensor) -> None:
        """Write a batch of features into rows."""
        for layout, feature in zip(self.features, features, strict=True):
            layout.encode(feature, rows)

    def fields(self, rows: Tensor) -> tuple[Tensor, ...]:
        """All that the rows hold, as views; no copy."""
        return tuple(field.of(rows) for layout in self.features for field in layout.fields)

    def decode(self, fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The features that fields are of, in the types and layouts in which they came."""
        parts = iter(fields)
        return tuple(layout.decode([next(parts) for _ in layout.fields]) for layout in self.features)

    def describe(self) -> list[dict[str, Any]]:
        """What rows with another layout could not be told from, ready for JSON."""
        return [
            {
                "shape": list(layout.shape),
                "dtype": str(layout.dtype),
                "channels_last": layout.channels_last,
                "kept": [[list(field.shape), str(field.dtype), field.offset] for field in layout.fields],
            }
            for layout in self.features
        ]


class RowsFull(Exception):  # noqa: N818  never seen by users
    """There is no room for more rows."""


class Rows(ABC):
    """Rows found by the digest of their image; they are added and never changed."""

    def __init__(self, layout: RowLayout, limit: int) -> None:
        self.layout, self.limit = layout, limit
        self.index: dict[bytes, int] = {}
        self._files = ExitStack()

    def add(self, digests: Sequence[bytes], features: Sequence[Tensor]) -> None:
        """Keep the features of some images that are not there yet."""
        if len(self.index) + len(digests) > self.limit:
            raise RowsFull
        self._write(digests, features)
        self.index.update(zip(digests, range(len(self.index), self.limit), strict=False))

    @abstractmethod
    def _write(self, digests: Sequence[bytes], features: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows."""

    @abstractmethod
    def finished(self) -> HeldRows:
        """All rows, to be read."""

    def close(self) -> None:
        """Let other processes add rows."""
        self._files.close()


class MemoryRows(Rows):
    """Rows in one tensor that is allocated once."""

    def __init__(self, layout: RowLayout, limit: int) -> None:
        super().__init__(layout, limit)
        self._rows = torch.empty(limit, layout.row_bytes, dtype=torch.uint8)

    def _write(self, digests: Sequence[bytes], features: Sequence[Tensor]) -> None:
        first = len(self.index)
        self.layout.encode(features, self._rows[first : first + len(digests)])

    def clear(self) -> None:
        self.index.clear()

    def finished(self) -> HeldRows:
        return HeldRows(self._rows)


class DiskRows(Rows):
    """Rows in a folder, added by one process at a time; rows that anything but ``about`` made are removed."""

    def __init__(self, layout: RowLayout, limit: int, folder: Path, about: dict[str, Any]) -> None:
        super().__init__(layout, limit)
        self._folder, self._about = folder, json.dumps(about, indent=1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _lock(self._file("lock", "ab"))
            if self._is_ours():
                self._open()
            else:
                self.clear()
        except OSError as error:
            self.close()
            raise _refused(folder, error) from None

    def _file(self, name: str, mode: str) -> IO[bytes]:
        return cast(IO[bytes], self._files.enter_context(open(self._folder / name, mode)))

    def _is_ours(self) -> bool:
        try:
            # compared as text, never interpreted: rows that anything else made are of no use
            same = (self._folder / "cache.json").read_text() == self._about
        except (FileNotFoundError, UnicodeDecodeError):
            return False
        return same and all((self._folder / name).exists() for name in _LOGS)

    def clear(self) -> None:
        # cache.json goes first and comes last: it never stands beside rows that it does not describe.
        # New files instead of emptied ones: a process that still reads the old rows keeps them.
        for name in ("cache.json", *_LOGS):
            (self._folder / name).unlink(missing_ok=True)
        for name in _LOGS:
            (self._folder / name).touch()
        unfinished = self._folder / "cache.json.unfinished"
        with open(unfinished, "w") as file:
            file.write(self._about)
            _settle(file)
        unfinished.rename(self._folder / "cache.json")
        self._open()

    def _open(self) -> None:
        self._images, self._features = (self._file(name, "r+b") for name in _LOGS)
        known = self._images.read()
        whole = min(len(known) // DIGEST, os.fstat(self._features.fileno()).st_size // self.layout.row_bytes)
        self.index = {known[i * DIGEST : (i + 1) * DIGEST]: i for i in range(whole)}
        # what a killed process left behind the last whole row is written over
        for file, width in ((self._images, DIGEST), (self._features, self.layout.row_bytes)):
            file.truncate(whole * width)
            file.seek(whole * width)

    def _write(self, digests: Sequence[bytes], features: Sequence[Tensor]) -> None:
        rows = torch.zeros(len(digests), self.layout.row_bytes, dtype=torch.uint8)
        self.layout.encode(features, rows)
        try:
            for file, content in ((self._features, _memory(rows)), (self._images, b"".join(digests))):
                file.write(content)
                _settle(file)  # before its digest says that a row is there, it is
        except OSError as error:
            raise _refused(self._folder, error) from None

    def finished(self) -> MappedRows:
        return MappedRows(self._folder / "features.bin", len(self.index), self.layout.row_bytes)


@dataclass
class HeldRows:
    """Rows that are complete, to be read."""

    rows: Tensor


class MappedRows(HeldRows):
    """Rows of a file, mapped into memory; a copy sent to another process maps the file again."""

    def __init__(self, file: Path, count: int, row_bytes: int) -> None:
        self._what = (file, count, row_bytes)
        self._identity = _identity(file)
        self._map()

    def _map(self) -> None:
        file, count, row_bytes = self._what
        # not shared: even a write by mistake stays in this process
        flat = torch.from_file(str(file), shared=False, size=count * row_bytes, dtype=torch.uint8)
        self.rows = flat.view(count, row_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"_what": self._what, "_identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        file = self._what[0]
        if not file.exists() or _identity(file) != self._identity:
            raise GradFilterError(
                f"The feature cache in {file.parent} was replaced while it was in use; build it again."
            )
        self._map()


def _identity(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_dev, facts.st_ino


def _settle(file: IO[Any]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _lock(file: IO[bytes]) -> None:
    """Wait until no other process adds rows; the lock goes with its file, also when the process is killed."""
    if sys.platform != "win32":  # there, two builders at a time are for the user to avoid
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _refused(folder: Path, error: OSError) -> GradFilterError:
    return GradFilterError(
        f"Features cannot be kept in {folder}: {error.strerror or error}. "
        "Give another folder, or none to keep them in memory."
    )
