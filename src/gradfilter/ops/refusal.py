"""What a region's backward refuses to do."""

from __future__ import annotations

import torch

from ..errors import GradFilterError

__all__ = ["first_derivative_only"]


def first_derivative_only() -> None:
    """Refuse create_graph=True: a filtered gradient is not a function that could be differentiated."""
    if torch.is_grad_enabled():
        raise GradFilterError(
            "Double backward through a gradfilter region is not possible: call backward without "
            "create_graph=True, or gf.restore_(model) first."
        )
