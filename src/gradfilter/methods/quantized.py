"""Quantised storage: the input is kept in a few bits per value; gradients are otherwise exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError
from ..ops.blocks import TILE, Blocks
from .base import Method

__all__ = ["Quantized"]


@dataclass(frozen=True)
class Quantized(Method):
    """Keep the input in blocks of 8, 4 or 2 bits per value, rounded without bias.

    The gradient of the input is exact, that of the weight exact in the mean over steps. The rounding is the
    same in every run, and goes on where ``gf.method_state`` left it.

    block: how many values that follow each other in memory share a minimum and a step.

    >>> Quantized(bits=2)
    Quantized(bits=2, block=256)
    """

    bits: Literal[8, 4, 2] = 4
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise PlanError(f"bits must be 8, 4 or 2, not {self.bits!r}.")
        fits = isinstance(self.block, int) and 1 <= self.block <= TILE
        if not fits or self.block * self.bits % 8:
            raise PlanError(
                f"block must be a number of values, up to {TILE}, that fill whole bytes, not {self.block!r}; "
                "256 is usual."
            )

    @property
    def store(self) -> Blocks:  # type: ignore[override]
        return Blocks(self.bits, self.block)
