"""The samples of a job: whole, one client's, or a few; read from files or decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..bench.environment import available_memory
from ..data.decoded import Bounded, Decoded
from ..data.kinds import open_data
from ..data.partition import dirichlet, distance, few_shot, shards
from ..data.samples import Data, Samples
from ..data.transforms import MARGIN, Transformed, test_transform, train_transform
from ..errors import GradFilterError
from ..progress import Tell, silent
from .processes import together
from .settings import Config

__all__ = ["as_read", "open_sets", "parts_of", "transformed", "usual_size"]

SMALL, SMALL_SIZE, SIZE = 64, 96, 224  # pixels; of small pictures there is nothing to gain beyond their size


@dataclass(frozen=True)
class Part:
    """Some of the samples of another set."""

    whole: Samples
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.whole[self.indices[index]]

    def files(self, index: int) -> tuple[Path, ...]:
        return self.whole.files(self.indices[index])

    @property
    def labels(self) -> list[int]:
        labels = labels_of(self.whole)
        return [labels[index] for index in self.indices]


def open_sets(config: Config, tell: Tell = silent, *, to_train: bool = True) -> tuple[Data, str]:
    """The data of a job, and what is to be said of it if not all is used."""
    data = open_data(
        config.data,
        download=config.download,
        task=None if config.task == "auto" else config.task,
        holdout=config.holdout,
        to_train=to_train,
        tell=tell,
    )
    said = [data.left_out]
    if config.partition != "none":
        parts, sentence = parts_of(config, labels_of(data.train))
        said.append(sentence)
        data = replace(data, train=Part(data.train, parts[config.client].tolist()))
    if config.shots:
        chosen = few_shot(labels_of(data.train), config.shots, config.seed, data.classes).tolist()
        data = replace(data, train=Part(data.train, chosen))
        said.append(f"{config.shots} of each class, {len(chosen)} samples.")
    return data, " ".join(filter(None, said))


def parts_of(config: Config, labels: list[int]) -> tuple[list[Tensor], str]:
    """The clients' parts, and a sentence on how much they differ."""
    if config.partition == "shards":
        parts = shards(labels, config.clients, config.client_shards, config.seed)
    else:
        parts = dirichlet(labels, config.clients, config.alpha, config.seed)
    apart = distance(labels, parts)
    own = len(parts[config.client])
    return parts, (
        f"Client {config.client} of {config.clients} ({config.partition}): {own} samples; the clients' "
        f"classes are {apart:.2f} apart (total variation, 0 to 1)."
    )


def labels_of(samples: Samples) -> list[int]:
    labels: list[int] | None = getattr(samples, "labels", None)
    if labels is None:
        raise GradFilterError(
            "Samples with masks have no labels to share them out by; leave partition and shots out."
        )
    return labels


def usual_size(data: Data) -> int:
    """A side for the pictures, judged by the first of them."""
    picture, _ = data.train[0]
    return SMALL_SIZE if min(picture.size) < SMALL else SIZE


def transformed(data: Data, config: Config, tell: Tell = silent) -> tuple[Transformed, Transformed]:
    """Training and test set as tensors. Pictures in files are decoded once, where their pixels fit."""
    if _pixels_fit(data, config):
        train, test = (
            Decoded(samples, config.size, workers=config.workers, tell=tell)
            for samples in (data.train, data.test)
        )
    else:
        train, test = (as_read(samples, config.size) for samples in (data.train, data.test))
    of_train = train_transform(data.task, config.size, config.augment, data.flip, data.ignore)
    of_test = test_transform(data.task, config.size, data.ignore)
    return Transformed(train, of_train), Transformed(test, of_test)


def as_read(samples: Any, size: int) -> Any:
    """Samples as the network gets to see them, decoded once or not: a run goes on with the same pixels."""
    return Bounded(samples, size) if samples.files(0) else samples


def _pixels_fit(data: Data, config: Config) -> bool:
    """Whether there are files to decode, whose pixels take a fourth of the memory at most."""
    free, files = available_memory(), data.train.files(0)
    if not files or free is None:
        return False
    shorter = MARGIN * config.size
    count = len(data.train) + len(data.test)
    needed = together() * count * shorter * shorter * 1.5 * (3 + len(files) - 1)
    return needed <= free / 4
