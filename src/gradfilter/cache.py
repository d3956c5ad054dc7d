"""Features of the frozen layers, computed once: the tail then trains without ever running them again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence, Sized
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .errors import GradFilterError, nearest
from .feature_reader import Reader, kind_of, length_of, number_of, sample_of
from .feature_store import STORES, DiskRows, MemoryRows, RowLayout, Rows, RowsFull, digest
from .loading import read
from .plans import format_bytes
from .progress import Tell, silent

if TYPE_CHECKING:
    from .splitting import Split

__all__ = ["FeatureCache", "view_of"]

Features = tuple[Tensor, ...]
_BATCH_EFFECT = (
    0.05  # of the largest feature: rounding, even int8's, is far below, dropout and batch norm above
)


class FeatureCache(Dataset[tuple[Features, Any]]):
    """A data set of what a model's frozen layers make of the images of another one, for training the rest.

    ``dataset`` is map-style and gives (image, label), where a label is anything. The features are computed
    here, by the batch, and looked up from then on; ``tail`` takes them to the model's output.

    >>> import gradfilter as gf
    >>> frozen, trained = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3)
    >>> model = nn.Sequential(frozen, nn.ReLU(), trained, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> _ = gf.apply_(model, gf.GradientFilter(patch=2), layers="last:1")
    >>> cache = FeatureCache(model, [(torch.rand(3, 17, 17), label) for label in range(8)], batch=4)
    >>> cache
    FeatureCache(8 images, 16.0 KiB of float32 in memory)
    >>> for features, labels in DataLoader(cache, batch_size=4, shuffle=True):
    ...     nn.functional.cross_entropy(cache.tail(features), labels).backward()

    Args:
        batch: images per run of the frozen layers. It changes the last bits of convolutions: with the batch
            size of the training, cached training is that of ``accelerate_`` without a cache, bit by bit.
        store: "float32" keeps what the frozen layers gave; "float16", "bfloat16" and "int8", with a scale per
            image and channel, are smaller.
        folder: where to keep the features; in memory if not said. What a folder has is used again if the same
            frozen layers made it of the same images; features of others are computed and added. One folder
            per data set: of features that a data set does not have, only as many stay as it has itself.
        budget: the most bytes to use; if not said, half of the memory, or what is free on the disk.
        views: how often each image is read, for data sets that augment at random. Every view is drawn from
            random numbers of its own, always the same; ``set_epoch`` decides which one is given.
        seed: of the order in which views are given.
        key: names the images where their content cannot, in a data set with random numbers that are not
            those of torch, numpy or random. Images with the same key and place count as the same.
        workers: processes that read the data set.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset[tuple[Tensor, Any]] | Sequence[tuple[Tensor, Any]],
        *,
        batch: int = 32,
        store: str = "float32",
        folder: str | os.PathLike[str] | None = None,
        budget: int | None = None,
        views: int = 1,
        seed: int = 0,
        key: str = "",
        workers: int = 0,
        tell: Tell = silent,
    ) -> None:
        _check_options(
            batch=(batch, 1),
            views=(views, 1),
            workers=(workers, 0),
            budget=(1 if budget is None else budget, 1),
        )
        if store not in STORES:
            raise GradFilterError(
                f"store must be one of {', '.join(STORES)}, not {store!r}.{nearest(store, STORES)}"
            )
        self._images, self._views, self._store, self._seed = length_of(dataset), views, store, seed
        self._folder = None if folder is None else Path(folder)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that persist see it change
        reader = Reader(dataset, views, key)
        self._prefix: _Prefix | None = _Prefix(model, batch)
        example = self._prefix.probe([sample_of(reader[n][0], n // views)[0] for n in (0, len(reader) - 1)])
        self._layout = RowLayout.of(example, store)
        limit = self._limit(example, budget)
        with closing(self._open(limit, self._prefix.identity)) as rows:
            # a generator of its own: the one of the user's training is not touched
            loader = DataLoader(reader, batch, collate_fn=list, num_workers=workers, generator=Generator())
            try:
                self._row_of, labels = _fill(rows, loader, views, self._prefix, tell)
            except RowsFull:  # of images that the data set does not have any more
                rows.clear()
                self._row_of, labels = _fill(rows, loader, views, self._prefix, tell)
            self._held = rows.finished()
        self._labels = _packed(labels)
        self._look()

    def _look(self) -> None:
        self._fields = self._layout.fields(self._held.rows)

    def _limit(self, example: Sequence[Tensor], budget: int | None) -> int:
        """The most rows to keep, if all that are needed fit."""
        needed, room = self._images * self._views, budget or _room(self._folder)
        rows = room // self._layout.row_bytes
        if rows < needed:
            limit = "half of the memory" if self._folder is None else "what is free on the disk"
            raise GradFilterError(self._too_big(example, "the budget" if budget else limit, room))
        # on disk, rows of images that are gone stay until there are as many as rows in use
        return needed if self._folder is None else min(rows, 2 * needed)

    def _too_big(self, example: Sequence[Tensor], limit: str, room: int) -> str:
        row, count = self._layout.row_bytes, self._images * self._views
        views = "" if self._views == 1 else f" in {self._views} views"
        instead = []
        for store in STORES[STORES.index(self._store) + 1 :]:
            size = RowLayout.of(example, store).row_bytes * count
            if size <= room:
                instead.append(f"store={store!r} ({format_bytes(size)})")
        if self._views > 1 and (fewer := room // (row * self._images)):
            instead.append(f"views={fewer}")
        if self._folder is None:
            instead.append("a folder on a disk with room for it")
        fits = f"What fits: {', or '.join(instead)}." if instead else "Give a larger budget, or fewer images."
        return (
            f"The features of {self._images} images{views} take {format_bytes(row * count)} as {self._store} "
            f"({format_bytes(row)} each), more than {limit}, {format_bytes(room)}. {fits}"
        )

    def _open(self, limit: int, prefix: str) -> Rows:
        if self._folder is None:
            return MemoryRows(self._layout, limit)
        about = {
            "what": "features of a frozen prefix, by gradfilter.FeatureCache",
            "format": 1,
            "torch": torch.__version__,
            "prefix": prefix,
            "store": self._store,
            "features": self._layout.describe(),
        }
        return DiskRows(self._layout, limit, self._folder, about)

    def __len__(self) -> int:
        return self._images

    def __getitem__(self, index: int) -> tuple[Features, Any]:
        """The features of one image as they are kept (``decode`` makes them plain), and its label."""
        features, label = self.__getitems__([index])[0]
        return tuple(part.clone() for part in features), label  # nobody writes into the cache by mistake

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Features, Any]]:
        """Views into the cache, for a DataLoader that copies them into a batch."""
        if self._prefix is not None:
            self._prefix.check_unchanged()
        epoch, samples = int(self._epoch), []
        for index in indices:
            place = range(self._images)[index]  # negative ones, and IndexError where there is none
            place = place * self._views + view_of(self._seed, epoch, place, self._views)
            row = self._row_of[place]
            samples.append((tuple(field[row] for field in self._fields), self._labels[place]))
        return samples

    def set_epoch(self, epoch: int) -> None:
        """Give other views from now on, also in workers that persist."""
        self._epoch.fill_(epoch)

    def decode(self, features: Tensor | Sequence[Tensor]) -> Features:
        """A batch of kept features as the frozen layers gave them: numbers, shapes and memory layout."""
        parts = (features,) if isinstance(features, Tensor) else features
        if len(parts) != len(self._fields):
            raise GradFilterError(
                f"This cache gives {len(self._fields)} tensors per batch, not {len(parts)}: "
                "pass on what the loader gave, unchanged."
            )
        if self._prefix is not None:
            parts = [part.to(self._prefix.device) for part in parts]
        return self._layout.decode(parts)

    def tail(self, features: Tensor | Sequence[Tensor]) -> Any:
        """The model's output, from a batch of features on."""
        if self._prefix is None:
            raise GradFilterError(
                "A copy of a cache has no model: call the tail of the cache that was built."
            )
        self._prefix.check_unchanged()
        return self._prefix.split.tail(self.decode(features))

    def __getstate__(self) -> dict[str, Any]:
        # workers need the features alone: the model stays where it is
        return {name: value for name, value in self.__dict__.items() if name != "_fields"} | {"_prefix": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    def __repr__(self) -> str:
        views = "" if self._views == 1 else f" in {self._views} views"
        rows = len(set(self._row_of))
        place = "memory" if self._folder is None else str(self._folder)
        size = format_bytes(rows * self._layout.row_bytes)
        return f"FeatureCache({self._images} images{views}, {size} of {self._store} in {place})"


def view_of(seed: int, epoch: int, index: int, views: int) -> int:
    """Which view of an image an epoch shows: first any, then the next; as many epochs show each view once.

    >>> [[view_of(0, epoch, index, views=3) for epoch in range(4)] for index in range(4)]
    [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 0], [1, 2, 0, 1]]
    """
    return (number_of(seed, index) + epoch) % views


class _Prefix:
    """The frozen layers, and whether they are still what they were."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.split = _split(model)
        self.batch = batch
        self._slots = _slots(model, self.split.frozen)
        self._stamp, self._weights = self._stamped(), self._digest()
        self.identity = digest(self.split.signature, self._weights.hex(), self.device.type, str(batch)).hex()

    @property
    def device(self) -> torch.device:
        return self.split.frozen[0].device if self.split.frozen else torch.device("cpu")

    def probe(self, images: list[Tensor]) -> Features:
        """The features of a few images, if those of the first depend on nothing but itself."""
        first, *others = (image for image in images if kind_of(image) == kind_of(images[0]))
        try:
            features = self._run([first, *others])
            again = self._run([first] * len(images))
        except (RuntimeError, ValueError) as error:
            raise GradFilterError(
                f"The model does not take images such as the first of the data set, {kind_of(first)}: {error}"
            ) from error
        same = all(map(_close, features, again)) and self._stamped() == self._stamp
        if not same:
            raise GradFilterError(
                "The frozen layers give an image other features each time, as dropout and batch norm do in "
                "training mode, so they cannot be cached: call model.eval() before."
            )
        return features

    def features(self, images: list[Tensor]) -> Features:
        """The features of at most a batch of images, run as a full one: its size changes their bits."""
        filled = images + images[-1:] * (self.batch - len(images))
        return tuple(feature[: len(images)] for feature in self._run(filled))

    def _run(self, images: list[Tensor]) -> Features:
        with torch.no_grad():
            return tuple(feature.cpu() for feature in self.split.prefix(torch.stack(images).to(self.device)))

    def check_unchanged(self) -> None:
        """Cheap while nobody touches the tensors; when somebody did, their content decides."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        if any(tensor.requires_grad for tensor in self._tensors()):
            raise GradFilterError(
                "Layers whose features are cached were set to train (requires_grad), which they would not: "
                "build gf.FeatureCache again."
            )
        if self._digest() != self._weights:
            raise GradFilterError(
                "The frozen layers changed after their features were cached: build gf.FeatureCache again."
            )
        self._stamp = stamp

    def _tensors(self) -> list[Tensor]:
        return [tensor for slot, name in self._slots if (tensor := slot.get(name)) is not None]

    def _stamped(self) -> list[tuple[int, int, bool]]:
        return [
            (x.data_ptr(), 0 if x.is_inference() else x._version, x.requires_grad) for x in self._tensors()
        ]

    def _digest(self) -> bytes:
        return digest(*self._tensors())


def _split(model: nn.Module) -> Split:
    from .splitting import split

    return split(model)


def _slots(model: nn.Module, tensors: Sequence[Tensor]) -> list[tuple[dict[str, Any], str]]:
    """Where the model keeps some of its tensors, so that another tensor put in the same place is noticed."""
    found: dict[int, tuple[dict[str, Any], str]] = {}
    for module in model.modules():
        for slot in (module._parameters, module._buffers):
            found.update((id(tensor), (cast(dict[str, Any], slot), name)) for name, tensor in slot.items())
    return [found.get(id(tensor), ({"": tensor}, "")) for tensor in tensors]


def _fill(
    rows: Rows, loader: DataLoader[Any], views: int, prefix: _Prefix, tell: Tell
) -> tuple[list[int], list[Any]]:
    """Read everything once, and compute the features that no row has; the row and the label of each place."""
    digests: list[bytes] = []
    labels: list[Any] = []
    new: dict[bytes, Tensor] = {}
    kind, total = "", len(cast(Sized, loader.dataset))
    for step, items in enumerate(read(loader), start=1):
        tell("features", step, len(loader))
        for item, name in items:
            image, label = sample_of(item, index := len(digests) // views)
            kind = kind or kind_of(image)
            if kind_of(image) != kind:
                raise GradFilterError(
                    f"Image {index} of the data set is {kind_of(image)}, the first one {kind}: "
                    "a cache needs images of one size and type."
                )
            digests.append(name)
            labels.append(label)
            if name not in rows.index:
                new[name] = image
            if len(new) == prefix.batch or (new and len(digests) == total):
                rows.add(list(new), prefix.features(list(new.values())))
                new.clear()
    return [rows.index[name] for name in digests], labels


def _packed(labels: list[Any]) -> Sequence[Any] | Tensor:
    """Tensors of one kind as one, because processes share a tensor with a file each."""
    if all(isinstance(label, Tensor) and kind_of(label) == kind_of(labels[0]) for label in labels):
        return torch.stack(labels)
    return labels


def _close(a: Tensor, b: Tensor) -> bool:
    """Is the first image's feature the same in both batches?"""
    a, b = a[0].double().nan_to_num(), b[0].double().nan_to_num()
    return not a.numel() or bool((a - b).abs().max() <= _BATCH_EFFECT * a.abs().max())


def _check_options(**options: tuple[int, int]) -> None:
    for name, (value, least) in options.items():
        if not isinstance(value, int) or value < least:
            raise GradFilterError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def _room(folder: Path | None) -> int:
    """Half of the memory, or what is free on the disk for rows; no limit where the system does not say."""
    if folder is not None:
        there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path("."))
        known = folder / "features.bin"
        return shutil.disk_usage(there).free + (known.stat().st_size if known.is_file() else 0)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2**63
