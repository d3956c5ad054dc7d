"""The command line: what it prints, how it fails, and how fast it starts."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from gradfilter import cli

COMMAND = [sys.executable, "-m", "gradfilter"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main() sets it: put it back
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run beside this one


def test_help_is_fast_and_has_examples() -> None:
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # processor time: the clock would also count what other processes take
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert min(spent) < 0.3


def test_help_does_not_import_torch() -> None:
    code = "import sys, gradfilter.cli as cli; cli._parser().format_help(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


COMMANDS = ("train", "eval", "predict", "export", "recipes", "demo", "plan", "analyze", "bench", "models")


@pytest.mark.parametrize(
    "command",
    [*COMMANDS, "bench_layers", "bench_regions", "bench_step"],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split("_"), "--help"])
    assert stop.value.code == 0
    assert "usage: gradfilter" in capsys.readouterr().out


def test_the_examples_in_the_help_parse() -> None:
    lines = [line.strip().split("  ")[0].split() for line in cli.EXAMPLES.splitlines()[1:]]
    assert len(lines) > 5
    for _, *arguments in lines:
        assert cli._parser().parse_args(arguments).run


def test_plan_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan tiny --layers last:2 --patch 4 --taps collapse --batch 2 --size 32 --classes 3"
    assert cli.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert "GradientFilter(patch=4, taps=collapse)" in printed
    assert "total" in printed


def test_analyze_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "tiny", "--size", "16", "--batch", "2", "--patch", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("layer")
    assert [line.split()[0] for line in printed[1:3]] == ["head", "inverted.body.2.0"]


def test_analyze_reads_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, shade in (("dark", 40), ("light", 200)):
        (tmp_path / label).mkdir()
        for i in range(2):
            image.new("RGB", (40, 30), (shade, shade, i)).save(tmp_path / label / f"{i}.png")
    done = run("analyze", "tiny", "--data", str(tmp_path), "--size", "16", "--batch", "2")
    assert done.returncode == 0, done.stderr
    assert "inverted.body.2.0" in done.stdout


def test_models_lists_names() -> None:
    done = run("models")
    assert done.returncode == 0
    assert "tiny" in done.stdout.splitlines()


def test_a_closed_pipe_is_no_error() -> None:
    """As in ``gradfilter models | head``: nobody reads what is printed."""
    process = subprocess.Popen(
        [*COMMAND, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr
    with process.stderr as told:
        assert "Error" not in told.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan tiny --layers layer9", "No layer matches 'layer9'"),
        ("plan tiny --weights nowhere.pth", "nowhere.pth does not exist"),
        ("plan tiny --patch 0", "at least 1"),
        ("plan", "MODEL"),
        ("plot", "invalid choice"),
        ("", "COMMAND"),
        ("analyze tiny --data nowhere", "nowhere is not a folder"),
        ("analyze tiny --classes 1 --size 16", "2 classes"),
        ("bench layers --json /nowhere/x.json", "/nowhere/x.json cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(arguments.split())
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    assert code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert message in told.err


def test_a_mistake_shows_no_traceback() -> None:
    done = run("plan", "tiny", "--layers", "layer9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gradfilter: No layer matches 'layer9'.")


def test_interrupting_exits_with_130() -> None:
    # A shell's background jobs, and so the tests in one, ignore SIGINT; what they start would inherit that.
    listening = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [
        sys.executable,
        "-c",
        listening + "from gradfilter import cli; sys.exit(cli.main(sys.argv[1:]))",
    ]
    with subprocess.Popen(
        [*command, "bench", "layers", "--rounds", "100000"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr
            assert "(" in process.stderr.readline()
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert told.splitlines()[-1] == "gradfilter: interrupted"
    assert "Traceback" not in told


def test_bench_writes_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradfilter.bench import layers

    monkeypatch.setattr(layers, "measure", partial(layers.measure, shapes=((4, 8, 8),)))
    threads = torch.get_num_threads()
    try:
        file = tmp_path / "layers.json"
        assert (
            cli.main(["bench", "layers", "--rounds", "1", "--batch", "1", "--json", str(file), "--markdown"])
            == 0
        )
    finally:
        torch.set_num_threads(threads)
    record = json.loads(file.read_text())
    assert record["rows"][0]["shape"] == "4 x 8 x 8"
    assert record["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert printed.startswith("| 3x3 layer, batch 1 | exact |")
    assert "| geometric mean |" in printed


def test_python_m_bench_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradfilter.bench", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "layers" in done.stdout


def test_the_core_works_without_numpy() -> None:
    start = "import sys; sys.modules['numpy'] = None; from gradfilter.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", start + "sys.exit(main(['plan', 'tiny', '--size', '32']))"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "GradientFilter(patch=2)" in done.stdout


def test_no_command_takes_abbreviated_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "tiny", "--lay", "last:1"])
    assert "--lay" in capsys.readouterr().err
