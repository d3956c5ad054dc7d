"""Quantisation-aware scaling: gradients in proportion to parameters that are stored as whole numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import GradFilterError

__all__ = ["scale_quantized_gradients_"]


def scale_quantized_gradients_(stored: Iterable[tuple[Tensor | None, Tensor | float]]) -> None:
    """Divide the gradient of each stored parameter by the square of its scale; call it before each step.

    A parameter P that is stored as Q = P / s has the gradient s * G, where G is that of P: in proportion to
    the numbers it changes it is off by s * s, for each layer and channel another s. Divided by s * s, the
    ratio of parameter to gradient is that of the float model, and so one learning rate serves all layers.

    stored: pairs of parameter and scale, which is one number or one per output channel: the weight's own
    scale for a weight; the weight's times the input's for a bias, which is added to their products. What is
    None, or has no gradient, is passed over.

    >>> weight = torch.tensor([[50.0], [100.0]], requires_grad=True)  # stands for 0.5 and 100
    >>> scale = torch.tensor([0.01, 1.0])
    >>> (weight * scale[:, None]).sum().backward()
    >>> scale_quantized_gradients_([(weight, scale)])
    >>> weight.grad
    tensor([[100.],
            [  1.]])
    """
    for parameter, scale in stored:
        if parameter is not None and parameter.grad is not None:
            parameter.grad.div_(_square(scale, parameter.grad))


def _square(scale: Tensor | float, grad: Tensor) -> Tensor:
    wide = torch.as_tensor(scale, dtype=torch.float64).detach()
    if wide.numel() != 1 and (wide.dim() != 1 or len(wide) != len(grad)):
        raise GradFilterError(
            f"A gradient of shape {tuple(grad.shape)} needs one scale or one per channel, {len(grad)},"
            f" not a shape of {tuple(wide.shape)}."
        )
    if not bool((wide > 0).all()):
        raise GradFilterError("Scales must be greater than 0; a channel of zeros can have the scale 1.")
    shape = () if wide.numel() == 1 else (-1, *[1] * (grad.dim() - 1))
    return wide.square().view(shape).to(grad)
