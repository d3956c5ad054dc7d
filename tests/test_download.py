"""Fetching: resumed where it broke off, checked, unpacked whole; from a server on this machine."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import gradfilter as gf
from gradfilter.data.download import Archive, fetch
from gradfilter.data.kinds import KINDS

CONTENT = bytes(range(256)) * 10_000


class Handler(BaseHTTPRequestHandler):
    """Files from memory, with ranges; ``break_after`` ends a connection early."""

    files: dict[str, bytes]
    break_after: int | None
    ranges: bool
    asked: list[str | None]

    def do_GET(self) -> None:
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content) if self.break_after is None else start + self.break_after
        self.wfile.write(content[start:end])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    class Fresh(Handler):
        files: dict[str, bytes] = {"/file.bin": CONTENT}  # noqa: RUF012
        break_after = None
        ranges = True
        asked: list[str | None] = []  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), Fresh) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", Fresh
        running.shutdown()
        thread.join()


def archive(root: str, name: str = "file.bin", content: bytes = CONTENT, **options: Any) -> Archive:
    return Archive(f"{root}/{name}", f"sha256:{hashlib.sha256(content).hexdigest()}", **options)


def test_a_file_is_fetched_once(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    root, handler = server
    told: list[int] = []
    for _ in range(2):
        fetch(archive(root, unpack=False), tmp_path / "new", lambda task, step, steps: told.append(steps))
    assert (tmp_path / "new" / "file.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.bin"]
    assert handler.asked == [None]
    assert told[-1] == len(CONTENT) >> 20


@pytest.mark.parametrize("ranges", [True, False])
def test_what_broke_off_is_gone_on_with(
    server: tuple[str, type[Handler]], tmp_path: Path, ranges: bool
) -> None:
    root, handler = server
    handler.break_after, handler.ranges = 1_000_000, ranges
    with pytest.raises(gf.GradFilterError, match="broke off after 1000000 bytes; call again"):
        fetch(archive(root, unpack=False), tmp_path)
    assert not (tmp_path / "file.bin").exists()
    handler.break_after = None
    fetch(archive(root, unpack=False), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert handler.asked == [None, "bytes=1000000-"]


def test_a_whole_part_is_not_fetched_again(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    fetch(archive(server[0], unpack=False), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_another_content_is_refused_and_removed(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    root, _ = server
    (tmp_path / "file.bin.part").write_bytes(b"something else")
    with pytest.raises(gf.GradFilterError, match=r"sha256 is .* it was removed"):
        fetch(archive(root, unpack=False), tmp_path)
    assert list(tmp_path.iterdir()) == []
    fetch(archive(root, unpack=False), tmp_path)


def test_no_server_and_no_file_are_sentences(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    with pytest.raises(gf.GradFilterError, match="404"):
        fetch(archive(server[0], "nothing.bin"), tmp_path)
    with pytest.raises(gf.GradFilterError, match="is there a network"):
        fetch(archive("http://127.0.0.1:9"), tmp_path)


def packed(kind: str, files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as made:
            for name, content in files.items():
                made.writestr(name, content)
    else:
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_archives_are_unpacked_into_what_is_there(
    server: tuple[str, type[Handler]], tmp_path: Path, kind: str
) -> None:
    root, handler = server
    content = packed(kind, {"a/new.txt": b"1", "b/c/d.txt": b"2"})
    handler.files[f"/a.{kind}"] = content
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old.txt").write_text("3")
    fetch(archive(root, f"a.{kind}", content), tmp_path)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["a/new.txt", "a/old.txt", "b/c/d.txt"]


def test_an_archive_that_would_write_elsewhere_is_refused(
    server: tuple[str, type[Handler]], tmp_path: Path
) -> None:
    root, handler = server
    content = packed("tgz", {"../outside.txt": b"1"})
    handler.files["/a.tgz"] = content
    with pytest.raises(gf.GradFilterError, match="cannot be made"):
        fetch(archive(root, "a.tgz", content), tmp_path / "inside")
    assert not (tmp_path / "outside.txt").exists()


def test_a_data_set_is_fetched_only_if_asked(
    server: tuple[str, type[Handler]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_data import put_pets

    root, handler = server
    put_pets(tmp_path / "source")
    archives = []
    for part in ("images", "annotations"):
        files = {
            str(path.relative_to(tmp_path / "source")): path.read_bytes()
            for path in (tmp_path / "source" / part).rglob("*")
            if path.is_file()
        }
        content = handler.files[f"/{part}.tar.gz"] = packed("tgz", files)
        archives.append(archive(root, f"{part}.tar.gz", content))
    monkeypatch.setitem(KINDS, "pets", replace(KINDS["pets"], archives=tuple(archives)))
    with pytest.raises(gf.GradFilterError, match="--download fetches it"):
        gf.open_data(f"pets:{tmp_path / 'pets'}")
    assert handler.asked == []
    for _ in range(2):
        data = gf.open_data(f"pets:{tmp_path / 'pets'}", download=True)
        assert [label for _, label in (data.train[0], data.train[1])] == [0, 1]
    assert len(handler.asked) == 2
