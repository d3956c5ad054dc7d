"""Pictures decoded once: later epochs read pixels instead of JPEG files."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import GradFilterError
from ..loading import read
from ..plans import format_bytes
from ..progress import Tell, silent
from .images import upright_rgb
from .samples import Samples
from .transforms import MARGIN

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Bounded", "Decoded", "bounded"]

_CHUNK = 64 << 20


def bounded(picture: Image.Image, shorter: int, *, is_mask: bool = False) -> Image.Image:
    """A picture whose shorter side is ``shorter`` at most; a smaller one as it is."""
    from PIL import Image

    scale = shorter / min(picture.size)
    if scale >= 1:
        return picture
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.NEAREST if is_mask else Image.Resampling.BILINEAR)


class Bounded(Dataset[tuple[Any, Any]]):
    """Samples read from their files each time, with the same pixels that ``Decoded`` keeps of them."""

    def __init__(self, samples: Samples, size: int) -> None:
        self.samples, self.shorter = samples, _shorter(size)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        from PIL import Image

        picture, target = self.samples[index]
        small = bounded(upright_rgb(picture), self.shorter)
        if not isinstance(target, Image.Image):
            return small, target
        return small, bounded(target, self.shorter, is_mask=True)


def _shorter(size: int) -> int:
    return round(MARGIN * size)


class Decoded(Dataset[tuple[Any, Any]]):
    """Samples whose pictures are decoded here, once, and kept as bytes at a bounded size.

    Args:
        size: what the network takes; the shorter side is kept at 1.15 times this, and never made larger.
        folder: where to keep the pixels, as a file that is mapped into memory; in memory itself if not said.
            A file there of the same pictures, unchanged since, is used again.
        budget: the most bytes to keep; if not said, half of the memory, or what is free on the disk.
        workers: processes that decode.
    """

    def __init__(
        self,
        samples: Samples,
        size: int,
        folder: str | os.PathLike[str] | None = None,
        budget: int | None = None,
        *,
        workers: int = 0,
        tell: Tell = silent,
    ) -> None:
        self._file = None if folder is None else Path(folder) / f"decoded-{_digest(samples, size)}.bin"
        if self._file is None or not self._find():
            self._fill(Bounded(samples, size), budget, workers, tell)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        from PIL import Image

        chunk, start, height, width, label = self._rows[range(len(self))[index]].tolist()
        pixels = self._chunks[chunk].numpy()[start:]
        area = height * width
        picture = Image.fromarray(pixels[: 3 * area].reshape(height, width, 3).copy())
        if label >= 0:
            return picture, label
        return picture, Image.fromarray(pixels[3 * area : 4 * area].reshape(height, width).copy())

    def files(self, index: int) -> tuple[Path, ...]:
        """None: the files are not read again."""
        return ()

    @property
    def labels(self) -> list[int]:
        labels: list[int] = self._rows[:, 4].tolist()
        return labels

    def _fill(self, samples: Bounded, budget: int | None, workers: int, tell: Tell) -> None:
        count, room = len(samples), budget or _room(self._file)
        store: _Store = _Memory() if self._file is None else _OnDisk(self._file)
        # a generator of its own: the one of the user's training is not touched
        loader = DataLoader(_Bytes(samples), batch_size=None, num_workers=workers, generator=Generator())
        rows, used = torch.zeros(count, 5, dtype=torch.int64), 0
        try:
            for index, (pixels, height, width, label) in enumerate(read(loader)):
                used += len(pixels)
                if used > room:
                    raise GradFilterError(_too_big(used, index + 1, count, room, self._file))
                rows[index] = torch.tensor([*store.add(pixels), height, width, label])
                tell("decoding pictures", index + 1, count)
            self._rows, self._chunks = rows, store.finish(rows)
        except OSError as error:
            raise GradFilterError(
                f"{self._file} cannot be written: {error.strerror or error}; give another folder, or none."
            ) from error
        finally:
            store.close()

    def _find(self) -> bool:
        """Use what the folder has; whether it has it."""
        assert self._file is not None  # noqa: S101
        try:
            self._rows = load_file(_index_of(self._file))["rows"]
            self._chunks = _mapped(self._file)
        except (OSError, SafetensorError, KeyError):
            return False
        _, start, height, width, label = self._rows[-1].tolist()
        return bool(start + height * width * (3 if label >= 0 else 4) == len(self._chunks[0]))

    def __getstate__(self) -> dict[str, Any]:
        # a mapped file is mapped again by each process, instead of being copied
        return {name: value for name, value in self.__dict__.items() if name != "_chunks" or not self._file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file:
            self._chunks = _mapped(self._file)


class _Bytes(Dataset[tuple[Tensor, int, int, int]]):
    """Each sample as bytes, picture before mask, with height, width, and label or -1."""

    def __init__(self, samples: Bounded) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int, int]:
        from PIL import Image

        picture, target = self.samples[index]
        pixels: Any = np.asarray(picture).reshape(-1)
        if not isinstance(target, Image.Image):
            return torch.from_numpy(pixels.copy()), picture.height, picture.width, int(target)
        mask: Any = np.asarray(target).reshape(-1)
        return torch.from_numpy(np.concatenate([pixels, mask])), picture.height, picture.width, -1


class _Store(Protocol):
    def add(self, pixels: Tensor) -> tuple[int, int]:
        """Keep bytes; the number of their chunk, and where they begin in it."""

    def finish(self, rows: Tensor) -> list[Tensor]:
        """All chunks, to be read."""

    def close(self) -> None:
        """Leave nothing half done behind."""


class _Memory:
    """Chunks, so that growing copies nothing."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._used = 0

    def add(self, pixels: Tensor) -> tuple[int, int]:
        if not self._chunks or self._used + len(pixels) > len(self._chunks[-1]):
            self._chunks.append(torch.empty(max(_CHUNK, len(pixels)), dtype=torch.uint8))
            self._used = 0
        start = self._used
        self._used += len(pixels)
        self._chunks[-1][start : self._used] = pixels
        return len(self._chunks) - 1, start

    def finish(self, rows: Tensor) -> list[Tensor]:
        return self._chunks

    def close(self) -> None:
        """Memory has nothing to close, and nothing half-written to take away."""


class _OnDisk:
    """One file, which gets its name when it is whole, and its index after that."""

    def __init__(self, file: Path) -> None:
        self._file, self._part = file, file.with_suffix(f".{os.getpid()}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._part.open("wb")
        except OSError as error:
            raise GradFilterError(
                f"{file} cannot be written: {error.strerror or error}; give another folder, or none."
            ) from error

    def add(self, pixels: Tensor) -> tuple[int, int]:
        start = self._stream.tell()
        self._stream.write(pixels.numpy().data)
        return 0, start

    def finish(self, rows: Tensor) -> list[Tensor]:
        self._stream.close()
        index = self._part.with_suffix(".index")
        save_file({"rows": rows}, index)
        self._part.replace(self._file)
        index.replace(_index_of(self._file))
        return _mapped(self._file)

    def close(self) -> None:
        self._stream.close()
        self._part.unlink(missing_ok=True)


def _index_of(file: Path) -> Path:
    return file.with_suffix(".safetensors")


def _mapped(file: Path) -> list[Tensor]:
    return [torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)]


def _digest(samples: Samples, size: int) -> str:
    """Names samples by their files as they are now, and by what is made of them."""
    digest = hashlib.blake2b(pickle.dumps((size, samples)), digest_size=8)
    for part in _facts(samples):
        digest.update(part.encode())
    return digest.hexdigest()


def _facts(samples: Samples) -> Iterator[str]:
    if not hasattr(samples, "files"):  # a set of other people's
        return
    for index in range(len(samples)):
        for file in samples.files(index):
            try:
                facts = file.stat()
            except OSError:  # its reader will say so
                continue
            yield f"{index}|{facts.st_size}|{facts.st_mtime_ns}|"


def _room(file: Path | None) -> int:
    """Half of the memory, or what is free on the disk; no limit where the system does not say."""
    if file is not None:
        there = next((path for path in file.absolute().parents if path.is_dir()), Path("."))
        return shutil.disk_usage(there).free
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2**63


def _too_big(used: int, done: int, count: int, room: int, file: Path | None) -> str:
    all_of_it = format_bytes(used * count // done)
    instead = "a folder on a disk with room, " if file is None else ""
    return (
        f"The decoded pictures take about {all_of_it}, more than {format_bytes(room)}; give {instead}"
        "a larger budget or a smaller size, or leave decoding to each epoch."
    )
