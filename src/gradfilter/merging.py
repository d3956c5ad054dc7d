"""Fold adapters into the weights they adapt, so that the plain model does what the adapted one did."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import GradFilterError
from .modules import LAYERS, AdaptedLayer, RegionModule
from .surgery import restore_

__all__ = ["has_adapters", "merge_", "without_adapters"]

Model = TypeVar("Model", bound=nn.Module)


def merge_(model: Model) -> Model:
    """Fold the adapters of a model into the weights of their layers and restore it; returns the model.

    All or nothing: where one cannot be folded, an error says which, and the model stays as it is.

    >>> import gradfilter as gf
    >>> model = gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 3)), gf.LowRankAdapter(rank=2))
    >>> _ = nn.init.normal_(model[0].gradfilter_up)
    >>> x = torch.randn(1, 3, 8, 8)
    >>> before = model(x)
    >>> torch.allclose(gf.merge_(model)(x), before, atol=1e-5)
    True
    """
    adapted: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, AdaptedLayer)}
    if not adapted:
        raise GradFilterError("The model has no adapters to merge; gf.LowRankAdapter adds some.")
    shared = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    weights = {name: _merged(name, layer, shared) for name, layer in adapted.items()}
    with torch.no_grad():
        for name, weight in weights.items():
            adapted[name].weight.copy_(weight)
    return restore_(model)


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, AdaptedLayer) for module in model.modules())


def without_adapters(model: nn.Module) -> nn.Module:
    """A copy with its adapters merged; the model itself where it has none, or such as cannot be merged."""
    if has_adapters(model):
        with suppress(GradFilterError):
            return merge_(copy.deepcopy(model))
    return model


def _merged(name: str, layer: Any, shared: Counter[int]) -> Tensor:
    weight: Tensor | None = layer.gradfilter_method.merged(layer)
    if weight is None:
        kind = type(layer.gradfilter_method).__name__
        raise GradFilterError(
            f"The {kind} of layer {name} cannot be merged, because no weight does what it does; "
            "keep the model as it is, or use gf.LowRankAdapter."
        )
    base = type(layer)
    while issubclass(base, RegionModule):
        base = base.gradfilter_base
    if base not in LAYERS or "weight" not in layer._parameters:
        raise GradFilterError(
            f"The adapter of layer {name} cannot be merged, because a {base.__name__} works its weight "
            "out itself; keep the model as it is."
        )
    if shared[id(layer.weight)] > 1:
        raise GradFilterError(
            f"The adapter of layer {name} cannot be merged, because other layers share its weight; "
            "keep the model as it is."
        )
    return weight
