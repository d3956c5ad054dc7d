"""Federated-style partitions: one training set, shared out to clients whose classes differ; and few shots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import GradFilterError

__all__ = ["dirichlet", "distance", "few_shot", "shards"]

Labels = Sequence[int] | Tensor


def shards(labels: Labels, clients: int, per_client: int, seed: int = 0) -> list[Tensor]:
    """Sort by label, cut into equal shards, give each client ``per_client`` of them (McMahan et al. 2017).

    With two shards a client sees about two classes.

    >>> [part.tolist() for part in shards([0, 0, 1, 1, 2, 2], clients=3, per_client=1)]
    [[0, 1], [4, 5], [2, 3]]
    """
    known = _checked(labels, clients)
    if per_client < 1 or clients * per_client > len(known):
        raise GradFilterError(
            f"{clients} clients with {per_client} shards each need as many samples; there are {len(known)}."
        )
    random = _generator(seed)
    shuffled = torch.randperm(len(known), generator=random)
    ordered = shuffled[known[shuffled].argsort(stable=True)]
    cut = ordered.tensor_split(clients * per_client)
    hands = torch.randperm(len(cut), generator=random).view(clients, per_client)
    return [torch.cat([cut[shard] for shard in hand]).sort().values for hand in hands.tolist()]


def dirichlet(labels: Labels, clients: int, alpha: float, seed: int = 0) -> list[Tensor]:
    """Share out each class by proportions drawn from a Dirichlet distribution (Hsu et al. 2019).

    A small ``alpha`` gives each class to few clients, a large one to all alike. A client that gets nothing
    takes one sample of the one that has most.
    """
    known = _checked(labels, clients)
    if not 0 < alpha < float("inf"):
        raise GradFilterError(f"alpha must be a positive number, not {alpha}.")
    random = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in known.unique().tolist():
        members = random.permutation(torch.nonzero(known == label).view(-1).numpy())
        ends = np.cumsum(random.dirichlet(np.full(clients, alpha))) * len(members)
        cuts = np.nan_to_num(ends[:-1]).round().astype(np.int64)
        for part, share in zip(parts, np.split(members, cuts), strict=True):
            part.extend(share.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(sorted(part)) for part in parts]


def distance(labels: Labels, parts: Sequence[Tensor]) -> float:
    """How far the parts' classes are from the whole's: the mean total variation distance.

    A part's is half the sum, over all classes, of the differences between the share of the class in the part
    and in the whole. 0: every part has the classes of the whole; it stays below 1. All parts count alike,
    whatever their size.

    >>> distance([0, 0, 1, 1], [torch.tensor([0, 2]), torch.tensor([1, 3])])
    0.0
    >>> distance([0, 0, 1, 1], [torch.tensor([0, 1]), torch.tensor([2, 3])])
    0.5
    """
    known = _checked(labels, len(parts))
    classes = known.unique(return_inverse=True)[1]
    whole = _shares(classes, int(classes.max()) + 1)
    each = [(_shares(classes[part], len(whole)) - whole).abs().sum() / 2 for part in parts]
    return float(torch.stack(each).mean())


def few_shot(labels: Labels, per_class: int, seed: int = 0, names: Sequence[str] = ()) -> Tensor:
    """``per_class`` samples of every class, drawn at random; ``names`` are the classes'.

    >>> few_shot([0, 0, 0, 1, 1, 1], per_class=2).tolist()
    [0, 2, 4, 5]
    """
    known, random = _checked(labels, 1), _generator(seed)
    if per_class < 1:
        raise GradFilterError(f"per_class must be at least 1, not {per_class}.")
    drawn = []
    for label in known.unique().tolist():
        members = torch.nonzero(known == label).view(-1)
        if len(members) < per_class:
            raise GradFilterError(
                f"Class {names[label] if names else label} has {len(members)} samples, less than "
                f"{per_class}; ask for fewer per class."
            )
        drawn.append(members[torch.randperm(len(members), generator=random)[:per_class]])
    return torch.cat(drawn).sort().values


def _checked(labels: Labels, clients: int) -> Tensor:
    known = torch.as_tensor(labels)
    if clients < 1 or clients > len(known):
        raise GradFilterError(
            f"{len(known)} samples cannot be shared out to {clients} clients, one each at least."
        )
    return known


def _shares(classes: Tensor, count: int) -> Tensor:
    return torch.bincount(classes, minlength=count).double() / len(classes)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
