"""gradfilter bench: filtered against exact training, measured on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from .options import add_command, add_model, check_writable, count

__all__ = ["EXAMPLES", "add"]

DTYPES = ("float32", "bfloat16", "float64")
EXAMPLES = {
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
  Only if asked for: inference+int8, exact+int8, filter+int8, with gf.accelerate_(model, prefix="int8").

examples:
  gradfilter bench step resnet18 --layers last:4 --patch 2
  gradfilter bench step mobilenet_v2 --layers all --patch 4 --batch 4 --json step.json --png step.png
  gradfilter bench step mcunet-5fps --size 128 --arms inference,exact,filter --no-memory --csv step.csv
""",
}


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure filtered against exact training on this machine")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    helps = {
        "layers": "the backward of single convolutions",
        "regions": "forward, backward and kept bytes of ResNet-18 and MobileNetV2",
        "step": "whole training steps of any model: time, memory, energy",
    }
    for name, help_ in helps.items():
        kind = add_command(kinds, name, help_, EXAMPLES[name])
        if name == "step":
            _add_step(kind)
        kind.add_argument("--batch", type=count, default=8, help="pictures in a batch (default: 8)")
        rounds = 31 if name == "step" else 9
        kind.add_argument(
            "--rounds", type=count, default=rounds, help="measurements per method (default: %(default)s)"
        )
        kind.add_argument("--threads", type=count, default=2, help="threads that torch may use (default: 2)")
        if name != "regions":
            kind.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
            kind.add_argument("--device", default="cpu", help="where to run (default: cpu)")
        kind.add_argument("--markdown", action="store_true", help="print the table as Markdown")
        kind.add_argument("--json", metavar="FILE", help="also write all numbers to a file")
        kind.set_defaults(run=_bench_step if name == "step" else _bench, benchmark=name)


def _add_step(kind: argparse.ArgumentParser) -> None:
    add_model(kind, size=224)
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

    from ..bench import layers, regions
    from ..progress import Progress

    check_writable(arguments.json)
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

    from ..bench import charts, report, step
    from ..bench.arm import Settings
    from ..progress import Progress

    for file in (arguments.json, arguments.csv, arguments.png):
        check_writable(file)
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

    from ..bench import report

    if arguments.json:
        report.write(arguments.json, json.dumps(record, indent=1) + "\n")
    print(report.markdown(record) if arguments.markdown else report.text(record))
