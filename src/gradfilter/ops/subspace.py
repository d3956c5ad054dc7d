"""The directions of a mode in which a tensor has most of its energy, found without decomposing it whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .unfolding import mode_cross, mode_gram, mode_product, other_modes

__all__ = [
    "Enough",
    "by_rank",
    "by_variance",
    "can_decompose",
    "iterated",
    "leading",
    "random_start",
    "spectrum",
]

Enough = Callable[[Tensor, Tensor], int]
"""How many of these values, largest first, are enough, given their sum over all; more than there are if
those are too few to tell."""

DENSE = 384  # Gram matrices up to this size are decomposed as a whole
BLOCK = 16  # directions that a round adds in larger ones
CONVERGED = 1e-4


def by_variance(variance: float) -> Enough:
    """The smallest rank that explains this share of the energy; 1 if there is none.

    >>> values = torch.tensor([4.0, 3.0, 2.0, 1.0])
    >>> [by_variance(v)(values, values.sum()) for v in (0.4, 0.5, 0.7, 0.95)]
    [1, 2, 2, 4]
    """

    def enough(values: Tensor, total: Tensor) -> int:
        explained = values.double().cumsum(0)
        return int((explained < variance * total.double()).sum()) + 1

    return enough


def by_rank(rank: int) -> Enough:
    """So many, whatever the values are."""
    return lambda values, total: rank


def can_decompose(x: Tensor) -> bool:
    """Whether there are numbers, and their squares can be summed: an overflow elsewhere is no error here.

    >>> [can_decompose(x) for x in (torch.ones(2, 3), torch.full((2, 3), torch.nan), torch.ones(0))]
    [True, False, False]
    """
    return x.numel() > 0 and not x.is_meta and bool(_energy(x).isfinite())


def leading(x: Tensor, mode: int, enough: Enough) -> Tensor:
    """An orthonormal basis (size, rank) of the leading directions of a mode, largest first."""
    found = _by_iteration(x, mode, enough) if min(x.shape[mode], other_modes(x, mode)) > DENSE else None
    if found is None:
        values, vectors = spectrum(x, mode)
        found = vectors[:, : min(enough(values, values.double().sum()), len(values))]
    return found.clone(memory_format=torch.contiguous_format)  # never a part of something larger


def spectrum(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """All squared singular values of an unfolding, largest first, and the directions that belong to them."""
    if x.shape[mode] <= other_modes(x, mode):
        values, vectors = torch.linalg.eigh(mode_gram(x, mode))
        return values.flip(0).clamp(min=0), vectors.flip(1)
    unfolded = x.movedim(mode, 0).flatten(1)  # more rows than columns: decompose the smaller side
    values, right = torch.linalg.eigh(unfolded.t() @ unfolded)
    return values.flip(0).clamp(min=0), orthonormal(unfolded @ right.flip(1))


def iterated(x: Tensor, mode: int, basis: Tensor) -> Tensor:
    """One step of subspace iteration: the basis moves towards the leading directions of the mode."""
    image = _image(x, mode, basis)
    # Directions the tensor does not have come out as zero; a little noise, of the size of rounding errors,
    # makes them random rather than axes that may stay unused for ever.
    largest = image.abs().amax()
    noise = torch.where(largest > 0, 8 * torch.finfo(x.dtype).eps * largest, 1.0)
    return orthonormal(image + noise * random_start(len(basis), basis.shape[1], x))


def _image(x: Tensor, mode: int, basis: Tensor) -> Tensor:
    """The unfolding times its transpose times the basis."""
    if x.shape[mode] <= 2 * basis.shape[1]:
        return mode_gram(x, mode) @ basis
    return mode_cross(x, mode_product(x, basis.t(), mode), mode)


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns span."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def random_start(rows: int, columns: int, like: Tensor) -> Tensor:
    """The same random matrix whenever it is asked for; torch's global random state is left alone."""
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=random, dtype=like.dtype).to(like.device)


def _energy(x: Tensor) -> Tensor:
    """The sum of squares."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square()


def _by_iteration(x: Tensor, mode: int, enough: Enough) -> Tensor | None:
    """Block Krylov iteration; None where decomposing the whole Gram matrix is cheaper.

    Every round adds the image of the directions that the last one added, so few rounds are enough, and few
    columns: subspace iteration throws away what it has seen before.
    """
    rows = x.movedim(mode, -1).reshape(-1, x.shape[mode])  # a view where the mode comes last in memory
    most, total = min(rows.shape) // 3, _energy(x)
    basis = orthonormal(random_start(rows.shape[1], BLOCK, x))
    image = rows.t() @ (rows @ basis)
    while True:
        values, turn = (t.flip(-1) for t in torch.linalg.eigh(basis.t() @ image))
        rank = enough(values, total)
        if rank < len(values):
            wanted: Tensor = basis @ turn[:, :rank]
            misfit = image @ turn[:, :rank] - wanted * values[:rank]
            if misfit.norm() <= CONVERGED * values[0]:
                return wanted
        if basis.shape[1] + BLOCK > most:
            return None
        added = _orthogonal_to(basis, image[:, -BLOCK:])
        basis = torch.cat([basis, added], 1)
        image = torch.cat([image, rows.t() @ (rows @ added)], 1)


def _orthogonal_to(basis: Tensor, columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns add; twice, for the digits that the first time loses."""
    columns = orthonormal(columns - basis @ (basis.t() @ columns))
    rest = basis.t() @ columns
    columns = columns - basis @ rest
    # Columns that lose so little are as orthonormal as rounding lets them be.
    return columns if rest.norm() < torch.finfo(rest.dtype).eps ** 0.5 else orthonormal(columns)
