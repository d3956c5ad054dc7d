"""Legal convolutions from a seed: every case is valid by construction, none is drawn and thrown away.

>>> make_case(7) == make_case(7)
True
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from oracle import Layer

__all__ = ["ConvCase", "make_case"]

_MODULES: dict[tuple[int, bool], type[nn.Module]] = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (2, True): nn.ConvTranspose2d,
}
_LARGEST_MAP = {1: 17, 2: 17, 3: 7}


@dataclass(frozen=True)
class ConvCase:
    """One convolution, its input and how its backward is filtered; tuples have one entry per spatial axis."""

    seed: int
    transposed: bool
    groups: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    output_padding: tuple[int, ...]
    padding_mode: str
    bias: bool
    batch: int | None  # None: unbatched
    size: tuple[int, ...]
    layout: str
    patch: tuple[int, ...]
    taps: str
    input_gradient: str

    @property
    def dims(self) -> int:
        return len(self.size)

    @property
    def patch_option(self) -> int | tuple[int, ...]:
        """The patch as a user would write it."""
        return self.patch[0] if len(set(self.patch)) == 1 else self.patch

    @property
    def layer(self) -> Layer:
        """The geometry in the words of the oracle."""
        return Layer(
            kernel=self.kernel,
            stride=self.stride,
            dilation=self.dilation,
            pads=_pads(self.padding, self.kernel, self.dilation),
            groups=self.groups,
            padding_mode=self.padding_mode,
            transposed=self.transposed,
            output_padding=self.output_padding,
        )

    @property
    def out_size(self) -> tuple[int, ...]:
        return self.layer.out_size(self.size)

    def module(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The plain torch layer with parameters that depend on the seed only."""
        options = {"output_padding": self.output_padding} if self.transposed else {}
        layer = _MODULES[self.dims, self.transposed](
            self.in_channels,
            self.out_channels,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias,
            padding_mode=self.padding_mode,
            dtype=dtype,
            **options,
        )
        random = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        return layer

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Input and incoming gradient, both in the memory layout of the case."""
        random = torch.Generator().manual_seed(self.seed + 1)
        lead = () if self.batch is None else (self.batch,)
        x = torch.randn(*lead, self.in_channels, *self.size, generator=random, dtype=torch.float64)
        g = torch.randn(*lead, self.out_channels, *self.out_size, generator=random, dtype=torch.float64)
        return self._laid_out(x.to(dtype)), self._laid_out(g.to(dtype))

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.layout == "channels_last":
            return x.to(memory_format=torch.channels_last if self.dims == 2 else torch.channels_last_3d)
        if self.layout == "strided":
            return torch.stack([x, x + 1], dim=-1)[..., 0]
        return x


def make_case(seed: int) -> ConvCase:
    """The legal case number `seed`."""
    rng = Random(seed)  # noqa: S311
    dims, transposed = rng.choices(list(_MODULES), weights=[15, 50, 15, 20])[0]
    kernel, stride, dilation = _window(rng, dims)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    largest = _LARGEST_MAP[dims]
    padding: tuple[int, ...] | str
    if transposed:
        padding_mode = "zeros"
        size, padding, output_padding = _transposed_size(rng, spans, stride, dilation)
    else:
        padding_mode = rng.choices(["zeros", "reflect", "circular", "replicate"], weights=[64, 12, 12, 12])[0]
        padding = _padding(rng, spans, stride, pad_more=padding_mode != "zeros")
        output_padding = ()
        pads = _pads(padding, kernel, dilation)
        size = tuple(
            _map_size(rng, _smallest_map(span, pad, padding_mode), largest)
            for span, pad in zip(spans, pads, strict=True)
        )
    groups, in_channels, out_channels = _channels(rng, small=dims == 3)
    batch = rng.choices([None, 0, 1, 2, 3], weights=[14, 6, 25, 35, 20])[0]
    layouts = ["contiguous", "strided"] + (["channels_last"] if dims > 1 and batch is not None else [])
    return ConvCase(
        seed=seed,
        transposed=transposed,
        groups=groups,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        padding=padding,
        output_padding=output_padding,
        padding_mode=padding_mode,
        bias=rng.random() < 0.6,
        batch=batch,
        size=size,
        layout=rng.choices(layouts, weights=[70, 15, 15][: len(layouts)])[0],
        patch=_patch(rng, dims),
        taps=rng.choices(["overlap", "collapse"], weights=[60, 40])[0],
        input_gradient=rng.choices(["coarse", "exact"], weights=[80, 20])[0],
    )


def _per_axis(rng: Random, dims: int, values: list[int], weights: list[int], equal: float) -> tuple[int, ...]:
    """One value per axis; with probability `equal` the same on every axis, as in most real networks."""
    if rng.random() < equal:
        return tuple(rng.choices(values, weights=weights)) * dims
    return tuple(rng.choices(values, weights=weights, k=dims))


def _window(rng: Random, dims: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Kernel, stride and dilation whose span fits into the largest map."""
    if rng.random() < 0.12:  # pointwise layers take paths of their own
        kernel: tuple[int, ...] = (1,) * dims
    elif dims == 3:
        kernel = _per_axis(rng, dims, [1, 2, 3], [20, 25, 55], equal=0.5)
    else:
        kernel = _per_axis(rng, dims, [1, 2, 3, 4, 5], [12, 18, 45, 12, 13], equal=0.5)
    stride = _per_axis(rng, dims, [1, 2, 3], [55, 32, 13], equal=0.6)
    most = 2 if dims == 3 else 3
    dilation = _per_axis(rng, dims, [1, 2, 3][:most], [65, 20, 15][:most], equal=0.6)
    return kernel, stride, dilation


def _padding(rng: Random, spans: list[int], stride: tuple[int, ...], pad_more: bool) -> tuple[int, ...] | str:
    """Words or numbers; numbers go beyond the span, where some outputs read nothing but padding."""
    kind = rng.choices(["word", "centred", "any", "none"], weights=[30, 35, 27, 0 if pad_more else 8])[0]
    if kind == "word":
        same = set(stride) == {1} and rng.random() < 0.8
        return "same" if same else "valid"
    if kind == "centred":
        return tuple(span // 2 for span in spans)
    return tuple(rng.randint(0, span + 1) if kind == "any" else 0 for span in spans)


def _pads(
    padding: tuple[int, ...] | str, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(left, right) per axis; 'same' puts the odd pixel on the right."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    assert not isinstance(padding, str)
    return tuple((pad, pad) for pad in padding)


def _smallest_map(span: int, pad: tuple[int, int], mode: str) -> int:
    """The window must fit into the padded map, and a mode can only copy pixels that exist."""
    source = {"reflect": max(pad) + 1, "circular": max(pad)}.get(mode, 1)
    return max(1, span - sum(pad), source)


def _map_size(rng: Random, smallest: int, largest: int) -> int:
    """Often close to the smallest legal map, where the edge cases are."""
    highest = smallest + 2 if rng.random() < 0.3 else largest
    return rng.randint(smallest, max(smallest, min(highest, largest)))


def _transposed_size(
    rng: Random, spans: list[int], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Map, padding and output padding that leave at least one output pixel on each axis."""
    sizes, paddings, extras = [], [], []
    for span, s, d in zip(spans, stride, dilation, strict=True):
        size = _map_size(rng, 1, 9)
        extra = rng.randint(0, max(s, d) - 1)
        most = min(((size - 1) * s + span + extra - 1) // 2, span + 1)
        sizes.append(size)
        extras.append(extra)
        paddings.append(rng.choice([0, min(span // 2, most), rng.randint(0, most)]))
    return tuple(sizes), tuple(paddings), tuple(extras)


def _channels(rng: Random, small: bool) -> tuple[int, int, int]:
    """Groups, input and output channels: dense, plain groups, or depthwise with a multiplier."""
    most = 2 if small else 4
    kind = rng.choices(["dense", "groups", "depthwise"], weights=[50, 25, 25])[0]
    if kind == "dense":
        return 1, rng.randint(1, most), rng.randint(1, most)
    groups = rng.randint(2, 2 if small else 3)
    if kind == "groups":
        return groups, groups * rng.randint(2, 3), groups * rng.randint(1, 3)
    return groups, groups, groups * rng.randint(1, 3)


def _patch(rng: Random, dims: int) -> tuple[int, ...]:
    """1..8 per axis, sometimes beyond every map."""
    kind = rng.random()
    if kind < 0.06:
        return (1,) * dims
    if kind < 0.12:
        return tuple(rng.choice([1, 3, 20]) for _ in range(dims))
    return _per_axis(rng, dims, [1, 2, 3, 4, 5, 6, 7, 8], [8, 30, 20, 16, 8, 6, 6, 6], equal=0.55)
