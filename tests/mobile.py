"""Inverted residuals to be drawn: blocks, and norms that do something."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Block(nn.Module):
    """An inverted residual as mobile networks write it."""

    def __init__(self, stages: list[nn.Module], residual: bool) -> None:
        super().__init__()
        self.stages, self.residual = nn.Sequential(*stages), residual

    def forward(self, x: Tensor) -> Any:
        return x + self.stages(x) if self.residual else self.stages(x)


def random_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    return norm
