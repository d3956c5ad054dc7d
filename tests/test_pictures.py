"""Pictures of every kind become upright RGB, as the eye sees them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradfilter as gf
from gradfilter.data.images import open_header, read_picture

RAMP = np.linspace(0, 255, 12 * 8).round().astype(np.uint8).reshape(8, 12)


def pixels(path: Path) -> Any:
    picture = read_picture(path)
    assert picture.mode == "RGB"
    assert open_header(path) == picture.size
    return np.asarray(picture)


def saved(path: Path, picture: Image.Image, **options: Any) -> Path:
    picture.save(path, **options)
    return path


def test_grey_and_black_and_white(tmp_path: Path) -> None:
    assert (pixels(saved(tmp_path / "l.png", Image.fromarray(RAMP))) == RAMP[..., None]).all()
    found = pixels(saved(tmp_path / "1.png", Image.fromarray(RAMP > 99)))
    assert (found == 255 * (RAMP > 99)[..., None]).all()


def test_a_palette_means_its_colours(tmp_path: Path) -> None:
    picture = Image.fromarray(RAMP % 3)
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    expected = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]])[RAMP % 3]
    assert (pixels(saved(tmp_path / "p.png", picture)) == expected).all()
    assert (pixels(saved(tmp_path / "p.gif", picture)) == expected).all()


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path, suffix: str) -> None:
    wide = np.linspace(0, 65535, RAMP.size).round().astype(np.uint16).reshape(RAMP.shape)
    found = pixels(saved(tmp_path / f"wide.{suffix}", Image.fromarray(wide)))
    assert (found == np.round(wide / 257)[..., None]).all()
    clipped = np.asarray(Image.open(tmp_path / f"wide.{suffix}").convert("RGB"))
    assert (clipped != found).mean() > 0.9  # what Pillow does by itself


def test_sixteen_bits_a_colour(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).integers(0, 65536, (4, 5, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    file = tmp_path / "rgb16.png"
    file.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    assert np.abs(pixels(file) - wide / 257.0).max() <= 1


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_cmyk(tmp_path: Path) -> None:
    picture = Image.new("CMYK", (12, 8), (0, 255, 255, 0))  # red
    for file in (saved(tmp_path / "c.jpg", picture, quality=95), saved(tmp_path / "c.tif", picture)):
        assert np.abs(pixels(file).astype(int) - [255, 0, 0]).max() < 12


def test_transparent_pixels_are_white_whatever_colour_hides_there(tmp_path: Path) -> None:
    rgba = np.zeros((8, 12, 4), np.uint8)
    rgba[:, :6] = [10, 20, 30, 255]
    found = pixels(saved(tmp_path / "a.png", Image.fromarray(rgba)))
    assert (found[:, :6] == [10, 20, 30]).all()
    assert (found[:, 6:] == 255).all()
    grey = Image.fromarray(rgba).convert("LA")
    assert (pixels(saved(tmp_path / "la.png", grey))[:, 6:] == 255).all()
    palette = Image.fromarray((np.arange(96).reshape(8, 12) % 2).astype(np.uint8))
    palette.putpalette([1, 2, 3, 4, 5, 6])
    found = pixels(saved(tmp_path / "p.png", palette, transparency=1))
    assert (found[0, :2] == [[1, 2, 3], [255, 255, 255]]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_pictures_upright(tmp_path: Path, orientation: int) -> None:
    upright = np.dstack([RAMP, RAMP[::-1], np.zeros_like(RAMP)])
    as_stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = saved(tmp_path / "e.png", Image.fromarray(np.ascontiguousarray(as_stored(upright))), exif=exif)
    assert (pixels(file) == upright).all()


def test_floating_point_pictures_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "f.tif", Image.fromarray(RAMP.astype(np.float32)))
    with pytest.raises(gf.GradFilterError, match=r"f\.tif .*save it with 8 or 16 bits"):
        read_picture(file)


def test_a_damaged_avif_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "a.avif"
    try:
        Image.fromarray(np.dstack([RAMP] * 3)).save(file)
    except (KeyError, ValueError, OSError):
        pytest.skip("this Pillow writes no AVIF")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"pitm", b"xxxx"))
    for read in (open_header, read_picture):
        with pytest.raises(gf.GradFilterError, match=r"a\.avif is broken or no picture"):
            read(file)


def jpeg_with(path: Path, *tags: tuple[int, int, int, bytes]) -> Path:
    """A picture whose EXIF has these tags, of any kind: number, kind, count and what follows them."""
    entries = b"".join(struct.pack("<HHI4s", *tag) for tag in tags)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return saved(path, Image.fromarray(RAMP), exif=exif)


def test_damaged_exif_is_a_sentence_or_does_not_matter(tmp_path: Path) -> None:
    as_text = (0x0112, 2, 2, b"6\0\0\0")
    assert pixels(jpeg_with(tmp_path / "text.jpg", as_text)).shape == (8, 12, 3)
    turned, resolution_as_text = (0x0112, 3, 1, b"\6\0\0\0"), (0x011A, 2, 4, b"abc\0")
    file = jpeg_with(tmp_path / "wrong.jpg", turned, resolution_as_text)
    with pytest.raises(gf.GradFilterError, match=r"wrong\.jpg is broken or no picture"):
        read_picture(file)
