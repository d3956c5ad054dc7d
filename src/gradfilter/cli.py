"""The command ``gradfilter``. Everything else, torch above all, is imported when a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import GradFilterError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .plans import Plan

__all__ = ["main"]

EXAMPLES = """\
examples:
  gradfilter demo                                          exact and filtered training, side by side
  gradfilter plan resnet18 --layers last:4 --patch 4       what would change, and the bytes it saves
  gradfilter plan mcunet-5fps --size 128 --batch 32 --layers all --taps collapse
  gradfilter analyze mobilenet_v2 --weights mobilenet_v2.pth --size 96
  gradfilter bench layers --json layers.json               single layers, exact against filtered
  gradfilter bench step resnet18 --layers last:4           whole training steps, inference to filtered
  gradfilter models                                        names for MODEL
"""
DTYPES = ("float32", "bfloat16", "float64")
BENCH_EXAMPLES = {
    "layers": """\
examples:
  gradfilter bench layers
  gradfilter bench layers --batch 1 --threads 1 --rounds 5 --markdown
  gradfilter bench layers --dtype bfloat16 --json layers.json
""",
    "regions": """\
examples:
  gradfilter bench regions
  gradfilter bench regions --batch 2 --threads 1 --json regions.json
""",
    "step": """\
arms: inference, inference+prefix, exact-all, exact, filter, exact+prefix, filter+prefix, exact+cache and
  filter+prefix+cache. +prefix is gf.accelerate_; +cache starts from features of the frozen layers.

examples:
  gradfilter bench step resnet18 --layers last:4 --patch 2
  gradfilter bench step mobilenet_v2 --layers all --patch 4 --batch 4 --json step.json --png step.png
  gradfilter bench step mcunet-5fps --size 128 --arms inference,exact,filter --no-memory --csv step.csv
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for what the user can put right, or 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch says so; nothing here needs it
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except GradFilterError as error:
        print(f"gradfilter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gradfilter: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `gradfilter models | head`: nobody reads on, and that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gradfilter",
        description="Train convolutional networks on small devices: the backward runs on patches.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_analyze(commands)
    _add_bench(commands)
    models = commands.add_parser("models", help="list the models that MODEL may name")
    models.set_defaults(run=_models)
    return parser


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong command line, like every other error, instead of the whole usage."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a small network exactly and filtered, side by side")
    demo.add_argument("--steps", type=_count, default=80, help="training steps per method (default: 80)")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import compare
    from .progress import Progress

    with Progress() as tell:
        made = compare(steps=arguments.steps, tell=tell)
    print(made)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="show what would change in a model, and what that saves")
    _add_planning(plan, size=224)
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    import torch

    model = _model(arguments)
    print(_planned(arguments, model, torch.empty(arguments.batch, 3, arguments.size, arguments.size)))


def _add_analyze(commands: Any) -> None:
    analyze = commands.add_parser("analyze", help="compare filtered gradients with exact ones by layer")
    _add_planning(analyze, size=96)
    analyze.add_argument("--data", metavar="FOLDER", help="pictures, one folder per class (default: noise)")
    analyze.set_defaults(run=_analyze)


def _analyze(arguments: argparse.Namespace) -> None:
    import torch

    from .analysis import analyze
    from .pictures import batch_from_folder

    torch.manual_seed(0)
    model = _model(arguments).eval()
    if arguments.data:
        images, labels = batch_from_folder(arguments.data, arguments.batch, arguments.size)
    else:
        images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
        labels = torch.arange(arguments.batch) % 2
    print(analyze(model, (images, labels), _classification_loss, _planned(arguments, model, images)))


def _classification_loss(output: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    classes = output.shape[1] if hasattr(output, "shape") and len(output.shape) == 2 else 0
    if int(labels.max()) >= classes:
        raise GradFilterError(
            f"The model does not tell {int(labels.max()) + 1} classes apart, as this command needs here; "
            "gradfilter.analyze in Python takes any model and loss."
        )
    return cross_entropy(output, labels)


def _add_planning(parser: argparse.ArgumentParser, *, size: int) -> None:
    _add_model(parser, size=size)
    add = parser.add_argument
    add("--norm", choices=["fixed", "affine", "batch"], default="fixed", help="batch norms (default: fixed)")
    add("--batch", type=_count, default=8, help="pictures in a batch (default: 8)")


def _add_model(parser: argparse.ArgumentParser, *, size: int) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name; `gradfilter models` lists most")
    add("--layers", default="last:4", help='which train: "last:4" (default), "all", "layer4.*" ...')
    add("--patch", type=_count, default=2, help="gradient filtering: side of the patches (default: 2)")
    add("--taps", choices=["overlap", "collapse"], default="overlap", help="default: overlap")
    add("--method", help='another method, as in docs/methods.md: "Quantized(bits=4)" ...')
    add("--size", type=_count, default=size, help=f"side of the pictures (default: {size})")
    add("--classes", type=_count, help="outputs of the model (default: as usual)")
    add("--weights", metavar="FILE", help="weights, .safetensors or .pth (default: random)")


def _model(arguments: argparse.Namespace) -> nn.Module:
    from .models import build

    return build(arguments.model, classes=arguments.classes, weights=arguments.weights)


def _planned(arguments: argparse.Namespace, model: nn.Module, example: Tensor) -> Plan:
    from .costs import plan
    from .methods import GradientFilter
    from .methods.text import method_from

    patch, taps = arguments.patch, arguments.taps
    method = method_from(arguments.method) if arguments.method else GradientFilter(patch, taps)
    return plan(model, method, arguments.layers, norm=arguments.norm, example=example)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure filtered against exact training on this machine")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    helps = {
        "layers": "the backward of single convolutions",
        "regions": "forward, backward and kept bytes of ResNet-18 and MobileNetV2",
        "step": "whole training steps of any model: time, memory, energy",
    }
    for name, help_ in helps.items():
        kind = kinds.add_parser(
            name,
            help=help_,
            epilog=BENCH_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "step":
            _add_step(kind)
        kind.add_argument("--batch", type=_count, default=8, help="pictures in a batch (default: 8)")
        rounds = 15 if name == "step" else 9
        kind.add_argument(
            "--rounds", type=_count, default=rounds, help="measurements per method (default: %(default)s)"
        )
        kind.add_argument("--threads", type=_count, default=2, help="threads that torch may use (default: 2)")
        if name != "regions":
            kind.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
            kind.add_argument("--device", default="cpu", help="where to run (default: cpu)")
        kind.add_argument("--markdown", action="store_true", help="print the table as Markdown")
        kind.add_argument("--json", metavar="FILE", help="also write all numbers to a file")
        kind.set_defaults(run=_bench_step if name == "step" else _bench, benchmark=name)


def _add_step(kind: argparse.ArgumentParser) -> None:
    _add_model(kind, size=224)
    kind.add_argument("--arms", help="what to compare, with commas between (default: everything)")
    kind.add_argument(
        "--no-memory", action="store_true", help="leave out peak memory, which takes a process per arm"
    )
    kind.add_argument(
        "--one-process",
        action="store_true",
        help="all arms in one process: needs less memory, blurs the times",
    )
    kind.add_argument("--csv", metavar="FILE", help="also write a spreadsheet, one row per arm")
    kind.add_argument("--png", metavar="FILE", help="also draw a picture; needs matplotlib")


def _bench(arguments: argparse.Namespace) -> None:
    import torch

    from .bench import layers, regions
    from .progress import Progress

    _check_writable(arguments.json)
    torch.set_num_threads(arguments.threads)
    with Progress() as tell:
        if arguments.benchmark == "layers":
            where = {"dtype": arguments.dtype, "device": arguments.device}
            record = layers.measure(arguments.batch, rounds=arguments.rounds, tell=tell, **where)
        else:
            record = regions.measure(arguments.batch, rounds=arguments.rounds, tell=tell)
    _report(arguments, record)


def _bench_step(arguments: argparse.Namespace) -> None:
    from dataclasses import fields

    from .bench import charts, report, step
    from .bench.arm import Settings
    from .progress import Progress

    for file in (arguments.json, arguments.csv, arguments.png):
        _check_writable(file)
    if arguments.png:
        charts.check_matplotlib()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    arms = [name.strip() for name in arguments.arms.split(",")] if arguments.arms else step.ARMS
    with Progress() as tell:
        record = step.measure(settings, arms, not arguments.no_memory, tell, arguments.one_process)
    picture = charts.step_chart(record) if arguments.png else b""
    if arguments.csv:
        report.write(arguments.csv, report.csv_of(step.cells(record)))
    if arguments.png:
        report.write(arguments.png, picture)
    _report(arguments, record)


def _report(arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    import json

    from .bench import report

    if arguments.json:
        report.write(arguments.json, json.dumps(record, indent=1) + "\n")
    print(report.markdown(record) if arguments.markdown else report.text(record))


def _check_writable(file: str | None) -> None:
    """Before the measuring, so that a wrong name does not cost its minutes."""
    if file and (Path(file).is_dir() or not os.access(Path(file).parent, os.W_OK)):
        raise GradFilterError(f"{file} cannot be written; give a file in a folder that exists.")


def _models(arguments: argparse.Namespace) -> None:
    from .models import names

    print("\n".join(names()))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
