"""Reading one file: pictures become upright RGB, masks become class ids, and what is broken is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import GradFilterError
from .matlab import read_mat

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "SUFFIXES",
    "class_ids",
    "is_picture",
    "is_unread",
    "open_header",
    "read_mask",
    "read_picture",
    "upright_rgb",
]

T = TypeVar("T")

SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_UNREAD = (".arw", ".cr2", ".dng", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".nef", ".psd", ".raw", ".svg")
_WIDE = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # grey with 16 bits; Pillow's convert would clip them


def is_picture(path: Path) -> bool:
    """Whether a file is a picture by its name; hidden files are not."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and not path.is_dir()


def is_unread(path: Path) -> bool:
    """Whether a file may well be a picture, but has a suffix that is not read, or none."""
    return path.suffix.lower() in ("", *_UNREAD) and not path.name.startswith(".") and path.is_file()


def upright_rgb(picture: Image.Image) -> Image.Image:
    """A picture of any kind as the eye sees it: turned as its EXIF says, RGB, transparency over white."""
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode in _WIDE:
        wide = np.asarray(picture).astype(np.float32).clip(0, 65535)
        return Image.fromarray((wide / 257).round().astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("its values are floating-point numbers; save it with 8 or 16 bits")
    if picture.has_transparency_data:
        seen = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return picture.convert("RGB")


def read_picture(path: Path) -> Image.Image:
    """A file's picture, upright and RGB."""
    return _read(path, upright_rgb)


def read_mask(path: Path, size: tuple[int, int], classes_of: Callable[[Any], Any]) -> Image.Image:
    """A file's mask as class ids; ``classes_of`` makes them of the file's values and refuses unknown ones."""
    from PIL import Image

    values = _sbd_mask(path) if path.suffix == ".mat" else _read(path, _mask_values)
    height, width = values.shape[:2]
    if (width, height) != size:
        raise GradFilterError(
            f"The mask {path} has {width}x{height} pixels, but its picture {size[0]}x{size[1]}; "
            "make them the same size."
        )
    try:
        ids = classes_of(values)
    except ValueError as error:
        raise GradFilterError(f"The mask {path} {error}.") from None
    return Image.fromarray(np.asarray(ids, np.uint8))


def class_ids(classes: int, ignore: int, table: dict[int, int] | None = None) -> ClassIds:
    """Map mask values to classes: by a table where there is one, else a value is its class."""
    known = table if table is not None else {value: value for value in range(classes)}
    return ClassIds(known | {255: 255} | {ignore: 255})


class ClassIds:
    """Mask values to class ids, by table; 255 stands for pixels that do not count."""

    def __init__(self, table: dict[int, int]) -> None:
        self.table = table
        self._lookup = np.full(256, -1, np.int16)
        for value, label in table.items():
            self._lookup[value] = label

    def __call__(self, values: Any) -> Any:
        if values.ndim != 2:
            raise ValueError("has colours; save it as one channel of class ids")
        if values.size and not 0 <= values.min() <= values.max() <= 255:
            raise ValueError(f"has values from {values.min()} to {values.max()}; class ids are 0 to 254")
        ids = self._lookup[values]
        if (ids < 0).any():
            wrong = int(values[ids < 0][0])
            known = sorted(value for value in self.table if value != 255)
            raise ValueError(
                f"has the value {wrong}, but the classes have {known[0]} to {known[-1]} (255: does not count)"
            )
        return ids


def open_header(path: Path) -> tuple[int, int]:
    """Read no more than a file's header, to see that it is a picture; its upright size."""
    if path.suffix == ".mat":
        height, width = _sbd_mask(path).shape
        return width, height
    return _read(path, _upright_size)


def _upright_size(picture: Image.Image) -> tuple[int, int]:
    width, height = picture.size
    lying = picture.getexif().get(0x0112) in range(5, 9)  # the orientations that turn by a quarter
    return (height, width) if lying else (width, height)


def _sbd_mask(path: Path) -> Any:
    found = read_mat(path)
    if "GTcls.Segmentation" not in found:
        raise GradFilterError(f"{path} has no GTcls.Segmentation, as SBD's masks have; fetch it again.")
    return found["GTcls.Segmentation"]


def _mask_values(picture: Image.Image) -> Any:
    from PIL import ImageOps

    values = np.asarray(ImageOps.exif_transpose(picture))  # of a palette: the indices
    return values.astype(np.uint8) if values.dtype == bool else values


def _read(path: Path, use: Callable[[Image.Image], T]) -> T:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return use(picture)
    except FileNotFoundError:
        raise GradFilterError(f"{path} does not exist.") from None
    except PermissionError:
        raise GradFilterError(f"{path} cannot be read: no permission; change its access rights.") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can break its decoder anywhere, and with any error
        what = str(error) or type(error).__name__
        if "cannot identify" in what:
            what = "it is no picture that Pillow knows"
        raise GradFilterError(f"{path} is broken or no picture ({what}); repair or remove it.") from error
