"""The model of a job and its plan, from settings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ..costs import plan as planned
from ..errors import WeightsError
from ..methods import GradientFilter, Method
from ..methods.text import method_from
from ..models import build
from ..models._pretrained import download_weights, find_weights
from ..plans import Plan
from ..program import accelerate_if_possible_
from ..surgery import apply_
from .settings import Config

__all__ = ["built", "example_of", "make_ready_", "plan_of"]


def built(config: Config, classes: int) -> nn.Module:
    """The model of a job, its new weights drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build(config.model, classes=classes, weights=_weights(config))
    ready: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ready


def _weights(config: Config) -> str | Path | None:
    if config.weights != "auto":
        return None if config.weights == "none" else config.weights
    try:
        return find_weights(config.model)
    except WeightsError as error:
        build(config.model)  # a name that is none has the first word
        if config.download:
            return download_weights(config.model)
        raise WeightsError(
            f"{error} Or fetch torchvision's with --download, or start afresh: --weights none --layers all."
        ) from None


def plan_of(config: Config, model: nn.Module) -> Plan:
    usual = method_from(config.method) if config.method else GradientFilter(config.patch, config.taps)
    method: Method | dict[str, Method] = usual
    if config.methods:
        method = {name: method_from(text) for name, text in config.methods.items()} | {"*": usual}
    return planned(model, method, config.layers, norm=config.norm, example=example_of(config, config.batch))


def example_of(config: Config, batch: int = 1) -> Tensor:
    made = torch.zeros(batch, 3, config.size, config.size)
    return made.to(memory_format=torch.channels_last)


def make_ready_(model: nn.Module, plan: Plan, config: Config) -> None:
    apply_(model, plan)
    if config.accelerate:
        accelerate_if_possible_(model)
