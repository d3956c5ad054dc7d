"""What filtered training is compared with: plain PyTorch, training the same layers."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..plans import Plan

__all__ = ["train_plainly_"]

Model = TypeVar("Model", bound=nn.Module)


def train_plainly_(model: Model, plan: Plan) -> Model:
    """Let the planned layers train with torch's own backward, batch norms fixed; returns the model.

    >>> import gradfilter as gf
    >>> model = gf.models.build("tiny")
    >>> model = train_plainly_(model, gf.plan(model, gf.GradientFilter(), "last:1"))
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['inverted.body.2.0.weight', 'head.weight', 'head.bias']
    """
    trained = set(plan.trained)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(name in trained)
    return model.eval()
