"""Subspace iteration: Tucker factors of fixed ranks that follow the input from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from ..errors import PlanError
from ..geometry import ConvGeometry
from ..ops.exact_conv import Want
from ..ops.storage import Store
from ..ops.subspace import by_rank, can_decompose, iterated, leading, random_start
from ..ops.tucker import compress, contraction_macs, is_smaller, tucker_weight_gradient
from ..ops.unfolding import at_least_float32
from .base import Memory, Method
from .settings import frozen, of_layer, values_of

__all__ = ["SubspaceIteration"]

Rank = int | tuple[int, ...]


@dataclass(frozen=True)
class SubspaceIteration(Method):
    """Keep the input as a Tucker core and one factor per mode, of ranks that are known beforehand.

    Each factor starts random and moves one step of subspace iteration per call, from where the last call left
    it. The batch's is worked out anew: its rows are other samples each time. The input gradient is exact.

    rank: the same for all modes, or one per mode of (N, C, spatial...), or a dict from layer globs to either
        (first match wins), as ``gf.choose_ranks`` finds for a budget of bytes. No mode has more than fits.
    store: how what is kept is stored: "same", "bf16" or "int8".

    >>> SubspaceIteration(rank=(8, 16, 2, 2))
    SubspaceIteration(rank=(8, 16, 2, 2), store='same')
    """

    rank: Rank | Mapping[str, Rank] = 4
    store: Store = "same"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", frozen(self.rank))
        for rank in values_of(self.rank):
            _check_rank(rank)

    def for_layer(self, name: str) -> SubspaceIteration:
        return replace(self, rank=of_layer(self.rank, name, "SubspaceIteration's rank"))

    def refuses(self, geometry: ConvGeometry) -> str | None:
        modes = geometry.spatial + 2
        if isinstance(self.rank, tuple) and len(self.rank) != modes:
            return f"rank {self.rank} has {len(self.rank)} numbers but the input has {modes} modes"
        return None

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        ranks = self._ranks(geometry)
        if not is_smaller(geometry.x_shape, ranks):
            return (x,)
        if x.is_meta:
            shapes = [ranks, *zip(geometry.x_shape, ranks, strict=True)]
            return tuple(x.new_empty(shape) for shape in shapes)
        if not can_decompose(x):
            return (x,)
        full = at_least_float32(x)
        factors = [leading(full, 0, by_rank(ranks[0]))]
        for mode, rank in enumerate(ranks[1:], 1):
            factors.append(_followed(full, mode, rank, memory))
        return compress(x, factors)

    def weight_gradient(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
    ) -> Tensor:
        if len(kept) == 1:
            return super().weight_gradient(grad, kept, weight, geometry)
        core, *factors = kept
        return tucker_weight_gradient(grad, core, factors, weight, geometry)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        ranks = self._ranks(geometry)
        smaller = is_smaller(geometry.x_shape, ranks)
        own = contraction_macs(geometry, ranks) if smaller else geometry.macs
        return geometry.macs * want.x + own * want.weight

    def _ranks(self, geometry: ConvGeometry) -> tuple[int, ...]:
        """One per mode, none larger than the unfolding allows."""
        if isinstance(self.rank, Mapping):
            raise PlanError("SubspaceIteration's rank is given by layer; ask for_layer(name) first.")
        shape = geometry.x_shape
        asked = self.rank if isinstance(self.rank, tuple) else (self.rank,) * len(shape)
        others = [prod(shape[:i]) * prod(shape[i + 1 :]) for i in range(len(shape))]
        return tuple(min(rank, *limits) for rank, *limits in zip(asked, shape, others, strict=True))


def _followed(x: Tensor, mode: int, rank: int, memory: Memory) -> Tensor:
    """The mode's factor, one step on from the one that is remembered for this size."""
    size = x.shape[mode]
    key = f"mode {mode} of size {size}"
    known = memory.get(key)
    if known is None or known.shape != (size, rank):
        known = random_start(size, rank, x)
    # in the layout that a file gives back: products with another one round otherwise
    memory[key] = iterated(x, mode, known.to(x)).contiguous()
    return memory[key]


def _check_rank(rank: object) -> None:
    numbers = rank if isinstance(rank, tuple) else (rank,)
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers):
        raise PlanError(
            f"rank must be whole numbers of at least 1, not {rank!r}; 4 or (8, 16, 2, 2) are usual."
        )
