"""What is done to a model once a trainer has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..plans import NormPolicy, Plan
from ..program import accelerate_if_possible_
from ..selection import Layers
from ..surgery import Methods, apply_

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """The arguments of ``gf.apply_``, for a model that is not there yet, and whether to accelerate it.

    >>> import gradfilter as gf
    >>> model = gf.models.build("tiny")
    >>> Recipe(gf.GradientFilter(patch=2), "last:2").apply_(model)
    >>> len(gf.acceleration(model).rows)
    7
    """

    plan: Plan | Methods
    layers: Layers | None = None
    norm: NormPolicy | None = None
    example: Tensor | None = None
    accelerate: bool = True

    def apply_(self, model: nn.Module, *, by_parts: bool = False) -> None:
        """Apply the plan, and accelerate what can be.

        Some trainers never call a model as a function of one tensor, but by keywords, or through a step of
        training that calls its parts: so ``by_parts`` accelerates those, and the whole only if it has none.
        """
        apply_(model, self.plan, self.layers, norm=self.norm, example=self.example)
        if not self.accelerate:
            return
        for part in (*model.children(), model) if by_parts else (model,):
            accelerate_if_possible_(part)
