"""Tensors in blocks of few bits: every block has its own minimum and step, and rounding is unbiased.

A value is stored as the whole number floor((value - minimum) / step + u): with u uniform in 0..1 the rounding
errs neither way in the mean. Drawing u for every value would cost more than all the rest, so the noise is a
tile that is made once: the levels (k + 1/2) / TILE in random order. Each draw reads it from another offset,
and the offsets of successive draws visit all of it: in TILE draws every value meets every level once, so that
the mean of what is decoded is the value to within half of step / TILE, whatever the tile's order. Within one
draw the chunks of a tensor read from offsets of their own: values a tile apart are not rounded alike.

Minimum and step are float32 (float64 for float64): two halves of them would save a byte in 64 at 256 values
per block, and would need rounding outwards for no value to be cut off. So a constant block is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native

__all__ = ["TILE", "Blocks", "Encoded", "Layout", "decode", "encode"]

TILE = 1 << 16
_NEXT_DRAW, _NEXT_CHUNK = 40503, 24657  # odd: multiples of them visit all of the tile


@dataclass(frozen=True)
class Blocks:
    """How to store: 8, 4 or 2 bits per value; values per block, at most TILE, which fill whole bytes."""

    bits: int = 8
    size: int = 256

    @property
    def levels(self) -> int:
        return (1 << self.bits) - 1

    @property
    def per_byte(self) -> int:
        return 8 // self.bits


class Layout(NamedTuple):
    """The shape of an encoded tensor, and the order of its values."""

    shape: tuple[int, ...]
    channels_last: bool


class Encoded(NamedTuple):
    """A tensor in blocks. ranges: minimum and step of each block."""

    codes: Tensor
    ranges: Tensor
    layout: Layout


def encode(x: Tensor, blocks: Blocks, draw: int) -> Encoded:
    """Store x; blocks run along memory, so that no layout needs a copy.

    A value that is not finite makes its block NaN, and no other.

    >>> stored = encode(torch.linspace(0, 1, 512), Blocks(bits=4), draw=0)
    >>> stored.codes.numel(), stored.ranges.shape
    (256, torch.Size([2, 2]))
    """
    flat, layout = _in_memory_order(x.detach())
    whole, rest = divmod(len(flat), blocks.size)
    count = whole * blocks.size // blocks.per_byte + -(-rest // blocks.per_byte)
    codes = torch.empty(count, dtype=torch.uint8, device=x.device)
    ranges = torch.empty(whole + (rest > 0), 2, dtype=_wide(x.dtype), device=x.device)
    if not x.is_meta:
        noise = _noise(ranges.dtype, x.device)
        if native.fits_blocks(flat):
            tile = (TILE, draw * _NEXT_DRAW % TILE, _NEXT_CHUNK)
            native.encode_blocks(flat, codes, ranges, noise, (blocks.size, blocks.bits), tile)
        else:
            _encode(flat, codes, ranges, noise, blocks, draw)
    return Encoded(codes, ranges, layout)


def decode(encoded: Encoded, blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The tensor again, in the memory layout it had; the only temporary is the tensor itself."""
    codes, ranges, layout = encoded
    flat = torch.empty(torch.Size(layout.shape).numel(), dtype=dtype, device=codes.device)
    if dtype == ranges.dtype and native.fits_blocks(flat):
        native.decode_blocks(codes, ranges, flat, (blocks.size, blocks.bits))
    elif not codes.is_meta:
        _decode(codes, ranges, flat, blocks)
    if not layout.channels_last:
        return flat.view(layout.shape)
    n, channels, *sizes = layout.shape
    return flat.view(n, *sizes, channels).movedim(-1, 1)


def _encode(flat: Tensor, codes: Tensor, ranges: Tensor, noise: Tensor, blocks: Blocks, draw: int) -> None:
    scratch = ranges.new_empty(min(len(flat), TILE))
    for number, chunk in enumerate(_chunks(len(flat), blocks)):
        own, values = ranges[chunk.blocks], flat[chunk.values]
        offset = (draw * _NEXT_DRAW + number * _NEXT_CHUNK) % TILE
        row = (len(own), -1)
        drawn = noise[offset : offset + len(values)].view(row)
        whole = _rounded(values.view(row), drawn, scratch[: len(values)].view(row), own, blocks)
        _pack(whole, codes[chunk.codes].view(row), blocks)


def _decode(codes: Tensor, ranges: Tensor, flat: Tensor, blocks: Blocks) -> None:
    for chunk in _chunks(len(flat), blocks):
        lowest, step = ranges[chunk.blocks].split(1, dim=1)
        made = flat[chunk.values].view(len(lowest), -1)
        values = made if made.dtype == ranges.dtype else torch.empty_like(made, dtype=ranges.dtype)
        _unpack(codes[chunk.codes].view(len(lowest), -1), values, blocks)
        values.mul_(step).add_(lowest)
        if values is not made:
            made.copy_(values)


class _Chunk(NamedTuple):
    """Blocks that are worked on at a time: they fit into a processor's cache, and the noise has no more."""

    blocks: slice
    values: slice
    codes: slice


def _chunks(count: int, blocks: Blocks) -> Iterator[_Chunk]:
    """Whole blocks; then, alone, the last one if it is shorter."""
    whole, rest = divmod(count, blocks.size)
    rows, width = max(1, TILE // blocks.size), blocks.size // blocks.per_byte
    for first in range(0, whole, rows):
        last = min(first + rows, whole)
        values = slice(first * blocks.size, last * blocks.size)
        yield _Chunk(slice(first, last), values, slice(first * width, last * width))
    if rest:
        end = whole * width + -(-rest // blocks.per_byte)
        yield _Chunk(slice(whole, whole + 1), slice(count - rest, count), slice(whole * width, end))


def _rounded(values: Tensor, noise: Tensor, scratch: Tensor, ranges: Tensor, blocks: Blocks) -> Tensor:
    """The whole numbers of each row's values, as floats yet to be cut; fills in the rows' ranges."""
    lowest, highest = (m(values, 1, keepdim=True).to(ranges.dtype) for m in (torch.amin, torch.amax))
    step = (highest - lowest).div_(blocks.levels)
    per_step = step.reciprocal().masked_fill_(step < torch.finfo(step.dtype).tiny, 0)
    torch.cat([torch.add(lowest, step, alpha=0), step], 1, out=ranges)  # NaN if a value is not finite
    torch.sub(values, lowest, out=scratch)
    return scratch.mul_(per_step).add_(noise).clamp_(max=blocks.levels)


def _pack(whole: Tensor, codes: Tensor, blocks: Blocks) -> None:
    """Part k of each row goes to the k-th bits of its bytes."""
    if blocks.per_byte == 1:
        codes.copy_(whole)
        return
    bytes_each, width = whole.to(torch.uint8), codes.shape[1]
    codes.copy_(bytes_each[:, :width])
    for k in range(1, blocks.per_byte):
        part = bytes_each[:, k * width : (k + 1) * width]
        codes[:, : part.shape[1]].bitwise_or_(part << (k * blocks.bits))


def _unpack(codes: Tensor, values: Tensor, blocks: Blocks) -> None:
    width = codes.shape[1]
    for k in range(blocks.per_byte):
        part = values[:, k * width : (k + 1) * width]
        own = codes[:, : part.shape[1]]
        part.copy_(own if blocks.per_byte == 1 else (own >> (k * blocks.bits)) & blocks.levels)


def _in_memory_order(x: Tensor) -> tuple[Tensor, Layout]:
    """The values one after the other; only what has gaps, or yet another layout, is copied."""
    channels_last = x.dim() > 2 and not x.is_contiguous()
    ordered = x.movedim(1, -1) if channels_last else x
    return ordered.reshape(-1).contiguous(), Layout(tuple(x.shape), channels_last)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=8)
def _noise(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tile twice in a row, so that it can be read from any offset."""
    own = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(TILE, generator=own, dtype=torch.int32, device="cpu")
    return ((order.to(dtype) + 0.5) / TILE).repeat(2).to(device)
