"""The benchmarks themselves: arms in turn, honest intervals, records that become tables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import gradfilter as gf
from gradfilter.bench import environment, layers, regions, report, timing


def test_arms_take_turns_and_warm_up_is_left_out() -> None:
    calls: list[str] = []

    def arm(name: str) -> int:
        calls.append(name)
        return len(calls)

    samples = timing.in_turn({"a": lambda: arm("a"), "b": lambda: arm("b")}, rounds=2, warmup=1)
    assert "".join(calls) == "abbaab"
    assert samples == {"a": [4, 5], "b": [3, 6]}


def test_seconds_repeats_short_calls() -> None:
    calls: list[int] = []
    each = timing.seconds(lambda: calls.append(1), least=0.01)
    assert len(calls) > 10
    assert each < 0.01
    calls.clear()
    timing.seconds(lambda: calls.append(1))
    assert len(calls) == 1


def test_intervals_hold_the_median_and_grow_with_the_spread() -> None:
    calm, wild = [10.0, 10.1, 9.9, 10.0, 10.05], [10.0, 20.0, 5.0, 9.0, 30.0]
    for samples in (calm, wild):
        found = timing.median_of(samples)
        assert found.low <= found.median <= found.high
    assert timing.median_of(wild).high - timing.median_of(wild).low > 1
    assert timing.median_of(calm).high - timing.median_of(calm).low < 1
    assert timing.ratio_of(calm, [t / 2 for t in calm]) == pytest.approx((2, 2, 2))


def test_layers_measure_both_gradients_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    record = layers.measure(batch=1, rounds=2, shapes=((4, 8, 8), (2, 6, 6)))
    assert [row["shape"] for row in record["rows"]] == ["4 x 8 x 8", "2 x 6 x 6"]
    assert record["geometric_mean"].keys() == layers.ARMS.keys()
    assert record["geometric_mean"]["exact"] == pytest.approx(1)
    json.dumps(record)
    table = report.text(record).splitlines()
    assert table[0].split("  ")[0] == "3x3 layer, batch 1"
    assert "threads" in table[-1]


def test_the_timed_call_is_the_backward_inside_the_chain() -> None:
    geometry = regions_geometry()
    x, grad, weight = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    exact = layers._backward(gf.Exact(), x, grad, weight, geometry)()
    arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    expected = torch.ops.aten.convolution_backward(grad, x, weight, *arguments)
    torch.testing.assert_close(tuple(exact), tuple(expected[:2]))  # type: ignore[call-overload]
    coarse = layers._backward(gf.GradientFilter(2), x, grad, weight, geometry)()
    assert type(coarse[0]).__name__ == "CoarseGradient"  # type: ignore[index]


def regions_geometry() -> layers.ConvGeometry:
    axes = (layers.ConvAxis(8, 8, kernel=3, pad=1, pad_end=1),) * 2
    return layers.ConvGeometry((2, 4, 8, 8), (2, 4, 8, 8), axes)


def test_regions_count_bytes_and_time_both_passes() -> None:
    case = regions.Case("tiny", "last:3", "Tiny, last three")
    record = regions.measure(batch=2, size=32, rounds=2, cases=(case,))
    rows = {row["arm"]: row for row in record["rows"]}
    assert rows.keys() == layers.ARMS.keys()
    assert rows["exact"]["kept_share"] == 1
    assert rows["overlap 4"]["kept"] < rows["overlap 2"]["kept"] < rows["exact"]["kept"]
    model = gf.models.build("tiny")
    plan = gf.plan(model, gf.GradientFilter(2), "last:3", example=torch.zeros(2, 3, 32, 32))
    assert plan.kept == (rows["exact"]["kept"], rows["overlap 2"]["kept"])
    json.dumps(record)
    made = report.markdown(record).splitlines()
    assert made[0].startswith("| region, batch 2, 32 px | method |")
    assert len(made) == 2 + 5 + 2


def test_the_environment_says_why_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment._commit(tmp_path) == "unavailable (not a git checkout)"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert environment._commit(tmp_path) == "unavailable (git is not installed)"
    monkeypatch.setattr(os, "getloadavg", raise_os_error)
    assert environment._load() == "unavailable (the system does not say)"
    monkeypatch.setattr(Path, "read_text", raise_os_error)
    assert environment._processor().endswith("cores")


def raise_os_error(*_: object) -> None:
    raise OSError


def test_a_commit_with_changes_says_so(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    if not shutil.which("git"):
        pytest.skip("git is not installed")
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    clean = environment._commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("changed")
    assert environment._commit(tmp_path) == f"{clean} with uncommitted changes"


def test_layers_of_other_kinds_stay_out_of_the_mean() -> None:
    shapes = ((4, 8, 8), layers.Shape(4, 8, 8, stride=2), layers.Shape(4, 8, 8, dilation=2))
    others = (layers.Shape(4, 8, 8, groups=4), layers.Shape(4, 8, 8, kernel=1))
    record = layers.measure(batch=1, rounds=1, shapes=(*shapes, *others))
    rows = record["rows"]
    assert record["geometric_mean"] == pytest.approx(
        {arm: found[0] for arm, found in rows[0]["ratio"].items()}
    )
    names = [line[0] for line in layers.lines(record)]
    assert names == [
        "3x3 layer, batch 1",
        "4 x 8 x 8",
        "geometric mean of these 1, the paper's",
        "4 x 8 x 8, stride 2",
        "4 x 8 x 8, dilation 2",
        "4 x 8 x 8, depthwise",
        "4 x 8 x 8, 1x1",
    ]
    older = record | {"rows": [{key: value for key, value in rows[0].items() if key != "plain"}]}
    assert [line[0] for line in layers.lines(older)][-1] == "geometric mean"


@pytest.mark.parametrize("shape", [*layers.SHAPES, *layers.OTHERS], ids=str)
def test_the_geometry_of_a_shape_is_torchs(shape: layers.Shape) -> None:
    pad = shape.dilation * (shape.kernel - 1) // 2
    settings = (shape.kernel, shape.stride, pad, shape.dilation, shape.groups)
    conv = torch.nn.Conv2d(shape.channels, shape.channels, *settings, device="meta")
    geometry = shape.geometry(2)
    y = conv(torch.empty(geometry.x_shape, device="meta"))
    assert (geometry.x_shape, geometry.y_shape) == ((2, *shape[:3]), tuple(y.shape))
    assert [axis.pad for axis in geometry.axes] == [pad, pad]


def test_layers_run_in_other_types_and_say_which() -> None:
    record = layers.measure(batch=1, rounds=1, shapes=((4, 8, 8),), dtype="bfloat16")
    assert (record["dtype"], record["device"]) == ("bfloat16", "cpu")
    with pytest.raises(gf.GradFilterError, match="Device nowhere"):
        layers.measure(device="nowhere")
