"""Whole steps: what each arm does, what is counted and read, and how it fails."""

from __future__ import annotations

import csv
import dataclasses
import json
import mmap
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import cli
from gradfilter.bench import arm as arms
from gradfilter.bench import charts, energy, environment, memory, report, step, worker
from gradfilter.commands import bench as bench_command

TINY = arms.Settings("tiny", layers="last:2", batch=2, size=32, classes=5, threads=1, rounds=2)
PLAIN = ("inference", "exact-all", "exact", "filter")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return step.measure(TINY, PLAIN, memory=False, one_process=True)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for both modules: notes who is accelerated, and cuts the tiny model before its head."""
    made = SimpleNamespace(accelerated=[])

    def accelerate_(model: nn.Module) -> nn.Module:
        made.accelerated.append(model)
        return model

    def split(model: Any) -> SimpleNamespace:
        head = model.head
        return SimpleNamespace(
            prefix=lambda x: (torch.ones(len(x), head.in_features),), tail=lambda features: head(*features)
        )

    for name, function in {"program": accelerate_, "splitting": split}.items():
        module = ModuleType(f"gradfilter.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def by_name(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in record["arms"]}


def test_a_record_has_times_bytes_and_counts_of_every_arm(record: dict[str, Any]) -> None:
    rows = by_name(record)
    assert tuple(rows) == PLAIN
    for row in rows.values():
        low, high = row["intervals"]["step_ms"]
        assert low <= row["step_ms"] <= high
        assert row["forward_ms"] > 0
        assert (row["backward_ms"] > 0) == (row["optimizer_ms"] > 0) == (row["name"] != "inference")
    assert rows["inference"]["to_inference"] == rows["exact"]["to_exact"] == 1
    assert rows["filter"]["to_exact"] == pytest.approx(rows["filter"]["step_ms"] / rows["exact"]["step_ms"])
    assert record["settings"]["layers"] == "last:2"
    assert record["environment"]["threads"] == 1
    json.dumps(record)


def test_kept_bytes_and_multiply_adds_are_those_of_the_plan(record: dict[str, Any]) -> None:
    rows, model = by_name(record), gf.models.build("tiny", classes=5)
    example = torch.zeros(2, 3, 32, 32)
    planned = gf.plan(model, gf.GradientFilter(2), "last:2", example=example)
    everything = gf.plan(model, gf.Exact(), "all", example=example)
    assert planned.kept == (rows["exact"]["kept_bytes"], rows["filter"]["kept_bytes"])
    assert everything.kept[0] == rows["exact-all"]["kept_bytes"]
    assert rows["inference"]["kept_bytes"] == rows["inference"]["macs"]["backward"] == 0
    for arm, cost in zip(("exact", "filter"), planned.total, strict=True):
        assert rows[arm]["macs"] == {"forward": cost.forward_macs, "backward": cost.backward_macs}
    assert rows["exact-all"]["macs"]["backward"] == everything.total[0].backward_macs


@pytest.mark.parametrize("name", PLAIN)
def test_a_step_trains_what_its_arm_trains(name: str) -> None:
    arm = arms.Arm(name, arms.Case(TINY))
    before = {key: value.clone() for key, value in arm.model.state_dict().items()}
    arm()
    changed = {key for key, value in arm.model.state_dict().items() if not torch.equal(value, before[key])}
    head = {"head.weight", "head.bias"}
    if name == "inference":
        assert not changed
    elif name == "exact-all":
        assert changed >= head | {"stem.0.weight"}
    else:
        assert changed == head | {"inverted.body.1.0.weight", "inverted.body.2.0.weight"}
    assert all(p.grad is None for p in arm.model.parameters())
    assert not any("running" in key for key in changed)


def trained_by(arm: arms.Arm) -> list[nn.Parameter]:
    return [p for p in arm.model.parameters() if p.requires_grad]


def test_gradients_are_clipped_and_may_be_kept() -> None:
    arm = arms.Arm("exact", arms.Case(TINY))
    with torch.no_grad():
        arm.model.head.weight.mul_(1e4)  # type: ignore[union-attr,operator]
    assert arm.held_bytes() == 0
    before = torch.cat([p.detach().flatten() for p in trained_by(arm)])
    arm(keep_gradients=True)
    moved = torch.cat([p.detach().flatten() for p in trained_by(arm)]) - before
    rate = arm.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
    assert moved.norm() == pytest.approx(arms.CLIP * rate, rel=1e-2)
    trained = trained_by(arm)
    assert arm.held_bytes() == sum(p.nbytes for p in trained)


def test_prefix_arms_are_accelerated(program: SimpleNamespace) -> None:
    case = arms.Case(TINY)
    kinds = {}
    for name in ("inference+prefix", "exact+prefix", "filter+prefix"):
        arm = arms.Arm(name, case)
        assert program.accelerated.pop() is arm.model
        kinds[name] = {
            type(m.gradfilter_method) for m in arm.model.modules() if hasattr(m, "gradfilter_method")
        }
    assert kinds == {
        "inference+prefix": set(),
        "exact+prefix": set(),
        "filter+prefix": {gf.GradientFilter, gf.Exact},
    }


def test_a_cached_step_starts_from_the_features(program: SimpleNamespace) -> None:
    made = by_name(
        step.measure(TINY, ("exact", "exact+cache", "filter+prefix+cache"), memory=False, one_process=True)
    )
    assert len(program.accelerated) == 1
    for name in ("exact+cache", "filter+prefix+cache"):
        assert 0 < made[name]["macs"]["forward"] < made["exact"]["macs"]["forward"]
        assert made[name]["backward_ms"] > 0
    assert "to_inference" not in made["exact"]


def test_every_arm_runs_on_a_model_that_can_be_traced() -> None:
    record = step.measure(dataclasses.replace(TINY, layers="last:4"), memory=False)
    rows = by_name(record)
    assert tuple(rows) == step.ARMS
    assert not [row for row in record["arms"] if "unavailable" in row]
    assert rows["filter+prefix"]["kept_bytes"] < rows["exact"]["kept_bytes"]
    assert rows["filter+prefix+cache"]["forward_ms"] > 0


@pytest.mark.filterwarnings("ignore:This processor has no dot products")
def test_arms_in_int8_say_how_far_their_features_move() -> None:
    record = step.measure(TINY, ("exact", *step.ON_REQUEST), memory=False, one_process=True)
    rows = by_name(record)
    assert "int8" not in rows["exact"]
    for name in step.ON_REQUEST:
        assert "relative error" in rows[name]["int8"]
        assert f"{name}: int8 prefix: features with relative error" in report.text(record)
    assert rows["filter+int8"]["kept_bytes"] < rows["exact"]["kept_bytes"]


def test_an_arm_that_the_model_does_not_allow_has_the_reason(
    program: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module) -> None:
        raise gf.GradFilterError("the model branches on its input")

    monkeypatch.setattr(sys.modules["gradfilter.program"], "accelerate_", refuse)
    settings = arms.Settings("tiny", layers="all", batch=1, size=16, threads=1, rounds=1)
    record = step.measure(settings, ("exact", "filter+prefix", "exact+cache"), memory=False, one_process=True)
    rows = by_name(record)
    assert rows["filter+prefix"] == {
        "name": "filter+prefix",
        "unavailable": "the model branches on its input",
    }
    assert "no frozen prefix" in rows["exact+cache"]["unavailable"]
    assert by_name(step.measure(settings, ("filter+prefix",), one_process=True)).keys() == {"filter+prefix"}
    text = report.text(record)
    assert "filter+prefix: unavailable: the model branches on its input" in text
    assert re.search(r"^filter\+prefix +-", text, re.MULTILINE)
    assert charts.step_chart(record).startswith(b"\x89PNG")
    assert report.csv_of(step.cells(record)).count("\n") == 4


def test_other_outputs_and_types() -> None:
    pixels = arms._logits({"out": torch.zeros(2, 3, 4, 4), "aux": torch.zeros(1)})
    assert pixels.shape == (2, 3, 4, 4)
    with pytest.raises(gf.GradFilterError, match="one score per class"):
        arms._logits([torch.zeros(2)])
    settings = arms.Settings("tiny", batch=1, size=16, dtype="bfloat16", threads=1, rounds=1)
    rows = by_name(step.measure(settings, ("exact", "filter"), memory=False, one_process=True))
    assert rows["filter"]["kept_bytes"] < rows["exact"]["kept_bytes"]


def test_peak_memory_is_measured_in_a_fresh_process() -> None:
    record = step.measure(TINY, ("exact",), one_process=True)
    assert record["arms"][0]["kept_bytes"] <= record["arms"][0]["peak_bytes"] < 2**30


def test_the_peak_sees_what_was_freed_again() -> None:
    size = 64 * 2**20

    def fill() -> None:  # past malloc, which may have as much left from earlier tests
        with mmap.mmap(-1, size) as area:
            area[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)

    assert size * 0.9 < memory.peak_above(fill, lambda: 0) < size * 1.5
    assert memory.peak_above(fill, lambda: size) < size / 2


def test_a_killed_process_is_one_sentence() -> None:
    """The system kills a process when memory runs out."""
    with worker.Worker(TINY, "exact") as running:
        running._process.kill()
        with pytest.raises(gf.GradFilterError, match="Batch 2 at 32 px is too large"):
            running()


def test_a_process_that_fails_says_why() -> None:
    unknown = arms.Settings("resnet-eighteen")
    with worker.Worker(unknown, "exact") as running, pytest.raises(gf.GradFilterError, match="eighteen"):
        running()


def test_a_worker_leaves_nothing_behind() -> None:
    with worker.Worker(TINY, "filter") as running:
        assert running.facts()["kept_bytes"] > 0
        assert min(running()) > 0
    assert running._process.returncode is not None


def test_the_memory_of_another_device_is_unknown() -> None:
    elsewhere = arms.Settings("tiny", device="cuda")
    assert str(memory.peak_of_step(elsewhere, "exact")).startswith("unavailable: ")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"),
    ],
)
def test_running_out_of_memory_is_one_sentence(error: Exception) -> None:
    with (
        pytest.raises(gf.GradFilterError, match=r"Batch 2 at 32 px .* arm exact; try a smaller --batch"),
        TINY.in_memory("exact"),
    ):
        raise error
    with pytest.raises(RuntimeError, match="shapes differ"), TINY.in_memory("exact"):
        raise RuntimeError("shapes differ")


def test_what_cannot_fit_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "available_memory", lambda: 10_000)
    with pytest.raises(gf.GradFilterError, match=r"needs at least .* and 9.8 KiB are free"):
        step.measure(TINY, ("exact",))
    huge = arms.Settings("tiny", batch=10**6, size=2000, threads=1)
    monkeypatch.undo()
    if environment.available_memory() is not None:
        with pytest.raises(gf.GradFilterError, match="Batch 1000000 at 2000 px"):
            step.measure(huge, ("exact-all",))


RUN = [
    "bench",
    "step",
    "tiny",
    "--size",
    "16",
    "--batch",
    "2",
    "--threads",
    "1",
    "--rounds",
    "1",
    "--no-memory",
    "--one-process",
]


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"step.{kind}" for kind in ("json", "csv", "png")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert cli.main([*RUN, "--arms", "inference, exact,filter", *options, "--markdown"]) == 0
    record = json.loads(files["json"].read_text())
    names = ["inference", "exact", "filter"]
    assert [row["name"] for row in record["arms"]] == names
    assert record["settings"]["size"] == 16
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [row["name"] for row in rows] == names
    assert float(rows[2]["step_ms_low"]) <= float(rows[2]["step_ms"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.startswith("| tiny, last:4, patch 2 (overlap), batch 2, 16 px | step |")
    assert "Energy: " in printed
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--arms exact,filtr", "There is no arm filtr"),
        ("--layers layer9", "No layer matches 'layer9'"),
        ("--device nowhere", "Device nowhere cannot be used here"),
        ("--device meta", "Device meta cannot be used here"),
        ("--png /nowhere/a.png", "/nowhere/a.png cannot be written"),
        ("--csv /nowhere/a.csv", "/nowhere/a.csv cannot be written"),
        ("--size 1000000 --batch 1000000", "1000000"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    options: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    assert cli.main([*RUN, *options.split(), "--json", str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err.splitlines()[-1]
    assert "Traceback" not in told.err
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "package.module:nothing"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_picture_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*RUN, "--png", str(tmp_path / "a.png")]) == 2
    assert "pip install 'gradfilter[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", bench_command.EXAMPLES)
def test_the_examples_of_each_benchmark_parse(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", kind, "--help"])
    assert "examples:" in capsys.readouterr().out
    commands = re.findall(r"^  gradfilter (.*)$", bench_command.EXAMPLES[kind], re.MULTILINE)
    assert len(commands) > 1
    for command in commands:
        assert cli._parser().parse_args(command.split()).run


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    report.write(str(tmp_path / "a"), "text")
    report.write(str(tmp_path / "a"), b"bytes")
    assert (tmp_path / "a").read_bytes() == b"bytes"
    (tmp_path / "folder").mkdir()
    with pytest.raises(gf.GradFilterError, match="folder cannot be written"):
        report.write(str(tmp_path / "folder"), "text")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "folder"}


def put(root: Path, **files: object) -> None:
    root.mkdir(parents=True)
    for name, content in files.items():
        (root / name).write_text(f"{content}\n")


def test_rapl_adds_packages_and_memory_and_wraps_around(tmp_path: Path) -> None:
    zones = tmp_path / "sys/class/powercap"
    put(zones / "intel-rapl:0", name="package-0", energy_uj=9_000_000, max_energy_range_uj=10_000_000)
    put(zones / "intel-rapl:0:0", name="core", energy_uj=0)
    put(zones / "intel-rapl:0:1", name="dram", energy_uj=1_000_000, max_energy_range_uj=10_000_000)
    put(zones / "intel-rapl:1", name="psys", energy_uj=0)
    put(zones / "intel-rapl-mmio:0", name="package-0", energy_uj=0)
    meter = energy.find_meter(tmp_path, command="no-such-command")
    assert isinstance(meter, energy.Meter)
    assert meter.name == "RAPL: package-0, dram"

    def work() -> None:
        (zones / "intel-rapl:0/energy_uj").write_text("2000000")  # started again at 0
        (zones / "intel-rapl:0:1/energy_uj").write_text("1500000")

    assert meter.joules(work) == pytest.approx(3.5)


def test_energy_per_call_counts_the_calls(tmp_path: Path) -> None:
    put(tmp_path / "zone", energy_uj=0)

    def call() -> None:
        file = tmp_path / "zone/energy_uj"
        file.write_text(str(int(file.read_text()) + 2_000_000))

    meter = energy.RaplMeter("fake", (tmp_path / "zone",))
    assert meter.joules_per_call(call, least=0.01) == pytest.approx(2)


def test_a_counter_for_root_only_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    put(zone, name="package-0", energy_uj=1)
    read = Path.read_text

    def guarded(path: Path, *arguments: Any, **named: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", guarded)
    assert energy.find_meter(tmp_path) == f"unavailable: {zone}/energy_uj may be read by root only"


def jetson(root: Path, *labels: str) -> None:
    files: dict[str, object] = {"name": "ina3221"}
    for number, label in enumerate(labels, 1):
        files |= {f"in{number}_label": label, f"in{number}_input": 5000, f"curr{number}_input": 400 * number}
    put(root / "sys/class/hwmon/hwmon1", **files)
    put(root / "sys/class/hwmon/hwmon0", name="cpu_thermal", curr1_input=9)


@pytest.mark.parametrize(
    ("labels", "watts"), [(("VDD_IN", "VDD_CPU", "VDD_SOC"), 2.0), (("VDD_GPU", "VDD_CPU"), 6.0)]
)
def test_jetson_reads_the_input_or_all_rails(labels: tuple[str, ...], watts: float, tmp_path: Path) -> None:
    jetson(tmp_path, *labels)
    meter = energy.find_meter(tmp_path, command="no-such-command")
    assert isinstance(meter, energy.PowerMeter)
    assert meter.watts() == pytest.approx(watts)
    assert meter.name == ("INA3221: VDD_IN" if watts == 2.0 else "INA3221: VDD_GPU, VDD_CPU")


def command(folder: Path, script: str) -> str:
    file = folder / "vcgencmd"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_a_raspberry_pi_5_adds_its_rails(tmp_path: Path) -> None:
    lines = r"    VDD_CORE_A current(7)=2.0A\n    3V3_SYS_A current(1)=0.5A\n    VDD_CORE_V volt(15)=0.75V\n"
    meter = energy.find_meter(tmp_path, command(tmp_path, rf'printf "{lines}    3V3_SYS_V volt(9)=3.0V\n"'))
    assert isinstance(meter, energy.PowerMeter)
    assert meter.watts() == pytest.approx(3.0)
    assert "Raspberry Pi" in meter.name


@pytest.mark.parametrize("script", ["echo 'error=1 error_msg=\"Command not registered\"'", "exit 3"])
def test_an_older_raspberry_pi_has_no_meter(script: str, tmp_path: Path) -> None:
    found = energy.find_meter(tmp_path, command(tmp_path, script))
    assert isinstance(found, str)
    assert found.startswith("unavailable: the sensor cannot be read")


def test_a_meter_that_fails_later_is_a_reason() -> None:
    readings = iter([5.0])

    def watts() -> float:
        for reading in readings:
            return reading
        raise ValueError("no more readings")

    failing = energy.PowerMeter("failing", watts, period=0.01)
    assert energy.energy_of(lambda: time.sleep(0.05), failing) == (
        "unavailable: the sensor cannot be read (no more readings)"
    )


def test_measured_energy_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(energy.Meter):
        def joules(self, work: Callable[[], object]) -> float:
            return 3.0

        def joules_per_call(self, call: Callable[[], object], least: float = 1.0) -> float:
            call()
            return 1.25

    monkeypatch.setattr(step, "find_meter", lambda: Fake("a fake meter"))
    record = step.measure(TINY, ("exact",), memory=False, one_process=True)
    assert record["arms"][0]["energy_j"] == 1.25
    assert "1.25 J" in report.text(record)
    assert "Energy: a fake meter" in report.text(record)


def test_features_may_be_any_tensors(program: SimpleNamespace) -> None:
    arm = arms.Arm("exact+cache", arms.Case(TINY))
    assert isinstance(arm.forward(), Tensor)


def test_a_wrong_selection_is_refused_where_memory_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "available_memory", lambda: None)
    with pytest.raises(gf.GradFilterError):
        arms.Case(arms.Settings("tiny", layers="nowhere.*", size=32)).check_memory(["exact"])
