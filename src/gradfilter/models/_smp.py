"""Models of segmentation_models_pytorch, in a form that torch.fx can follow."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.fx import Proxy

from gradfilter.errors import ModelError

__all__ = ["make_traceable_"]


def make_traceable_(model: Any) -> None:
    """Its check of the picture's size branches on what it reads; ours is one node of a graph."""
    if getattr(model, "requires_divisible_input_shape", False):
        model.__dict__["check_input_shape"] = partial(check_sides, model.encoder.output_stride)


def check_sides(multiple: int, x: Any) -> None:
    if isinstance(x, Proxy):
        x.tracer.create_proxy("call_function", check_sides, (multiple, x), {})
    elif any(side % multiple for side in x.shape[-2:]):
        height, width = x.shape[-2:]
        raise ModelError(
            f"The sides of a picture must be multiples of {multiple} for this model, not {height} by {width}."
        )
