"""What methods remember from step to step, for checkpoints; a state dict stays the plain model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .errors import GradFilterError, nearest
from .methods import Memory

__all__ = ["load_method_state_", "method_state"]


def method_state(model: nn.Module) -> dict[str, Tensor]:
    """What the methods of a model remember, by layer and name; save it beside the state dict to resume.

    >>> import torch, gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), gf.GradientFilter(patch=2))
    >>> gf.method_state(model)
    {}
    """
    return {
        f"{name}:{key}": value
        for name, module in model.named_modules()
        for key, value in module.__dict__.get("gradfilter_memory", {}).items()
    }


def load_method_state_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the methods of a model what ``method_state`` saved; all or nothing."""
    memories = {
        name: module.__dict__["gradfilter_memory"]
        for name, module in model.named_modules()
        if "gradfilter_memory" in module.__dict__
    }
    for path in state:
        layer = path.rpartition(":")[0]
        if layer not in memories:
            raise GradFilterError(
                f"The method state is for another plan: layer {layer} has no method here."
                f"{nearest(layer, list(memories))}"
            )
    for name, module in model.named_modules():
        if name in memories:
            _check_complete(name, module, memories[name], state)
    for memory in memories.values():
        memory.clear()
    for path, value in state.items():
        layer, _, key = path.rpartition(":")
        memories[layer][key] = value.clone()


def _check_complete(name: str, module: Any, memory: Memory, state: Mapping[str, Tensor]) -> None:
    """What a method chose when it was applied must be in the state, or it would forget its choice."""
    chosen: Memory = {}
    module.gradfilter_method.prepare(name, module, chosen)
    for key in chosen:
        if key in memory and f"{name}:{key}" not in state:  # layers that pass gradients on chose nothing
            raise GradFilterError(
                f"The method state is for another plan: it lacks {key} of layer {name}, which "
                f"{type(module.gradfilter_method).__name__} needs."
            )
