"""Fetching archives: what was fetched before is gone on from, and nothing is used whose checksum differs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..errors import GradFilterError
from ..progress import Tell, silent

__all__ = ["Archive", "fetch"]

_CHUNK = 1 << 20
_ALREADY_WHOLE = 416  # the server has nothing behind what is there


@dataclass(frozen=True)
class Archive:
    """A file of a data set on the web; ``checksum`` is md5 or sha256, a colon, and the hexadecimal digits."""

    url: str
    checksum: str
    unpack: bool = True

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch(archive: Archive, folder: Path, tell: Tell = silent) -> None:
    """Put an archive's content into a folder; a call that broke off is gone on with by the next one."""
    file = folder / archive.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            part = file.with_name(f"{file.name}.part")
            _download(archive, part, tell)
            _verify(archive, part)
            part.replace(file)
        if archive.unpack:
            _unpack(file, folder)
            file.unlink()
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise GradFilterError(f"{file} cannot be made: {error}.") from error


def _download(archive: Archive, part: Path, tell: Tell) -> None:
    there = part.stat().st_size if part.exists() else 0
    request = Request(archive.url, headers={"Range": f"bytes={there}-"} if there else {})  # noqa: S310
    try:
        with urlopen(request, timeout=60) as response:  # noqa: S310  our own table has the addresses
            whole = _receive(response, part, there if response.status == 206 else 0, archive.name, tell)
    except HTTPError as error:
        if error.code == _ALREADY_WHOLE and there:
            return
        raise GradFilterError(f"{archive.url} cannot be fetched: {error}.") from error
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        whole, reason = False, getattr(error, "reason", error)
        if not part.exists():
            raise GradFilterError(
                f"{archive.url} cannot be reached ({reason}); is there a network?"
            ) from error
    if not whole:
        size = part.stat().st_size
        raise GradFilterError(f"{archive.url} broke off after {size} bytes; call again to go on from there.")


def _receive(response: HTTPResponse, part: Path, start: int, name: str, tell: Tell) -> bool:
    """Add what comes to a file, from ``start`` on; whether all came that was announced."""
    announced = response.headers.get("Content-Length")
    total = start + int(announced) if announced else 0
    with part.open("r+b" if start else "wb") as stream:
        stream.seek(start)
        stream.truncate()
        while chunk := response.read(_CHUNK):
            stream.write(chunk)
            tell(f"fetching {name}, MiB", stream.tell() >> 20, total >> 20)
        return not total or stream.tell() == total


def _verify(archive: Archive, part: Path) -> None:
    algorithm, _, expected = archive.checksum.partition(":")
    with part.open("rb") as stream:
        found = hashlib.file_digest(stream, algorithm).hexdigest()
    if found != expected:
        part.unlink()
        raise GradFilterError(
            f"{archive.url} gave a file whose {algorithm} is {found}, not {expected}; it was removed."
        )


def _unpack(file: Path, folder: Path) -> None:
    """Unpack beside, then move into place, so that a folder that is there is whole."""
    beside = folder / f".{file.name}.unpacking"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    if file.name.endswith(".zip"):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(beside)  # noqa: S202  it keeps within the folder by itself
    else:
        with tarfile.open(file) as tar:
            tar.extractall(beside, filter="data")
    _move_into(beside, folder)
    shutil.rmtree(beside)


def _move_into(source: Path, folder: Path) -> None:
    for child in sorted(source.iterdir()):
        target = folder / child.name
        if child.is_dir() and target.is_dir():
            _move_into(child, target)
        else:
            os.replace(child, target)
