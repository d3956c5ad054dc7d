"""report.json and report.html: they hold what was said, and nothing a class name could smuggle in."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import gradfilter as gf
from gradfilter.errors import GradFilterError
from gradfilter.training import svg
from gradfilter.training.markup import Markup, tag
from gradfilter.training.page import page
from gradfilter.training.report import Comparison, Overlay, Report, plan_facts, read_report, write_report

HOSTILE = "<script>alert('x')</script>\"&\x00</style></title>"
PNG = bytes.fromhex(  # one pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "img", "br"}


def epochs(count: int, **more: float) -> list[dict[str, float | None]]:
    return [
        {"epoch": i + 1, "loss": 1 / (i + 1), "seconds": 2.0 * i, "accuracy": 90 - 10 / (i + 1), **more}
        for i in range(count)
    ]


def report(classes: int = 3, count: int = 4, name: str = "class", **changes: Any) -> Report:
    plan = gf.plan(gf.models.build("tiny"), gf.GradientFilter(2), "last:2", example=torch.zeros(2, 3, 32, 32))
    settings = {
        "settings": {"loop": {"epochs": count, "lr": 0.05}, "data": None},
        "epochs": epochs(count),
        "scores": ["accuracy"],
        "why_ended": "the time was over",
        "classes": [f"{name} {i}" for i in range(classes)],
        "plan": plan_facts(plan),
        "costs": [
            Comparison("Kept", "bytes", {"exact": 4096, "filtered": 1024}),
            Comparison("Step", "ms", {"exact": 9.0, "filtered": None}),
        ],
        "confusion": [[3 + 5 * (i == j) for j in range(classes)] for i in range(classes)],
        "overlays": [Overlay("a.png", {"picture": PNG, "found": PNG}, [0, 1])],
        "environment": {"torch": "2.13", "threads": 2},
        "others": {"exact": epochs(max(1, count - 1))},
        **changes,
    }
    return Report("A run", **settings)


CASES = {
    "usual": report(),
    "one epoch, two classes": report(2, 1),
    "a thousand epochs, 200 classes": report(200, 1000),
    "long names": report(30, 3, "a very long name " * 20),
    "hostile names": report(4, 3, HOSTILE, notes=[HOSTILE], why_ended=HOSTILE, others={HOSTILE: epochs(2)}),
    "nothing but a title": Report("Empty"),
    "no test set": Report("No scores", epochs=[{"epoch": 1, "loss": None}, {"epoch": 2, "loss": 0.5}]),
    "plan without costs": report(plan=plan_facts(gf.plan(gf.models.build("tiny"), gf.Exact(), "last:1"))),
    "all the same": report(epochs=[{"epoch": 1, "loss": 0.0, "accuracy": 0.0}] * 3),
    "never finite": report(epochs=[{"epoch": 1, "loss": None, "accuracy": None}]),
    "no class was seen": report(2, confusion=[[0, 0], [0, 0]]),
}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects what could load or run something."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def problems(html: str) -> list[str]:
    """What must not be in a page that loads nothing and runs nothing."""
    reader = Reader()
    reader.feed(html)
    found = [f"not closed: {name}" for name in reader.open]
    found += [f"<{name}>" for name, _ in reader.tags if name in ("script", "iframe", "object", "embed")]
    for name, attributes in reader.tags:
        for key, value in attributes.items():
            if key in ("src", "href") and not (value or "").startswith("data:"):
                found.append(f"{name} {key}={value}")
            if key.startswith("on"):
                found.append(f"{name} {key}")
        if name == "img" and not attributes.get("alt"):
            found.append("img without alt")
    found += re.findall(r"https?://|@import|url\(", html)
    if not any(reader.texts.get("title", [])):
        found.append("no title")
    return found


def drawings(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]  # noqa: S314  our own


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_whole_and_loads_nothing(case: str) -> None:
    html = page(CASES[case])
    assert problems(html) == []
    for drawing in drawings(html):
        assert drawing.find("title") is not None
        assert drawing.findtext("desc")
        assert "nan" not in ElementTree.tostring(drawing, "unicode").lower()


@pytest.mark.parametrize(
    "bad",
    [
        "<script>1</script>",
        '<img src="https://example.org/a.png" alt="a">',
        '<p onclick="x()">a</p>',
        '<img src="data:,">',
        "<p>",
        "<style>@import 'a'</style>",
    ],
)
def test_the_check_of_pages_finds_what_it_should(bad: str) -> None:
    assert (
        problems(f"<html><title>t</title>{bad}</html>") if bad != "<p>" else problems("<title>t</title><p>")
    )


def test_text_never_becomes_markup() -> None:
    html = page(CASES["hostile names"])
    assert "<script" not in html
    assert html.count("</style>") == 1
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in html
    assert "<script" in page(report(notes=[Markup(HOSTILE)]))  # the control: this is what escaping prevents
    assert tag("a", title='"><b>') == '<a title="&quot;&gt;&lt;b&gt;"></a>'


def test_all_parts_are_there_and_missing_ones_leave_no_gap() -> None:
    titles = ["Curves", "Cost", "Confusion", "Masks", "Plan", "Settings", "Environment"]
    html = page(CASES["usual"])
    assert [t for t in titles if f"<h2>{t}" in html] == titles
    assert not [t for t in titles if f"<h2>{t}" in page(CASES["nothing but a title"])]
    assert len(drawings(html)) == 5  # loss, score, two costs, confusion
    assert "loop.lr" in html
    assert "0.25\u00a0\u00d7" in html
    assert "unavailable" in html


def test_numbers_stand_in_small_matrices_and_shades_alone_in_large_ones() -> None:
    small = svg.confusion_matrix([[8, 2], [1, 9]], ["cat", "dog"])
    assert "cat predicted as dog: 2 of 10" in small
    large = svg.confusion_matrix([[int(i == j) for j in range(200)] for i in range(200)], ["x"] * 200)
    assert "x predicted as" not in large
    assert large.count("M") == 200
    assert len(page(report(200, 1000))) < 2_000_000


def test_long_lines_are_thinned_but_keep_their_peaks() -> None:
    values: list[float | None] = [1.0] * 5000
    values[1234], values[4321] = 9.0, -9.0
    drawn = svg.lines("t", list(range(5000)), {"a": values}, x_label="x", y_label="y")
    points = re.search(r'points="([^"]*)"', drawn)
    assert points
    heights = [float(point.split(",")[1]) for point in points[1].split()]
    assert len(heights) < 1000
    assert len({min(heights), max(heights), heights[0]}) == 3


def test_gaps_part_a_line() -> None:
    drawn = svg.lines("t", [1, 2, 3, 4, 5], {"a": [1, 2, None, 3, 4]}, x_label="x", y_label="y")
    assert drawn.count("<polyline") == 2
    assert svg.lines("t", [1, 2], {"a": [1, 2]}, x_label="x", y_label="y").count("<polyline") == 1


def test_json_holds_the_report(tmp_path: Path) -> None:
    write_report(tmp_path, CASES["usual"])
    again = read_report(tmp_path / "report.json")
    assert page(again) == page(CASES["usual"]) == (tmp_path / "report.html").read_text("utf-8")
    assert again.overlays[0].pictures["found"] == PNG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_json_is_json_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    write_report(tmp_path, Report("nan", {"lr": math.inf}, [{"epoch": 1, "loss": None}]))
    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert found["settings"]["lr"] is None


def test_a_diverged_run_has_a_page() -> None:
    bad = [{"epoch": i + 1, "loss": x, "accuracy": 10.0} for i, x in enumerate([1.0, math.nan, math.inf])]
    html = page(report(epochs=bad))
    assert problems(html) == []
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', html)


def test_errors_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(GradFilterError, match="one row and one column for each of 3"):
        report(confusion=[[1]])
    with pytest.raises(GradFilterError, match="best is epoch 9"):
        report(best=9)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(GradFilterError, match="is not a report"):
        read_report(tmp_path / "report.json")
    with pytest.raises(GradFilterError, match="cannot be read"):
        read_report(tmp_path / "none.json")
    with pytest.raises(GradFilterError, match="cannot be written"):
        write_report(tmp_path / "none", Report("x"))


def console(file: Path, folder: Path) -> list[str]:
    """What a browser says about a page."""
    assert CHROMIUM
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    options += [f"--user-data-dir={folder / 'profile'}", "--window-size=400,800"]
    done = subprocess.run(
        [CHROMIUM, *options, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "</html>" in done.stdout
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_has_nothing_to_say(tmp_path: Path) -> None:
    write_report(tmp_path, CASES["hostile names"])
    assert console(tmp_path / "report.html", tmp_path) == []
    html = (
        (tmp_path / "report.html")
        .read_text("utf-8")
        .replace("</main>", "<img src='https://a.invalid/b'></main>")
    )
    (tmp_path / "control.html").write_text(html, "utf-8")
    assert console(tmp_path / "control.html", tmp_path)  # the page's own policy refuses it, and says so
