"""Class numbers as colours: masks as PNG files with a palette, and laid over their pictures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from torch import Tensor

from .errors import GradFilterError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["colour", "mask_image", "overlay_png", "picture_png"]


def colour(number: int) -> tuple[int, int, int]:
    """A colour for a class: those of Pascal VOC, in which the bits of the number take turns.

    >>> [colour(n) for n in (0, 1, 2, 21)]
    [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 64, 128)]
    """
    parts = [0, 0, 0]
    for bit in range(8):
        for channel in range(3):
            parts[channel] |= (number >> (3 * bit + channel) & 1) << (7 - bit)
    return parts[0], parts[1], parts[2]


def mask_image(mask: Tensor) -> Image:
    """A mask of class numbers as a picture with a palette: its pixels are the numbers."""
    from PIL import Image

    if mask.dim() != 2 or (mask.numel() and not 0 <= int(mask.min()) <= int(mask.max()) <= 255):
        raise GradFilterError("A mask is a picture only with class numbers from 0 to 255.")
    height, width = mask.shape
    made = Image.frombytes("P", (width, height), mask.cpu().byte().numpy().tobytes())
    made.putpalette([part for number in range(256) for part in colour(number)])
    return made


def overlay_png(picture: Image, mask: Tensor, strength: float = 0.5, longest: int = 400) -> bytes:
    """The mask over its picture, as a PNG whose longer side is at most ``longest``."""
    from PIL import Image

    flat = mask_image(mask)
    under = picture.convert("RGB").resize(flat.size)
    return picture_png(Image.blend(under, flat.convert("RGB"), strength), longest)


def picture_png(picture: Image, longest: int = 400) -> bytes:
    """A picture as a PNG whose longer side is at most ``longest``."""
    small = picture.copy()
    small.thumbnail((longest, longest))
    made = io.BytesIO()
    small.save(made, "PNG")
    return made.getvalue()
