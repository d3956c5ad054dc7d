"""The networks that come with gradfilter.

Three are ImageNet nets small enough for a microcontroller, with batch norm folded into the convolutions.
Their architectures, and the published weights that fit them, are those of mit-han-lab/tiny-training (MIT
licence); they expect 128 x 128 images in [-1, 1]. `Tiny` is for tests: every kind of layer, in milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["NETS", "FoldedNet", "Tiny"]


class Stage(NamedTuple):
    """Blocks on maps of one size; the first one changes channels and stride."""

    channels: int
    stride: int
    blocks: Sequence[tuple[int, int]]  # expansion and kernel of each block


_MCUNET_5FPS = (
    Stage(8, 1, [(1, 3)]),
    Stage(16, 2, [(4, 3), (3, 3)]),
    Stage(24, 2, [(3, 7), (5, 3)]),
    Stage(40, 2, [(5, 3), (4, 7)]),
    Stage(48, 1, [(4, 5), (3, 3), (4, 3)]),
    Stage(96, 2, [(5, 7), (4, 5), (4, 5)]),
    Stage(160, 1, [(6, 3)]),
)
_PROXYLESS_W03 = (
    Stage(8, 1, [(1, 3)]),
    Stage(16, 2, [(3, 5), (3, 3)]),
    Stage(16, 2, [(3, 7), (3, 3), (3, 5), (3, 5)]),
    Stage(24, 2, [(6, 7), (3, 5), (3, 5), (3, 5)]),
    Stage(32, 1, [(6, 5), (3, 5), (3, 5), (3, 5)]),
    Stage(64, 2, [(6, 7), (6, 7), (3, 7), (3, 7)]),
    Stage(96, 1, [(6, 7)]),
)
_MBV2_W035 = (
    Stage(8, 1, [(1, 3)]),
    Stage(8, 2, [(6, 3)] * 2),
    Stage(16, 2, [(6, 3)] * 3),
    Stage(24, 2, [(6, 3)] * 4),
    Stage(32, 1, [(6, 3)] * 3),
    Stage(56, 2, [(6, 3)] * 3),
    Stage(112, 1, [(6, 3)]),
)


class ConvUnit(nn.Sequential):
    """A convolution padded to keep the map's size, perhaps a batch norm, perhaps an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        norm: bool = False,
        activation: nn.Module | None = None,
    ) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=not norm)
        # Torch's default shrinks the signal in each layer: to nothing, where no norm lifts it again.
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu" if activation else "linear")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        super().__init__(conv)
        if norm:
            self.append(nn.BatchNorm2d(outputs))
        if activation:
            self.append(activation)


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes allow it."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, expansion: int, norm: bool = False
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [ConvUnit(inputs, hidden, 1, norm=norm, activation=nn.ReLU6())] if expansion > 1 else []
        self.body = nn.Sequential(
            *widen,
            ConvUnit(hidden, hidden, kernel, stride=stride, groups=hidden, norm=norm, activation=nn.ReLU6()),
            ConvUnit(hidden, outputs, 1, norm=norm),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


class Residual(nn.Module):
    """Two 3x3 convolutions beside a 1x1 shortcut that follows their stride and channels."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ConvUnit(inputs, outputs, 3, stride=stride, norm=True, activation=nn.ReLU()),
            ConvUnit(outputs, outputs, 3, norm=True),
        )
        self.downsample = ConvUnit(inputs, outputs, 1, stride=stride, norm=True)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.body(x) + self.downsample(x))
        return y


class FoldedNet(nn.Module):
    """A stem, stages of inverted residuals without batch norm, global pooling, a linear head."""

    def __init__(self, stages: Sequence[Stage], *, classes: int = 1000) -> None:
        super().__init__()
        channels = 16
        self.stem = ConvUnit(3, channels, 3, stride=2, activation=nn.ReLU6())
        self.blocks = nn.Sequential()
        for stage in stages:
            stride = stage.stride
            for expansion, kernel in stage.blocks:
                block = InvertedResidual(channels, stage.channels, kernel, stride=stride, expansion=expansion)
                self.blocks.append(block)
                channels, stride = stage.channels, 1
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.blocks(self.stem(x))))
        return logits


class Tiny(nn.Sequential):
    """A net for tests: plain, strided, shortcut, depthwise and 1x1 convolutions, batch norm, two ReLUs."""

    def __init__(self, *, classes: int = 10) -> None:
        layers = OrderedDict[str, nn.Module](
            stem=ConvUnit(3, 16, 3, norm=True, activation=nn.ReLU()),
            residual=Residual(16, 32, stride=2),
            inverted=InvertedResidual(32, 32, 3, expansion=2, norm=True),
            pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            head=nn.Linear(32, classes),
        )
        super().__init__(layers)


NETS: dict[str, Callable[..., nn.Module]] = {
    "mcunet-5fps": partial(FoldedNet, _MCUNET_5FPS),
    "proxyless-w0.3": partial(FoldedNet, _PROXYLESS_W03),
    "mbv2-w0.35": partial(FoldedNet, _MBV2_W035),
    "tiny": Tiny,
}
