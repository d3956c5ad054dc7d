"""An FCN head on the encoders of segmentation_models_pytorch, which has none of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from gradfilter.models._nets import ConvUnit
from gradfilter.models._torchvision import library

__all__ = ["FCN"]


class FCN(nn.Module):
    """Two 3x3 convolutions, a third over their result beside their input, and a 1x1 classifier.

    The encoder's last features are taken at 1/8 of the picture where it can be dilated, else at 1/32.

    channels: of the head; if None, a fourth of the encoder's.
    """

    def __init__(
        self,
        encoder_name: str,
        encoder_weights: str | None = None,
        classes: int = 1,
        *,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder = _dilated(encoder_name, encoder_weights)
        inputs = self.encoder.out_channels[-1]
        channels = channels or inputs // 4
        self.decoder = FCNDecoder(inputs, channels)
        self.segmentation_head = nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.segmentation_head(self.decoder(self.encoder(x)[-1]))
        return interpolate(logits, x.shape[2:], mode="bilinear", align_corners=False)


class FCNDecoder(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(_unit(inputs, channels), _unit(channels, channels))
        self.conv_cat = _unit(inputs + channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv_cat(torch.cat([x, self.convs(x)], 1))
        return found


def _unit(inputs: int, outputs: int) -> nn.Module:
    return ConvUnit(inputs, outputs, 3, norm=True, activation=nn.ReLU())


def _dilated(name: str, weights: str | None) -> Any:
    get_encoder = library("segmentation_models_pytorch", "seg").encoders.get_encoder
    try:
        return get_encoder(name, weights=weights, output_stride=8)
    except (NotImplementedError, TypeError, ValueError):  # one that shrinks its maps by pooling
        return get_encoder(name, weights=weights)
