"""A callback for Lightning's Trainer, whichever of its two names it is imported by."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..errors import GradFilterError, MissingLibraryError, nearest
from ..models._torchvision import neighbour
from ..modules import BATCH_NORMS
from ..plans import NormPolicy, Plan
from ..selection import Layers
from ..state import load_method_state_, method_state
from ..surgery import Methods, has_plan, restore_
from .recipe import Recipe

__all__ = ["GradFilterCallback"]

_KEY = "gradfilter"


def _callback() -> Any:
    """Lightning's own base class: of the package that is in use, or else of one that is installed."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    for package in sorted(packages, key=lambda name: name not in sys.modules):
        with suppress(MissingLibraryError):
            return neighbour(package, "lightning").Callback
    raise MissingLibraryError('Lightning is not installed: pip install "gradfilter[lightning]".')


class GradFilterCallback(_callback()):  # type: ignore[misc]
    """Train the planned layers of a LightningModule: ``Trainer(callbacks=[GradFilterCallback(...)])``.

    The plan is applied before the optimizers are made, so that frozen parameters get no gradient, whether or
    not they are given to one. What the methods remember is in Lightning's checkpoints.

    >>> import gradfilter as gf
    >>> callback = GradFilterCallback(gf.GradientFilter(patch=2), layers="last:4", module="net")

    Args:
        plan, layers, norm, example: as for ``gf.apply_``.
        module: the part of the LightningModule to plan for, by its attribute; not said, all of it.
        accelerate: run what can be traced fused, as ``gf.accelerate_`` does.
        restore: give the plain model back when fitting is over; its checkpoints load into either.
    """

    def __init__(
        self,
        plan: Plan | Methods,
        layers: Layers | None = None,
        *,
        module: str = "",
        norm: NormPolicy | None = None,
        example: Tensor | None = None,
        accelerate: bool = True,
        restore: bool = False,
    ) -> None:
        super().__init__()
        self.recipe = Recipe(plan, layers, norm, example, accelerate)
        self.module, self.restore = module, restore
        self._model: nn.Module | None = None
        self._norms: list[tuple[Any, bool]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        model = self._planned_part(pl_module)
        if stage != "fit" or (model is self._model and has_plan(model)):
            return
        self._norms = [(part, part.training) for part in model.modules() if isinstance(part, BATCH_NORMS)]
        self.recipe.apply_(model, by_parts=True)
        self._model = model

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = method_state(self._planned_part(pl_module))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        model = self._planned_part(pl_module)
        if _KEY in checkpoint and has_plan(model):
            load_method_state_(model, checkpoint[_KEY])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or not self.restore or self._model is None:
            return
        restore_(self._model)
        for norm, mode in self._norms:  # after validation Lightning puts back the mode that it saw: fixed
            norm.training = mode
        self._model, self._norms = None, []

    def _planned_part(self, pl_module: nn.Module) -> nn.Module:
        parts: dict[str, nn.Module] = dict(pl_module.named_modules())
        if self.module not in parts:
            raise GradFilterError(
                f"{type(pl_module).__name__} has no module {self.module} when fitting begins; build it in "
                f"__init__, not in setup or configure_model.{nearest(self.module, parts)}"
            )
        return parts[self.module]
