"""For scripts in the style of timm's train.py: its optimizer factory, for the layers of a plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..models._torchvision import library
from ..plans import NormPolicy, Plan
from ..selection import Layers
from ..state import load_method_state_, method_state
from ..surgery import Methods
from .recipe import Recipe

__all__ = ["carry_method_state_", "create_optimizer"]

_KEY = "gradfilter"
_optim = library("timm.optim", "timm")


def create_optimizer(
    model: nn.Module,
    plan: Plan | Methods,
    layers: Layers | None = None,
    *,
    norm: NormPolicy | None = None,
    example: Tensor | None = None,
    accelerate: bool = True,
    **settings: Any,
) -> Optimizer:
    """Apply a plan to a model, accelerate it, and make timm's optimizer for what trains.

    It stands for ``timm.optim.create_optimizer_v2(model, **settings)`` in a script; all else stays: weight
    decay by parameter, EMA, checkpoints, resume, DDP. What the methods remember goes with the optimizer's
    state dict. ``gf.restore_(model)`` takes the plan away.

    Args:
        plan, layers, norm, example: as for ``gf.apply_``.
        accelerate: run the model fused, as ``gf.accelerate_`` does, if it can be traced.
        settings: of ``create_optimizer_v2``: opt, lr, weight_decay, momentum, ...
    """
    Recipe(plan, layers, norm, example, accelerate).apply_(model)
    optimizer: Optimizer = _optim.create_optimizer_v2(model, **settings)
    carry_method_state_(optimizer, model)
    return optimizer


def carry_method_state_(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer's state dict hold what the model's methods remember, and loading it bring that back.

    >>> import torch, gradfilter as gf
    >>> model = gf.apply_(nn.Sequential(nn.Conv2d(3, 8, 3)), gf.SubspaceIteration(rank=2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> carry_method_state_(optimizer, model)
    >>> model(torch.randn(8, 3, 16, 16)).sum().backward()
    >>> sorted(optimizer.state_dict())
    ['gradfilter', 'param_groups', 'state']
    """

    def save(optimizer: Optimizer, state: dict[str, Any]) -> None:
        if remembered := method_state(model):
            state[_KEY] = {name: value.clone() for name, value in remembered.items()}

    def load(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if _KEY in state:
            load_method_state_(model, state[_KEY])
        return {name: value for name, value in state.items() if name != _KEY}

    inner: Optimizer = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead has no hooks
    inner.register_state_dict_post_hook(save)
    inner.register_load_state_dict_pre_hook(load)
